"""Integration with Lightning and accelerate: they run the loader and do not shard it again.

Lightning does not replace a `sampler` that is a DistributedSampler. For prediction it rebuilds the loader from its
keywords, so `Loader.__init__` keeps them as attributes. Fabric counts epochs from 0 in each process (`TrainerEpochs`).

accelerate shards each DataLoader that it has not prepared itself (`PreparedForAccelerate`). Its wrapper of a DataLoader
reports the start and end of an epoch; here the loader does (`accelerate_iteration`). Its scheduler takes one step for
each rank unless `split_batches=True` or `step_scheduler_with_optimizer=False` is set. Its `skip_first_batches` iterates
the sampler and counts batches from the start of the epoch (`TrainerEpochs.__iter__`).

Neither library is imported unless the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dataload.errors import ConfigError
from dataload.samplers.mixture.sampler import MixtureSampler
from dataload.samplers.rank_sampler import RankSampler
from dataload.samplers.row_iterator import RowIterator
from dataload.samplers.sharded import ShardedSampler

if TYPE_CHECKING:
    from dataload.mixture import Mixture


class PreparedForAccelerate:
    """A loader that `accelerator.prepare` returns unchanged. `save_state` and `load_state` include its state."""

    # accelerate has no public name for "already sharded". With this one, it takes the loader for prepared.
    _is_accelerate_prepared: ClassVar = True
    use_stateful_dataloader: ClassVar = True


@contextmanager
def accelerate_iteration(remainder: int) -> Iterator[Callable[[], None]]:
    """Report an iteration of a loader to accelerate, if the program uses accelerate.

    Args:
        remainder: Rows of the last global batch without its padding, which `gather_for_metrics` cuts off. 0: it has no
            padding.

    Yields:
        A function to call before the last batch is yielded. accelerate then synchronizes accumulated gradients.
    """
    if not _accelerate_runs():
        yield lambda: None
        return
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    progress: Any = type("Progress", (DataLoaderStateMixin,), {"gradient_state": GradientState()})()
    progress.begin()
    progress.remainder = remainder
    try:
        yield partial(setattr, progress, "end_of_dataloader", True)
    finally:
        progress.end()


def trainer_device() -> torch.device | None:
    """Return the device to which accelerate copies batches. None: the CPU, or the program does not use accelerate."""
    if not _accelerate_runs():
        return None
    from accelerate.state import PartialState

    device: torch.device = PartialState().device
    return None if device.type == "cpu" else device


class TrainerEpochs(RankSampler):
    """The epochs of a sampler for training loops that count epochs or batches again after a restart.

    Fabric passes `set_epoch` the number of loops that this process has begun. If the first number after a restart is
    below the restored epoch, it means the restored epoch, and later numbers have the same offset. This applies only if
    Fabric has been imported.
    """

    _offset = 0
    _restored = False
    yielded: tuple[int, int] | None = None  # (epoch, rows of it) of the loader's iterator that yielded last
    ended_padding: int | None = None  # of the loader's iteration that ended, until the next one begins

    def __iter__(self) -> Iterator[int]:
        """Yield the rank's rows of the whole epoch, also after a restored position, at which the loader itself begins.

        After a restart, accelerate and the Hugging Face Trainer skip the batches that the epoch had before.
        """
        return RowIterator(lambda: (self.epoch, 0), self._rows_from)

    @property
    def generator(self) -> torch.Generator:
        """Of those who get a loader, only `accelerate.data_loader.prepare_data_loader` asks its sampler for one.

        It does so before it shards the sampler among the ranks, for a second time.
        """
        raise ConfigError(
            "prepare_data_loader would shard this loader among the ranks a second time: use the loader as it is, or "
            "accelerator.prepare(loader), which does not shard it"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position, as in `RankSampler`."""
        super().load_state_dict(state)
        self._restored = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as in `RankSampler`, with the offset of a restart."""
        if self._restored and {"lightning.fabric.wrappers", "lightning_fabric.wrappers"} & sys.modules.keys():
            self._offset = max(0, self.epoch - epoch)
        self._restored = False
        self.begin(epoch + self._offset)

    def begin(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as in `RankSampler`, and forget the last one."""
        super().set_epoch(epoch)
        self.yielded = self.ended_padding = None

    def end(self, cursor: int) -> None:
        """Begin the next epoch, after an iteration that began at `cursor`. The padding of the iteration is kept."""
        padding = self.padding_from(cursor)
        self.begin(self.epoch + 1)
        self.ended_padding = padding

    def padding_ahead(self) -> int:
        """Return the number of padding rows of the iteration that goes on or comes next."""
        self.renew()
        return self.padding_from(self.cursor)

    def seek(self, epoch: int, cursor: int) -> None:
        """Move to a position, as in `RankSampler`, and forget the last iteration."""
        super().seek(epoch, cursor)
        self.yielded = self.ended_padding = None

    def renew(self) -> None:
        """Follow changes of the dataset, such as new weights of a mixture, unless an epoch goes on."""


class TrainerSampler(TrainerEpochs, ShardedSampler):
    """The sampler of a loader over a dataset."""


class TrainerMixtureSampler(TrainerEpochs, MixtureSampler):
    """The sampler of a loader over a mixture, which follows the weights of the mixture.

    Args:
        mixture: The mixture.
        num_replicas: Number of ranks.
        rank: Number of this rank.
        **order: Other arguments of `MixtureSampler`.
    """

    def __init__(self, mixture: Mixture, num_replicas: int, rank: int, **order: Any) -> None:
        super().__init__(mixture.sources, num_replicas, rank, **mixture.order, **order)
        self._mixture = mixture

    @property
    def next_weights(self) -> list[int] | None:
        """The weights of the mixture, which the next epoch will have, if they are others."""
        return None if self._mixture.weights == self.order.weights else list(self._mixture.weights)

    def renew(self) -> None:
        """Use the current weights of the mixture, as in `TrainerEpochs`."""
        if self._mixture.weights == self.next_order.weights:
            return
        epoch, rows = self.yielded or (None, 0)
        if epoch == self.epoch and self.finished_at(rows):  # The last loop took exactly len(loader) batches.
            self.seek(self.epoch + 1, 0)
        elif epoch == self.epoch or self.cursor:
            return
        self.set_weights(self._mixture.weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position and the weights. The mixture then has them, too, or those of the next epoch."""
        super().load_state_dict(state)
        self._mixture.weights = self.next_order.weights

    def _known_weights(self) -> list[Sequence[int]]:
        return [*super()._known_weights(), *self._mixture.earlier_weights]


def _accelerate_runs() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized()

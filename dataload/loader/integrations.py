"""Integration with Lightning, accelerate and timm: they run the loader and do not shard it again.

Lightning does not replace a `sampler` that is a DistributedSampler. For prediction it rebuilds the loader from its
keywords, so `Loader.__init__` keeps them as attributes. Fabric counts epochs from 0 in each process, and a
CombinedLoader has several epochs of a short loader in one of the Trainer (`TrainerEpochs`).

accelerate shards each DataLoader that it has not prepared itself (`PreparedForAccelerate`). Its wrapper of a DataLoader
reports the start and end of an epoch; here the loader does (`accelerate_iteration`). Its scheduler takes one step for
each rank unless `split_batches=True` or `step_scheduler_with_optimizer=False` is set. Its `skip_first_batches` makes a
DataLoader of its own (`trainer_batches`), which iterates the sampler and counts batches from the start of the epoch.

The collate functions of timm take pairs (`with_pairs`); those of other libraries take the rows as they are.

No library is imported unless the program has imported it. Nothing here has a state: positions are the sampler's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch

from dataload.samplers.position import Position
from dataload.samplers.rank_sampler import RankSampler, Rest


class PreparedForAccelerate:
    """A loader that `accelerator.prepare` returns unchanged. `save_state` and `load_state` include its state."""

    # accelerate has no public name for "already sharded". With this one, it takes the loader for prepared.
    _is_accelerate_prepared: ClassVar = True
    use_stateful_dataloader: ClassVar = True


@contextmanager
def accelerate_iteration(remainder: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """Report an iteration of a loader to accelerate, if the program uses accelerate.

    Args:
        remainder: Returns the rows of the last global batch without its padding, which `gather_for_metrics` cuts off.
            0: it has no padding.

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
    progress.remainder = remainder()
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
    """A sampler for training loops that count epochs or batches again after a restart, or have epochs of their own."""

    _trainer_epoch: int | None = None  # of Lightning's Trainer

    def __iter__(self) -> Iterator[int]:
        """Yield the rank's rows of the whole epoch, also after a restored position, at which the loader itself begins.

        After a restart, accelerate and the Hugging Face Trainer skip the batches that the epoch had before.
        """
        return self._iterator(lambda: (self.epoch, 0))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as in `RankSampler`, except for Lightning after a restart.

        The Trainer passes its own epoch, in which a CombinedLoader may have begun several of a short loader. If the
        state was taken in that epoch, the position stays. Fabric passes the number of loops that this process has
        begun. A number below the restored epoch means the next loop: that of this epoch, or of the next one if this one
        has begun.
        """
        if _lightning_trainer_calls():
            if not (self.restored and epoch == self._trainer_epoch):
                self.seek(epoch, self.cursor if self._trainer_epoch is None and epoch == self.epoch else 0)
            self._trainer_epoch = epoch
        elif not (self.restored and epoch < self.epoch and _fabric_runs()):
            self.begin(epoch)
        elif self.handed_out_in_epoch is not None:
            self.end_epoch()

    def begin(self, epoch: int) -> None:
        """Set the epoch, as the loader and not Fabric numbers it."""
        super().set_epoch(epoch)

    @property
    def saved_position(self) -> Position:
        """The position that a state has, as in `RankSampler`, and the epoch of Lightning's Trainer if it is another."""
        position = super().saved_position
        if self._trainer_epoch in (None, position.epoch):
            return position
        return position.with_options(trainer_epoch=self._trainer_epoch)

    def load_state_dict(self, state: Mapping[str, Any], rest: Rest | None = None) -> None:
        """Continue where `state` was taken, as in `RankSampler`."""
        super().load_state_dict(state, rest)
        self._trainer_epoch = state.get("trainer_epoch")


def with_pairs(collate_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a collate function of rows. One of timm, or of a class derived from one, takes (image, target)
    pairs: it gets the values of each row.
    """
    function = getattr(collate_fn, "func", collate_fn)  # of a partial
    modules = {str(getattr(each, "__module__", "")) for each in (function, *type(function).__mro__)}
    if collate_fn is None or all(module.partition(".")[0] != "timm" for module in modules):
        return collate_fn
    return partial(_collate_pairs, collate_fn)


def _collate_pairs(collate_fn: Callable[..., Any], rows: list[dict[str, Any]]) -> Any:
    return collate_fn([tuple(row.values()) for row in rows])


def _accelerate_runs() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized()


def _lightning_trainer_calls() -> bool:
    """Return whether a loop of Lightning's Trainer sets the epoch, through a helper of Fabric's."""
    loop = sys._getframe(2).f_back  # noqa: SLF001 (this function, set_epoch, the helper, the loop)
    name = "" if loop is None else str(loop.f_globals.get("__name__"))
    return name.startswith(("lightning.pytorch.", "pytorch_lightning."))


def _fabric_runs() -> bool:
    return bool({"lightning.fabric.wrappers", "lightning_fabric.wrappers"} & sys.modules.keys())

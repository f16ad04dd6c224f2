"""What Lightning and accelerate need to see in a loader, so that they drive it and do not shard it again.

Lightning leaves a loader alone whose `sampler` is a DistributedSampler. To predict it builds the loader anew from its
keywords, which `Loader.__init__` therefore keeps as attributes. Fabric counts epochs from 0 in each process
(`TrainerSampler`).

accelerate asks no sampler: it shards every DataLoader but one that it takes for its own (`Unwrapped`), and what its own
wrapper would have told it about the epoch, the loader tells it (`announced`). Its scheduler takes one step for each
rank unless told that `split_batches=True` or `step_scheduler_with_optimizer=False`.

Nothing of theirs is imported unless the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch

from dataload.samplers.sharded import ShardedSampler


class Unwrapped:
    """A loader that `accelerator.prepare` returns as it is, and whose state `save_state` and `load_state` carry."""

    # accelerate has no public word for "already sharded"; with this one it takes the loader for prepared.
    _is_accelerate_prepared: ClassVar = True
    use_stateful_dataloader: ClassVar = True


@contextmanager
def announced(remainder: int) -> Iterator[Callable[[], None]]:
    """Inside, accelerate knows that a loader is being iterated, if the program uses accelerate.

    remainder: rows of the last global batch when some of it is padding, which `gather_for_metrics` then cuts off; else
        0. Yields what is to be called before the last batch is handed out: gradients accumulated so far are then
        synchronised.
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
    """Where accelerate's own loaders would put batches; None: nowhere, or there is no accelerate at work."""
    if not _accelerate_runs():
        return None
    from accelerate.state import PartialState

    device: torch.device = PartialState().device
    return None if device.type == "cpu" else device


class TrainerSampler(ShardedSampler):
    """A sampler for loops whose epochs may be counted anew after a restart.

    Fabric sets, as the epoch, how many loops this process has begun. The first number after a restart that is below the
    restored epoch therefore stands for it, and later ones count on from there. Only where Fabric has been imported.
    """

    _behind = 0
    _restored = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._restored = True

    def set_epoch(self, epoch: int) -> None:
        """As in `ShardedSampler`."""
        if self._restored and {"lightning.fabric.wrappers", "lightning_fabric.wrappers"} & sys.modules.keys():
            self._behind = max(0, self.epoch - epoch)
        self._restored = False
        super().set_epoch(epoch + self._behind)


def _accelerate_runs() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized()

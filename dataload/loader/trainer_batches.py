"""The batches of a loader for a DataLoader that a trainer makes of the loader's parts.

accelerate's `skip_first_batches` makes one, by which the Hugging Face Trainer reads the rest of a resumed epoch. It
takes row numbers from the loader's `batch_sampler`, and batches from its `collate_fn`, perhaps in workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakValueDictionary

from torch.utils.data import BatchSampler, get_worker_info

from dataload.errors import ConfigError
from dataload.loader.batch_maker import BatchMaker
from dataload.loader.integrations import TrainerEpochs
from dataload.rows.numbered_rows import NumberedRows, PlacedRows
from dataload.telemetry.loader_stats import LoaderStats

if TYPE_CHECKING:
    from dataload.loader.loader_metrics import LoaderMetrics


class LatestLoop:
    """The latest loop over a loader, or over a DataLoader that a trainer has made of it.

    Args:
        metrics: The metrics of the loader; None: they are not served.

    Attributes:
        stats: Its statistics. A trainer's DataLoader counts rows and batches only.
    """

    def __init__(self, metrics: LoaderMetrics | None = None) -> None:
        self._metrics = metrics
        self.begin(LoaderStats())
        self._key = uuid4().hex
        _loops[self._key] = self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the metrics, which this process serves."""
        return {**vars(self), "_metrics": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _loops.setdefault(self._key, self)

    def begin(self, stats: LoaderStats, padding: Callable[[], int] | None = None) -> None:
        """Begin a loop. padding: returns its padding."""
        self.stats = stats
        self._padding = padding
        if self._metrics is not None:
            self._metrics.begin(self, stats)

    @property
    def padding(self) -> int | None:
        """Its padding; None if it is a trainer's."""
        return None if self._padding is None else self._padding()

    def collate(self, maker: BatchMaker, rows: NumberedRows) -> Any:
        """Return a batch for a trainer's DataLoader, and count it. A batch of a worker counts when it arrives."""
        batch, by_source, skipped = maker.collate(rows)
        counts = by_source, [*skipped.values()]
        if get_worker_info() is not None:
            return _Sent(self._key, batch, len(rows.numbers), *counts)
        return _arrived(self._key, batch, len(rows.numbers), *counts)


_loops = WeakValueDictionary[str, LatestLoop]()


class _Sent:
    """A batch on its way from a worker, which counts when it is unpickled."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> Any:
        return _arrived, self._arguments


def _arrived(key: str, batch: Any, *counts: Any) -> Any:
    if (loop := _loops.get(key)) is not None:
        loop.stats.count(*counts)
    return batch


class TrainerBatches(BatchSampler):
    """The `batch_sampler` of a loader for other DataLoaders. It has the whole epoch.

    Args:
        sampler: The sampler of the loader.
        batch_size: Rows of a batch.
        drop_last: As in torch.
        begin: Called with the statistics of an epoch when its batches begin.
    """

    def __init__(
        self,
        sampler: TrainerEpochs,
        batch_size: int,
        drop_last: bool,
        begin: Callable[[LoaderStats], object] = lambda _: None,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._begin = begin

    @property
    def sampler(self) -> TrainerEpochs:
        """The sampler.

        Raises:
            ConfigError: accelerate's `prepare_data_loader` asks for it, which would shard the batches.
        """
        if _is_sharded():
            raise ConfigError(
                "prepare_data_loader would shard this loader among the ranks a second time: use the loader as it is, "
                "or accelerator.prepare(loader), which does not shard it"
            )
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: TrainerEpochs) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[PlacedRows]:
        """Yield the row numbers of each batch of the epoch."""
        sampler = self._sampler
        self._begin(LoaderStats(sampler.epoch, rank=sampler.rank, world_size=sampler.num_replicas))
        stream, draw = sampler.steps.seeds(sampler.epoch)
        rows = iter(sampler)
        for run, cursor, step in sampler.steps.runs(sampler.epoch, 0):
            for number, batch in enumerate(run):
                yield PlacedRows(list(islice(rows, len(batch))), (stream, cursor + number * step), draw)
        next(rows, None)  # This ends the epoch.

    def __len__(self) -> int:
        return self._sampler.steps.left(self._sampler.epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. The Hugging Face Trainer does so here if it has skipped batches."""
        self._sampler.begin(epoch)


def _is_sharded() -> bool:
    """Return whether accelerate's `prepare_data_loader` asks, and is about to divide the batches among ranks."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None and frame.f_globals.get("__name__") == "accelerate.data_loader":
        asked = frame.f_locals
        if frame.f_code.co_name == "prepare_data_loader":
            ranks = asked["state"].num_processes if asked["dispatch_batches"] else asked["num_processes"]
            return bool(ranks > 1)
        frame = frame.f_back
    return False

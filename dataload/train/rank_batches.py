"""The batches of a rank in an epoch, with row counts of all ranks and a mark on the last batch."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.loader.worker_start import begin_worker, started
from dataload.rows.batch_tree import map_columns
from dataload.rows.collate import Flat
from dataload.telemetry.spans import stage
from dataload.train.ranks.collectives import gather, gather_count
from dataload.world import World


class RankBatch(NamedTuple):
    """A batch of this rank, and what it weighs.

    A rank that runs out of batches before the others gets its last batch again with rows=0, because it must take part
    in their collectives.

    Attributes:
        batch: The batch, on the host.
        rows: Rows of the batch that count.
        all_rows: Sum of `rows` over all ranks.
        weight: What the batch weighs in the gradient: its rows, or what `weigh` returned.
        all_weight: Sum of `weight` over all ranks.
        last: Whether no rank has another batch.
        ending: Whether a rank has no further batch.
        state: State of the loader after this batch and before the next one.
    """

    batch: Any
    rows: int
    all_rows: int
    weight: float
    all_weight: float
    last: bool
    ending: bool
    state: Any


def feed(
    loader: Iterable[Any],
    counts: MutableMapping[str, float],
    world: World,
    even: bool,
    state_of: Callable[[], Any],
    begin: Callable[[], None],
    mesh: DeviceMesh | None = None,
    weigh: Callable[[Any], float] | None = None,
) -> Iterator[RankBatch]:
    """Yield each batch of this rank that has rows. Fetch one batch ahead.

    Args:
        loader: This rank's batches.
        counts: Seconds that this rank waits for batches are added to counts["wait_seconds"], and those that it waits
            for other ranks to counts["sync_seconds"].
        world: This rank, and the number of ranks.
        even: Whether all ranks have equally many batches of equal sizes. Otherwise they exchange the size of each.
        state_of: Returns the state of the loader.
        begin: Called when the first batch has arrived.
        mesh: The data-parallel dimensions of the ranks; None if all ranks are data-parallel.
        weigh: Returns what a batch weighs; None: its rows.

    Raises:
        ConfigError: The loaders of some ranks are empty and those of others are not (on every rank).
    """
    # Batches without rows are skipped: they have no mean, and a count of 0 marks a rank without further batches.
    batches, end = filter(num_rows, loader), object()

    def take() -> tuple[Any, list[int], Sequence[float]]:
        started = perf_counter()
        with stage("wait for batch"):
            batch = next(batches, end)
        counts["wait_seconds"] += perf_counter() - started
        rows = 0 if batch is end else num_rows(batch)
        weight = weigh(batch) if rows and weigh is not None else 0.0
        started = perf_counter()
        all_rows = [rows] * world.world_size if even else gather_count(rows, mesh)
        weights = all_rows if weigh is None else gather_count(weight, mesh)
        counts["sync_seconds"] += perf_counter() - started
        return batch, all_rows, weights

    batch, rows, weights = take()
    if any(rows) and not all(rows):
        empty = [rank for rank, count in enumerate(rows) if not count]
        raise ConfigError(f"the loader gave no batch on ranks {empty}: each rank needs at least one")
    begin()
    while any(rows):
        state = state_of()  # before the next batch is fetched, which this step does not use
        following, following_rows, following_weights = take()
        last, ending = not any(following_rows), not all(following_rows)
        yield RankBatch(batch, rows[world.rank], sum(rows), weights[world.rank], sum(weights), last, ending, state)
        batch = batch if following is end else following
        rows, weights = following_rows, following_weights


def even_batches(loader: Any) -> bool:
    """Return whether all ranks know that they have equally many batches of equal sizes: with this package's loader."""
    known = isinstance(loader, Loader) and loader.maker.only_gathers and loader.rank_sampler.steps.is_even
    sizes = gather((loader.batch_size, len(loader)) if known else None)
    return None not in sizes and len(set(sizes)) == 1


def batches_on(
    loader: Iterable[Any],
    device: torch.device,
    stats_dir: Path | None = None,
    ledger_dir: Path | None = None,
    progress: Mapping[str, int] | None = None,
) -> Iterable[Any]:
    """Return the batches of an epoch. A loader of this package itself copies them to a GPU, from pinned memory.

    Args:
        loader: This rank's batches.
        device: The device of the model.
        stats_dir: Where a loader of this package without a `stats_dir` writes its statistics; None: nowhere.
        ledger_dir: As for `Loader.batches_on`.
        progress: As for `Loader.batches_on`.
    """
    if isinstance(loader, DataLoader):
        _prepare_workers(loader)
    if not isinstance(loader, Loader):
        return started(loader) if isinstance(loader, DataLoader) else loader
    return loader.batches_on(None if device.type == "cpu" else device, stats_dir, ledger_dir, progress)


_prepared = weakref.WeakSet[DataLoader[Any]]()  # once each: torch draws more seeds for a stream of torchdata


def _prepare_workers(loader: DataLoader[Any]) -> None:
    """Keep signals to the process group from the workers of torch's DataLoader, and their seed from the loop.

    A signal that ends the run would end its workers before `fit` has saved. And torch draws the seed of persistent
    workers when it starts them, which a resumed run does in a later epoch: from the global generator, it would then get
    other random numbers than an uninterrupted run.
    """
    if loader in _prepared:
        return
    if loader.num_workers and not isinstance(loader, Loader):
        loader.worker_init_fn = partial(begin_worker, loader.worker_init_fn)
    if loader.persistent_workers:
        seed = (loader.generator or torch.default_generator).initial_seed()
        loader.generator = torch.Generator("cpu").manual_seed(seed)
    _prepared.add(loader)


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch; 0 if it has no columns.

    A batch is one tensor, or a tuple, list or (nested) dict of columns. The first dimension that most of its tensors
    and arrays have counts; if as many have another one, that of the first column. Empty ones count only if all are: a
    batch of images without any boxes has rows. The length of a list counts only if no tensor or array has rows, because
    a list may also hold columns.

    Raises:
        ConfigError: No column has a length.
    """
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    columns: list[Any] = []

    def collect(column: Any) -> Any:
        columns.append(column.offsets[1:] if isinstance(column, Flat) else column)
        return column  # map_columns rebuilds the batch, whose class may validate its columns.

    map_columns(batch, collect)
    shapes = [column.shape for column in columns if hasattr(column, "shape")]
    tensors = [shape[0] for shape in shapes if shape]
    lists = [
        len(column)
        for column in columns
        if isinstance(column, Sized) and not isinstance(column, (str, bytes)) and not hasattr(column, "shape")
    ]
    if columns and not tensors and (shapes or not lists):
        raise ConfigError(
            f"the rows of a batch of type {type(batch).__name__} cannot be counted: give a dict, tuple or list in "
            "which a tensor or a list has one entry per row"
        )
    counted: Counter[int] = Counter(filter(None, tensors)) or Counter(filter(None, lists)) or Counter([0])
    return counted.most_common(1)[0][0]

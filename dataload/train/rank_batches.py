"""The batches of an epoch as the steps take them: which is the last, how many rows, on this rank and on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sized
from time import perf_counter
from typing import Any, NamedTuple

from dataload.errors import ConfigError
from dataload.rows.collate import Flat, map_columns
from dataload.telemetry.spans import stage
from dataload.train.distributed import gather_count
from dataload.world import World


class RankBatch(NamedTuple):
    """batch: of `rows` rows, of which all ranks together have `all_rows`. last: no rank has another one.

    A rank that has run out while others go on is fed its last batch again, with rows=0: it has to take part in what
    the ranks do together. state: where the loader was when this batch, and none after it, had been taken.
    """

    batch: Any
    rows: int
    all_rows: int
    last: bool
    state: Any


def feed(
    loader: Iterable[Any],
    counts: MutableMapping[str, float],
    world: World,
    even: bool,
    state_of: Callable[[], Any],
    begun: Callable[[], None],
) -> Iterator[RankBatch]:
    """Each batch of this rank that has rows; seconds waited for them are added to counts["wait_seconds"].

    even: all ranks are known to have equally many batches of equally many rows; else they tell each other before each.
    state_of: says where the loader is. begun: called when the first batch is there.
    Raises ConfigError, on every rank, when some rank's loader is empty and another's is not.
    """
    # There is no mean over a batch without rows. And so a count of 0 says that a rank has run out.
    batches, end = filter(num_rows, loader), object()

    def take() -> tuple[Any, list[int]]:
        started = perf_counter()
        with stage("wait for batch"):
            batch = next(batches, end)
        counts["wait_seconds"] += perf_counter() - started
        rows = 0 if batch is end else num_rows(batch)
        return batch, [rows] * world.world_size if even else gather_count(rows)

    batch, rows = take()
    if any(rows) and not all(rows):
        without = [rank for rank, count in enumerate(rows) if not count]
        raise ConfigError(f"the loader gave no batch on ranks {without}: each rank needs one at least")
    begun()
    while any(rows):
        state = state_of()  # before the next batch is asked for, which this step does not use
        following, following_rows = take()
        yield RankBatch(batch, rows[world.rank], sum(rows), not any(following_rows), state)
        batch, rows = batch if following is end else following, following_rows


def num_rows(batch: Any) -> int:
    """Rows of a batch: a dict (of dicts, too), tuple or list of columns, or one tensor; 0 where there is no column.

    Tensors and arrays say it; lists do where there are none, for a list may also be one of columns.
    Raises ConfigError when nothing in the batch says it.
    """
    columns: list[Any] = []

    def collect(column: Any) -> Any:
        if column is not None:
            columns.append(column.offsets[1:] if isinstance(column, Flat) else column)
        return column  # map_columns rebuilds the batch, whose class may validate its columns.

    map_columns(batch, collect)
    shapes = [column.shape for column in columns if hasattr(column, "shape")]
    sizes = [shape[0] for shape in shapes if shape] or [
        len(some) for some in columns if isinstance(some, Sized) and not isinstance(some, (str, bytes)) and not shapes
    ]
    if columns and not sizes:
        raise ConfigError(
            f"the rows of a batch of type {type(batch).__name__} cannot be counted: give a dict, tuple or list in "
            "which a tensor or a list has one entry for each row"
        )
    return min(sizes, default=0)

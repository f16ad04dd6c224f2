"""The batches of an epoch as the steps take them: which is the last, how many rows, on this rank and on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from dataload.batch import Flat
from dataload.distributed import gather
from dataload.errors import ConfigError
from dataload.stages import stage
from dataload.world import World


class Fed(NamedTuple):
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
) -> Iterator[Fed]:
    """Each batch of this rank; seconds waited for them are added to counts["wait_seconds"].

    even: all ranks have equally many batches of equally many rows; else they tell each other before each.
    state_of: says where the loader is. begun: called when the first batch is there.
    Raises ConfigError, on every rank, when some rank's loader is empty and another's is not.
    """
    batches, end = iter(loader), object()

    def take() -> tuple[Any, list[int]]:
        started = perf_counter()
        with stage("wait for batch"):
            batch = next(batches, end)
        counts["wait_seconds"] += perf_counter() - started
        rows = 0 if batch is end else num_rows(batch)
        return batch, [rows] * world.world_size if even else gather(rows)

    batch, rows = take()
    if any(rows) and not all(rows):
        without = [rank for rank, count in enumerate(rows) if not count]
        raise ConfigError(f"the loader gave no batch on ranks {without}: each rank needs one at least")
    begun()
    while any(rows):
        state = state_of()  # before the next batch is asked for, which this step does not use
        following, following_rows = take()
        yield Fed(batch, rows[world.rank], sum(rows), not any(following_rows), state)
        batch, rows = batch if following is end else following, following_rows


def num_rows(batch: Any) -> int:
    """Rows of a batch: a dict, tuple or list of columns, or one tensor."""
    columns = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    sizes = [column.offsets[1:] if isinstance(column, Flat) else column for column in columns]
    return min(len(size) for size in sizes if not isinstance(size, Tensor) or size.ndim)

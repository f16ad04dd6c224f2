"""Prefetching of row groups in the order of their first use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import tee
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.loader.capacity import Capacity
    from dataload.rows.row_store import RowStore
    from dataload.samplers.rank_sampler import RankSampler

SCAN_FACTOR = 8  # row groups scanned for each transient one that is prefetched; a scan takes 50 µs
FIRST_AHEAD = 128  # row groups, more than are made at a time; thousands would delay the first batch


class RecordedNeeds(Iterator[tuple[int, int]]):
    """Needs for a `Lookahead`, which records those that it has read. Another thread may consume the record."""

    def __init__(self, needs: Iterator[tuple[int, int]]) -> None:
        self._needs = needs
        self._seen: deque[tuple[int, int]] = deque()

    def __next__(self) -> tuple[int, int]:
        need = next(self._needs)
        self._seen.append(need)
        return need

    def before(self, position: int) -> Iterator[int]:
        """Yield the row groups needed before `position` that the lookahead has read, each once."""
        while self._seen and self._seen[0][0] < position:
            yield self._seen.popleft()[1]


class Lookahead:
    """Prefetches row groups before the batches that need them are made.

    Transient row groups come in runs. The lookahead prefetches `transient_ahead` of them, however many cached ones come
    before. At first it prefetches fewer: requests for all would delay the first batch.

    Args:
        needs: (position in the epoch, row group), in the order of the first use.
        prefetch: Starts loading row groups.
        ahead: Row groups to prefetch before their first use.
        transient_ahead: Row groups for which `is_transient` is true to prefetch. 0: none in addition.
        is_transient: Returns whether a row group is cached only in the transient region, or not at all.
    """

    def __init__(
        self,
        needs: Iterator[tuple[int, int]],
        prefetch: Callable[[list[int]], Any],
        ahead: int,
        transient_ahead: int = 0,
        is_transient: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._prefetch = prefetch
        every, passing = tee(needs) if transient_ahead else (needs, iter(()))
        self._horizons = (
            _Horizon(every, ahead, ahead),
            _Horizon(passing, transient_ahead, SCAN_FACTOR * transient_ahead, is_transient),
        )

    def reach(self, position: int) -> None:
        """Prefetch for batches from `position` on. Earlier positions are done."""
        self._prefetch([group for horizon in self._horizons for group in horizon.reach(position)])


class _Horizon:
    """Reads needs until `counted_limit` counted ones, or `limit` needs, are ahead of the position."""

    def __init__(
        self,
        needs: Iterator[tuple[int, int]],
        counted_limit: int,
        limit: int,
        counts: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._needs = needs
        self._counted_limit, self._limit = counted_limit, limit
        self._reached = FIRST_AHEAD
        self._counts = counts
        self._counted: deque[int] = deque()  # positions
        self._seen: deque[int] = deque()

    def reach(self, position: int) -> list[int]:
        """Return the counted row groups that are new within the horizon of `position`."""
        for ahead in (self._counted, self._seen):
            while ahead and ahead[0] < position:
                ahead.popleft()
        counted_limit, self._reached = min(self._counted_limit, self._reached), 2 * self._reached
        found = []
        while len(self._counted) < counted_limit and len(self._seen) < self._limit:
            need = next(self._needs, None)
            if need is None:
                break
            counts = self._counts(need[1])
            if counts:
                found.append(need[1])
            if need[0] >= position:
                self._seen.append(need[0])
                if counts:
                    self._counted.append(need[0])
        return found


def lookahead_of(
    rowstore: RowStore, capacity: Capacity, needs: Iterator[tuple[int, int]], *, has_workers: bool
) -> Lookahead:
    """Return the lookahead of a loader, within its capacity."""
    ahead, transient_ahead = capacity.ahead()
    if transient_ahead and has_workers:
        # Workers open row groups only when they need them: half of the region is for those that they are reading.
        ahead, transient_ahead = max(1, min(ahead, transient_ahead) // 2), 0
    # Forked workers fetch more slowly and share only the cache, so this process fills it in advance.
    useful = not has_workers or rowstore.row_groups.shared
    prefetch = rowstore.prefetch if useful else lambda _: None
    return Lookahead(needs, prefetch, ahead, transient_ahead, rowstore.is_transient)


def needs_of(sampler: RankSampler, epoch: int, cursor: int) -> Iterator[tuple[int, int]]:
    """Yield (position, row group) of the rest of this epoch and of the next one, for a start without a wait."""
    yield from sampler.needs_from(epoch, cursor)
    for position, group in sampler.needs_from(epoch + 1, 0):
        yield sampler.num_rows + position, group

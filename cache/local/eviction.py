"""The choice of blobs to evict for a new one, and their removal in batches."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from typing import NamedTuple

from dataload.cache.division import Division
from dataload.cache.local.index import Index, Row
from dataload.cache.tier import Kind

EVICTED_TOGETHER = 32  # blobs whose locks are held together, a descriptor each
PAUSES = 20  # times the duration of a scan, until the next one

Missing = Callable[[], int]
"""`missing()` returns the bytes that must be freed now; 0 or less: none."""

Remove = Callable[[Iterable[bytes]], int]
"""`remove(digests)` removes a few blobs, and returns the bytes that were freed."""


def release(missing: Missing, victims: Iterator[Row], remove: Remove) -> int:
    """Remove blobs in order until nothing is missing or no victims are left. Return the bytes that are still missing.

    Other processes may evict for the same shortage, so each batch of blobs is for the bytes that are missing then.
    """
    size = missing()
    while size > 0 and (batch := _first(victims, size)):
        size = min(size - remove(batch), missing())
    return size


def release_if_enough(missing: Missing, victims: Iterator[Row], remove: Remove) -> bool:
    """Remove blobs in order until nothing is missing, none if all are too small. Return whether it succeeded."""
    first, size = list[Row](), missing()
    while size > 0 and (row := next(victims, None)) is not None:
        first.append(row)
        size -= row.size
    return size <= 0 and release(missing, chain(first, victims), remove) <= 0


def _first(rows: Iterator[Row], size: int) -> list[bytes]:
    """Take the first rows, until they have `size` bytes, and at most `EVICTED_TOGETHER`. Return their digests."""
    found: list[bytes] = []
    for row in islice(rows, EVICTED_TOGETHER):
        found.append(row.digest)
        size -= row.size
        if size <= 0:
            break
    return found


class Choice(NamedTuple):
    """Blobs to evict for a row, in order, until it lacks no bytes. The row is pinned then, or transient."""

    victims: Iterator[Row]
    missing: Missing
    pinned: bool


class Eviction:
    """Chooses what to evict for a new blob. It evicts nothing itself. Any thread may call it.

    Args:
        index: The index of the cache.
    """

    def __init__(self, index: Index) -> None:
        self._index, self._surplus = index, _Surplus(index)

    def choices(self, row: Row, limit: int, division: Division, before: int) -> Iterator[Choice]:
        """Yield what may be evicted for a row, best first. The first choice whose victims are large enough counts.

        Args:
            row: The row to admit.
            limit: Most bytes on disk.
            division: How loaders share the cache.
            before: A time in ns. Pinned blobs that were last used before it may go, whoever needs them.
        """
        index = self._index
        shortage = partial(index.shortage, row.size, limit=limit, region=division.region)

        def to_pin() -> int:
            return max(shortage())

        def to_fit() -> int:
            return shortage().total

        yield Choice(index.pinned(before), to_pin, pinned=True)
        if division.stays(row.group):
            yield Choice(self._surplus.victims(division, to_pin), to_pin, pinned=True)
        if division.region and shortage().pinned > row.size:  # Other data has filled the region with pinned blobs.
            yield Choice(self._surplus.victims(division, to_fit), to_fit, pinned=False)
            yield Choice(index.pinned(), to_fit, pinned=False)
        else:
            yield Choice(chain(index.transient(), index.pinned(before)), to_fit, pinned=False)


class _Surplus:
    """The pinned blobs that may be evicted for a blob that stays.

    First those of row groups that no loader needs, then those above the share of their dataset, then blocks of files
    if the datasets do not fit. Of each kind, the least recently used come first.

    Notes:
        A scan of the index finds all of them, for one division. Once they are used up, the index is scanned again after
        a pause. Any thread may call it.
    """

    def __init__(self, index: Index) -> None:
        self._index, self._mutex = index, threading.Lock()
        self._found: weakref.WeakKeyDictionary[Division, _Found] = weakref.WeakKeyDictionary()

    def victims(self, division: Division, missing: Missing) -> Iterator[Row]:
        """Yield the rows to evict while bytes are missing; none if there are not enough. A row goes to one thread."""
        while (size := missing()) > 0 and (taken := self._take(division, size)):
            yield from taken

    def _take(self, division: Division, size: int) -> list[Row]:
        with self._mutex:
            found, started = self._found.setdefault(division, _Found()), time.monotonic()
            taken = found.take(size)
            if not taken and started >= found.scan_at:
                found.rows = _surplus(division, self._index.pinned())
                now = time.monotonic()
                found.scan_at = now + PAUSES * (now - started)
                taken = found.take(size)
            return taken


@dataclass
class _Found:
    """The surplus of one division: tiers of several limits in one folder have a division each."""

    rows: deque[Row] = field(default_factory=deque)
    scan_at: float = 0.0

    def take(self, size: int) -> list[Row]:
        """Take the first rows that have `size` bytes together; none if all have fewer."""
        totals = accumulate(row.size for row in self.rows)
        count = next((number for number, total in enumerate(totals, 1) if total >= size), 0)
        return [self.rows.popleft() for _ in range(count)]


def _surplus(division: Division, rows: Iterable[Row]) -> deque[Row]:
    ranked: tuple[list[Row], ...] = [], [], []
    for row in rows:
        kind = Kind.of(row.name.rpartition("#")[2])
        if division.stays(row.group):
            continue
        if kind is Kind.RECORDS:
            ranked[division.is_needed(row.group)].append(row)
        elif kind is Kind.BLOCK and division.region:  # Without a region, row groups are made of blocks.
            ranked[2].append(row)
    return deque(chain(*ranked))

"""The blobs that make room for others: data that no loader needs, and data above its share."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from dataload.cache.room import Division

if TYPE_CHECKING:
    from dataload.cache.local.index import Index, Row

RECORDS = "records "  # the names of the blobs of row groups begin with it, after the name of the file
_NAME = re.compile(rf"#({RECORDS}[^#]*|\d+-\d+)$")  # of a blob of records, or of a block of a file
PAUSES = 20  # times the duration of a scan, until the next one


class Surplus:
    """The pinned blobs that may be evicted for a blob that stays.

    First those of row groups that no loader needs, then those above the share of their dataset, then blocks of files
    if the datasets do not fit. Of each kind, the least recently used come first.

    Notes:
        A scan of the index finds all of them, for one division. Once they are used up, the index is scanned again after
        a pause. Any thread may call it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._found: weakref.WeakKeyDictionary[Division, _Found] = weakref.WeakKeyDictionary()

    def take(self, division: Division, size: int, scan: Callable[[], Iterable[Row]]) -> list[Row]:
        """Return rows of at least `size` bytes together, which the caller evicts; none if there are not enough.

        Args:
            division: How loaders share the cache.
            size: Bytes to free.
            scan: Yields the pinned rows, the least recently used first.
        """
        with self._mutex:
            found, started = self._found.setdefault(division, _Found()), time.monotonic()
            if started >= found.scan_at and not found.has(size):
                found.rows = _surplus(division, scan())
                now = time.monotonic()
                found.scan_at = now + PAUSES * (now - started)
            taken: list[Row] = []
            while size > 0 and found.has(size):
                taken.append(found.rows.popleft())
                size -= taken[-1].size
            return taken


@dataclass
class _Found:
    """The surplus of one division: tiers of several limits in one folder have a division each."""

    rows: deque[Row] = field(default_factory=deque)
    scan_at: float = 0.0

    def has(self, size: int) -> bool:
        return any(total >= size for total in accumulate(row.size for row in self.rows))


def _surplus(division: Division, rows: Iterable[Row]) -> deque[Row]:
    kinds: tuple[list[Row], ...] = [], [], []
    for row in rows:
        found = _NAME.search(row.name)
        if found is None or division.stays(row.group):
            continue
        if found[1].startswith(RECORDS):
            kinds[division.is_needed(row.group)].append(row)
        elif division.region:  # Without a region, row groups are made of blocks.
            kinds[2].append(row)
    return deque(row for kind in kinds for row in kind)


def evictable(index: Index, division: Division, new: Row, before: int) -> Iterator[Row]:
    """Yield the blobs to evict for one that cannot be pinned: transient ones, then those that no process uses."""
    transient = index.transient()
    return chain(transient_victims(division, new, transient) if division.region else transient, index.pinned(before))


def transient_victims(division: Division, new: Row, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield transient rows in the order of their eviction for a new row.

    The need whose rows exceed its part of the region most has the next victim, its oldest row. So a loader that reads
    fast evicts its own. Rows of no need are evicted before younger rows.

    Args:
        division: How loaders share the cache.
        new: The row to admit.
        rows: The transient rows, oldest first.
    """
    queues: defaultdict[bytes, deque[Row]] = defaultdict(deque)
    name, part = division.part_of(new.group)
    parts, used = {name: part}, Counter({name: new.size})
    for row in rows:
        name, parts[name] = division.part_of(row.group)
        queues[name].append(row)
        used[name] += row.size
    while left := [name for name, queue in queues.items() if queue]:
        fullest = max(left, key=lambda name: used[name] / parts[name] if parts[name] else 0.0)
        victim = min({fullest, b""} & {*left}, key=lambda name: queues[name][0].used_at)
        row = queues[victim].popleft()
        used[victim] -= row.size
        yield row

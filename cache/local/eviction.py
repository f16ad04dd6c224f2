"""What a cache keeps and what it evicts: one class a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from dataload.cache.division import Division
from dataload.cache.local.index import Index, Row
from dataload.cache.tier import BlobKey, Kind, group_number

if TYPE_CHECKING:
    from dataload.cache.local.directory import CacheFolder

EVICTED_TOGETHER = 32  # blobs whose locks are held together, a descriptor each


class Policy(Protocol):
    """Decides which blobs stay, and which are evicted for others."""

    @property
    def region(self) -> int:
        """Bytes that kept blobs leave free for those that pass through."""

    def admit(self, key: BlobKey, size: int) -> Row:
        """Return the row of a new blob of `size` bytes on disk: it is kept, or passes through."""

    def victims(self) -> Iterator[Row]:
        """Yield the blobs that may be evicted, in order."""


class Lru:
    """Evicts the least recently used blobs."""

    region = 0

    def __init__(self, index: Index) -> None:
        self._index = index

    def admit(self, key: BlobKey, size: int) -> Row:
        return Row(key.digest, key.kind, key.name, size)

    def victims(self) -> Iterator[Row]:
        return chain(self._index.transient(), self._index.kept())


class Pin:
    """Keeps the blobs that running processes use.

    Of row groups it keeps those that loaders need and that stay by the division. The others pass through, first in,
    first out, in what the kept ones leave free. So do blocks of files, unless all that loaders need fits.

    Args:
        folder: The cache.
        division: How loaders share the cache.
        limit: Most bytes of the cache.
    """

    def __init__(self, folder: CacheFolder, division: Division, limit: int) -> None:
        self._folder, self._division, self._most_kept = folder, division, limit - division.region

    @property
    def region(self) -> int:
        return self._division.region

    def admit(self, key: BlobKey, size: int) -> Row:
        return Row(key.digest, key.kind, key.name, size, kept=self._keeps(key.kind, group_number(key.digest)))

    def victims(self) -> Iterator[Row]:
        """Yield blobs that no running process has used, then those that pass through, the oldest first."""
        index = self._folder.index
        if self._has_needs:
            self._folder.label(self._division, lambda row: self._keeps(row.kind, row.group), self._most_kept)
        unused = (row for row in index.kept(self._folder.oldest_start()) if not self._is_needed(row))
        return chain(unused, index.transient())

    @property
    def _has_needs(self) -> bool:
        return self._division.groups.size > 0

    def _is_needed(self, row: Row) -> bool:
        return row.kind is Kind.RECORDS and self._has_needs and self._division.stays(row.group)

    def _keeps(self, kind: Kind, group: int) -> bool:
        if kind is Kind.RECORDS and self._has_needs:
            return self._division.stays(group)
        return kind is not Kind.BLOCK or not self._division.region


def make_room(missing: Callable[[], int], victims: Iterator[Row], remove: Callable[[Iterable[bytes]], int]) -> bool:
    """Remove victims in order until nothing is missing; none if all of them are too small. Return whether it succeeded.

    Other processes may evict for the same shortage, so each batch is for the bytes that are missing then.

    Args:
        missing: Returns the bytes that must be freed now; 0 or less: none.
        victims: The blobs that may be removed.
        remove: Removes a few blobs, and returns the bytes that were freed.
    """
    first, size = list[Row](), missing()
    while size > 0 and (row := next(victims, None)) is not None:
        first.append(row)
        size -= row.size
    return size <= 0 and remove_until(missing, chain(first, victims), remove)


def remove_until(missing: Callable[[], int], victims: Iterator[Row], remove: Callable[[Iterable[bytes]], int]) -> bool:
    """Remove victims in order until nothing is missing or none are left. Return whether nothing is missing."""
    size = missing()
    while size > 0 and (batch := _first(victims, size)):
        size = min(size - remove(batch), missing())
    return size <= 0


def _first(rows: Iterator[Row], size: int) -> list[bytes]:
    """Take the first rows, until they have `size` bytes, and at most `EVICTED_TOGETHER`. Return their digests."""
    found: list[bytes] = []
    for row in islice(rows, EVICTED_TOGETHER):
        found.append(row.digest)
        size -= row.size
        if size <= 0:
            break
    return found

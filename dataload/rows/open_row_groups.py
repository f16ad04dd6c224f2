"""The row groups that a process has open: records side by side in one arena, ragged values where they are mapped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import numpy as np

from dataload.formats.schema import Layout
from dataload.rows.columns import Array
from dataload.rows.mmap_arena import MmapArena
from dataload.rows.row_block import Blob, Records

_CLOSED = -1


def evictions(opened: Collection[int], capacity: int, keep: Iterable[int]) -> list[int]:
    """Return the row groups to close so that at most `capacity` are open.

    Args:
        opened: The open row groups, in the order in which they should be closed.
        capacity: How many row groups may stay open.
        keep: Row groups that stay open.
    """
    excess, kept = max(0, len(opened) - capacity), set(keep)
    return list(islice((group for group in opened if group not in kept), excess))


class OpenRowGroups:
    """The blobs of at most `capacity` row groups. They are evicted in the order of `put` and `use`.

    Args:
        capacity: How many row groups are open at most.
        group_starts: Number of each row group's first blob, int64 [groups + 1].
        row_starts: Number of each blob's first row, int64 [blobs + 1].
        layout: Layout of a record.

    Notes:
        One thread at a time may call it.
    """

    def __init__(self, capacity: int, group_starts: Array, row_starts: Array, layout: Layout) -> None:
        self.capacity = self._most = capacity
        self._group_starts = group_starts
        self._row_starts = row_starts
        self._layout = layout
        blobs = int(np.diff(group_starts).max(initial=1))
        slots = min(capacity * blobs, max(1, len(row_starts) - 1))
        self._arena = MmapArena(slots, int(np.diff(row_starts).max(initial=1)), layout.dtype.itemsize)
        self._free = list(range(slots))
        self._slots: OrderedDict[int, list[int]] = OrderedDict()  # row group -> its slots, oldest row group first
        self._blobs: dict[int, Blob] = {}
        self._positions = np.empty(len(row_starts) - 1, np.int64)  # working memory of `_distinct`
        self._first_records = np.full(len(row_starts) - 1, _CLOSED, np.int64)  # index in the arena, by blob

    def __contains__(self, group: int) -> bool:
        return group in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def keep_at_most(self, count: int, keep: Iterable[int]) -> None:
        """Open at most `count` row groups from now on, up to the capacity. Evict the others that are not in `keep`."""
        count = min(count, self.capacity)
        if count != self._most:
            self._most = count
            self.make_room([], keep)

    def make_room(self, groups: Iterable[int], keep: Iterable[int]) -> None:
        """Evict the oldest row groups that are not in `keep`, until these can be opened."""
        closed = sum(group not in self._slots for group in groups)
        for old in evictions(self._slots, self._most - closed, keep):
            self._evict(old)

    def put(self, group: int, contents: Sequence[memoryview]) -> None:
        """Open a row group for which `make_room` has made room, unless it is open."""
        if group in self._slots:
            return
        first, last = self._group_starts[group : group + 2].tolist()
        slots = [self._free.pop() for _ in contents]
        try:
            for number, slot, content in zip(range(first, last), slots, contents, strict=True):
                rows = int(self._row_starts[number + 1] - self._row_starts[number])
                blob = Blob(content, rows, self._layout)
                self._arena.put(slot, blob.records)
                if self._layout.ragged:
                    self._blobs[number] = blob
        except BaseException:
            self._release(first, slots)
            raise
        self._first_records[first:last] = np.array(slots, np.int64) * self._arena.rows_per_slot
        self._slots[group] = slots

    def use(self, groups: Iterable[int]) -> None:
        """Evict these row groups, which are open, after all others."""
        for group in groups:
            self._slots.move_to_end(group)

    def take(self, rows: Array, blobs: Array) -> Records | None:
        """Return copies of rows, or None if a row group of theirs is not open.

        Args:
            rows: Row numbers, int64 [n].
            blobs: The blob of each row, int64 [n].
        """
        positions = self._first_records.take(blobs, mode="clip")
        if positions.min(initial=0) == _CLOSED:
            return None
        positions += rows
        positions -= self._row_starts.take(blobs, mode="clip")
        records = self._arena.take(positions).view(self._layout.dtype)[:, 0]
        if not self._layout.ragged:
            return Records(self._layout, records, [], np.empty(0, np.int64))
        numbers, which = self._distinct(blobs)
        return Records(self._layout, records, [self._blobs[number] for number in numbers.tolist()], which)

    def _distinct(self, blobs: Array) -> tuple[Array, Array]:
        """Return the distinct blobs in any order, and the position of each row's blob among them."""
        positions, rows = self._positions, np.arange(len(blobs))
        positions[blobs] = rows
        distinct = blobs[positions[blobs] == rows]
        positions[distinct] = np.arange(len(distinct))
        return distinct, positions[blobs]

    def _evict(self, group: int) -> None:
        slots = self._slots.pop(group)
        first, last = self._group_starts[group : group + 2].tolist()
        self._first_records[first:last] = _CLOSED
        self._release(first, slots)

    def _release(self, first: int, slots: Sequence[int]) -> None:
        """Drop the blobs from number `first` on, and free their slots."""
        self._free += slots
        for number, slot in enumerate(slots, first):
            self._blobs.pop(number, None)
            self._arena.clear(slot)

"""The row groups that a process has open: their records side by side, what varies in length where it was mapped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from dataload.formats.schema import Layout
from dataload.rows.arrow_decode import Array
from dataload.rows.mmap_arena import MmapArena
from dataload.rows.row_block import Blob, Records

_NOWHERE = -1


class OpenRowGroups:
    """Room for the blobs of `capacity` row groups; whoever came first goes first.

    group_starts: the number of each row group's first blob, int64 [groups + 1]; row_starts: the number of each blob's
    first row, int64 [blobs + 1].

    Notes: not for several threads at once.
    """

    def __init__(self, capacity: int, group_starts: Array, row_starts: Array, layout: Layout) -> None:
        self.capacity = capacity
        self._group_starts = group_starts
        self._row_starts = row_starts
        self._layout = layout
        blobs = int(np.diff(group_starts).max(initial=1))
        slots = min(capacity * blobs, max(1, len(row_starts) - 1))
        self._arena = MmapArena(slots, int(np.diff(row_starts).max(initial=1)), layout.dtype.itemsize)
        self._free = list(range(slots))
        self._slots: OrderedDict[int, list[int]] = OrderedDict()  # of each row group, the first that came first
        self._blobs: dict[int, Blob] = {}
        self._places = np.full(len(row_starts) - 1, _NOWHERE, np.int64)  # of each blob's first record in the arena

    def __contains__(self, group: int) -> bool:
        return group in self._slots

    def put(self, group: int, contents: Sequence[memoryview], keep: Collection[int]) -> None:
        """Open a row group, letting go of others than those in `keep` where there are too many."""
        if group in self._slots:
            return
        while len(self._slots) >= self.capacity or len(self._free) < len(contents):
            self._drop(next(old for old in self._slots if old not in keep))
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
            self._free += slots
            raise
        self._places[first:last] = np.array(slots, np.int64) * self._arena.rows_per_slot
        self._slots[group] = slots

    def take(self, rows: Array, blobs: Array) -> Records | None:
        """These rows (int64 [n]), of these blobs, copied; None when not all of them are open."""
        places = self._places[blobs]
        if places.min(initial=0) == _NOWHERE:
            return None
        places += rows
        places -= self._row_starts[blobs]
        taken = self._arena.take(places).view(self._layout.dtype)[:, 0]
        if not self._layout.ragged:
            return Records(self._layout, taken, [], np.empty(0, np.int64))
        numbers, which = np.unique(blobs, return_inverse=True)
        return Records(self._layout, taken, [self._blobs[number] for number in numbers.tolist()], which)

    def _drop(self, group: int) -> None:
        slots = self._slots.pop(group)
        first, last = self._group_starts[group : group + 2]
        self._places[first:last] = _NOWHERE
        for number, slot in zip(range(first, last), slots, strict=True):
            self._blobs.pop(number, None)
            self._arena.clear(slot)
        self._free += slots

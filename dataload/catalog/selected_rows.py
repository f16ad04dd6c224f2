"""The numbers of selected rows: from their number in the selection to their number in the row groups."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.catalog.selection import Mask, Selection
from dataload.runtime.forks import ForkAware
from dataload.samplers.interval_index import IntervalIndex

Array = npt.NDArray[Any]

OFFSET_BYTES = 2
MIN_BYTES = 8 << 20  # of offsets that are kept for later gathers


class SelectedRows(ForkAware):
    """A table of the selected rows of the blocks that were needed lately. Thread-safe, and picklable without the table.

    The table has 2 bytes for each selected row of the dataset, in memory that the kernel provides when a block is
    written. Each block is expanded into it on first use. If the expanded blocks exceed the limit, the table is emptied,
    and blocks are expanded again when they are needed.

    Args:
        selection: The selected rows.
        groups: Row groups that are open at a time; see `keep`.

    Attributes:
        selection: As above.
        most_bytes: Limit of the expanded blocks, unless one call needs more.
    """

    def __init__(self, selection: Selection, groups: int = 1) -> None:
        self.selection = selection
        self.keep(groups)
        self._index = IntervalIndex(selection.starts)
        # The row of each block to which the offset of a selected row is added.
        self._first_rows = selection.rows[:-1]
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Begin an empty table: at the fork, a thread of the parent may have been writing it."""
        self._mutex = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._expanded = np.zeros(len(self._first_rows), np.bool_)
        self._expanded_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SelectedRows, (self.selection, self._groups)

    @property
    def lengths(self) -> Array:
        """Selected rows of each row group: int64 [groups]."""
        return self.selection.counts

    def keep(self, groups: int) -> None:
        """Set the limit to twice the selected rows of this many row groups, the largest."""
        self._groups = groups
        counts = np.sort(self.lengths)[::-1]
        self.most_bytes = max(MIN_BYTES, 2 * OFFSET_BYTES * int(counts[:groups].sum()))

    def rows(self, numbers: Array) -> Array:
        """Return the row numbers of selected rows, by their numbers in the selection: int64 [n] both."""
        blocks = self._index.find(numbers)
        needed = np.zeros(len(self._expanded), np.bool_)
        needed[blocks] = True
        rows: Array = self._first_rows[blocks]
        with self._mutex:  # Another thread may empty the table.
            self._expand(needed)
            rows += self._table[numbers]
        return rows

    def among(self, masks: Iterator[Mask]) -> Iterator[Mask]:
        """Yield which rows of each row group some of the selected rows are, given which of those."""
        return (self.selection.within(group, mask) for group, mask in enumerate(masks))

    def _expand(self, needed: npt.NDArray[np.bool_]) -> None:
        if self._memory is None:
            size = max(1, OFFSET_BYTES * int(self.selection.starts[-1]))
            self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._table = np.frombuffer(self._memory, np.uint16)
        missing = np.flatnonzero(needed & ~self._expanded)
        if missing.size and self._expanded_bytes > self.most_bytes:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._expanded[:] = False
            self._expanded_bytes = 0
            missing = np.flatnonzero(needed)
        starts = self.selection.starts
        for block in missing.tolist():
            self._table[starts[block] : starts[block + 1]] = self.selection.offsets(block)
            self._expanded_bytes += OFFSET_BYTES * int(starts[block + 1] - starts[block])
        self._expanded[missing] = True

"""Selections: which rows of a dataset's row groups belong to it, as bitmaps or borders of runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

BLOCK_ROWS = 1 << 16  # An offset in a block fits into 16 bits, and a bitmap of a block takes 8 KiB.


class Selection:
    """The selected rows of some row groups. Immutable, and at most one bit a row and 24 bytes a block.

    Rows are numbered in two ways: all rows of the row groups from 0, and the selected ones among them from 0. A row
    group is cut into blocks of `BLOCK_ROWS` rows. A block is stored as a bitmap, or as the offsets where runs of
    selected rows begin and end, whichever is shorter; Roaring bitmaps do the same (Lemire et al., "Roaring bitmaps:
    implementation of an optimized software library", 2018).

    Args:
        group_blocks: Number of the first block of each row group, then the number of blocks: int64 [groups + 1].
        rows: Number of the first row of each block, then the number of rows: int64 [blocks + 1].
        starts: Selected rows before each block, then all: int64 [blocks + 1].
        bounds: Start of each block in `data`, then its length: int64 [blocks + 1].
        data: The blocks: uint8.
    """

    def __init__(self, group_blocks: Array, rows: Array, starts: Array, bounds: Array, data: Array) -> None:
        self._group_blocks = group_blocks
        self.rows = rows
        self.starts = starts
        self._bounds = bounds
        self._data = data

    @classmethod
    def of(cls, masks: Iterable[Mask]) -> Selection:
        """Return the selection of the true rows of each row group: a bool array [rows] for each, in file order."""
        group_blocks, lengths, counts, blocks = [0], [], [], []
        for mask in masks:
            for first in range(0, len(mask), BLOCK_ROWS):
                block = mask[first : first + BLOCK_ROWS]
                lengths.append(len(block))
                counts.append(int(np.count_nonzero(block)))
                blocks.append(_encoded(block))
            group_blocks.append(len(blocks))
        data = np.concatenate([np.empty(0, np.uint8), *blocks])
        return cls(np.array(group_blocks, np.int64), _sums(lengths), _sums(counts), _sums(map(len, blocks)), data)

    @property
    def counts(self) -> Array:
        """Selected rows of each row group: int64 [groups]."""
        return np.diff(self.starts[self._group_blocks])

    @property
    def is_whole(self) -> bool:
        """Whether every row is selected."""
        return bool(self.starts[-1] == self.rows[-1])

    @property
    def digest(self) -> str:
        """Hex digest of the rows that are selected."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16, person=b"selection").hexdigest()

    def digest_of(self, group: int) -> str:
        """Return a hex digest of the rows of a row group that are selected."""
        return hashlib.blake2b(np.packbits(self.mask(group)).tobytes(), digest_size=8).hexdigest()

    def mask(self, group: int) -> Mask:
        """Return which rows of a row group are selected: bool [rows of the row group]."""
        first, last = self._group_blocks[group : group + 2].tolist()
        mask = np.zeros(int(self.rows[last] - self.rows[first]), np.bool_)
        for block in range(first, last):
            mask[self.offsets(block) + (self.rows[block] - self.rows[first])] = True
        return mask

    def within(self, group: int, mask: Mask) -> Mask:
        """Return which rows of a row group a mask has that has a value for each of its selected rows."""
        whole = self.mask(group)
        whole[whole] = mask
        return whole

    def only(self, groups: Iterable[int]) -> Selection:
        """Return the selection of some of the row groups."""
        return Selection.of(map(self.mask, groups))

    def common(self, other: Selection) -> Selection:
        """Return the rows that another selection of the same row groups has, too."""
        return Selection.of(self.mask(group) & other.mask(group) for group in range(len(self._group_blocks) - 1))

    def rows_of(self, numbers: Array) -> Array:
        """Return the numbers of selected rows among all rows, by their numbers in the selection: int64 [n] both."""
        blocks = np.searchsorted(self.starts, numbers, "right") - 1
        rows = self.rows[blocks]
        for block in np.unique(blocks).tolist():
            here = blocks == block
            rows[here] += self.offsets(block)[numbers[here] - self.starts[block]]
        return rows

    def offsets(self, block: int) -> Array:
        """Return the offsets of the selected rows in a block, ascending: integers [selected rows of the block]."""
        rows = int(self.rows[block + 1] - self.rows[block])
        stored = self._data[self._bounds[block] : self._bounds[block + 1]]
        if len(stored) == _bitmap_bytes(rows):
            return np.flatnonzero(
                np.unpackbits(stored, count=rows, bitorder="little").view(np.bool_)
            )  # bools: 9 times faster
        borders = stored.view("<u2").astype(np.int64)
        firsts, ends = borders[::2], borders[1::2]
        if len(ends) < len(firsts):  # The last run ends with the block.
            ends = np.append(ends, rows)
        # Each run counts up from its first row.
        lengths = ends - firsts
        return np.arange(lengths.sum()) + np.repeat(firsts - _sums(lengths)[:-1], lengths)

    def to_bytes(self) -> bytes:
        """Return the selection as bytes."""
        head = np.array([len(self._group_blocks), len(self.rows)], "<i8")
        tables = (head, self._group_blocks, self.rows, self.starts, self._bounds)
        return b"".join([*(table.astype("<i8").tobytes() for table in tables), self._data.tobytes()])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, lengths: Sequence[int]) -> Selection:
        """Return the selection that `to_bytes` wrote, as views of these bytes. lengths: rows of each row group.

        Raises:
            ValueError: The bytes are no selection of these rows.
        """
        groups, blocks = np.frombuffer(data, "<i8", 2).tolist()
        if min(groups, blocks) < 1:
            raise ValueError("the selection has no tables")
        tables = np.frombuffer(data, "<i8", groups + 3 * blocks, 16)
        group_blocks, rows, starts, bounds = np.split(tables, groups + blocks * np.arange(3))
        found = cls(group_blocks, rows, starts, bounds, np.frombuffer(data, np.uint8, offset=16 + tables.nbytes))
        found._check(lengths)
        return found

    def _check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError unless these are selected rows of row groups of these lengths, as `of` encodes them."""
        group_rows = np.array(lengths, np.int64)
        counts = -(-group_rows // BLOCK_ROWS)
        sizes = np.full(int(counts.sum()), BLOCK_ROWS)
        filled = counts > 0
        sizes[np.cumsum(counts)[filled] - 1] = (group_rows - BLOCK_ROWS * (counts - 1))[filled]
        is_cut = np.array_equal(self._group_blocks, _sums(counts)) and np.array_equal(self.rows, _sums(sizes))
        tables = self.starts, self._bounds
        if not is_cut or any(table[0] or np.any(np.diff(table) < 0) for table in tables):
            raise ValueError("the selection is of other row groups")
        if self._bounds[-1] != len(self._data):
            raise ValueError("the selection is cut short")
        for block, (count, size) in enumerate(zip(np.diff(self.starts).tolist(), sizes.tolist(), strict=True)):
            if _selected(self._data[self._bounds[block] : self._bounds[block + 1]], size) != count:
                raise ValueError(f"block {block} of the selection has other rows than it counts")


def _selected(stored: Array, rows: int) -> int:
    """Return the number of selected rows of a stored block. Raise ValueError if it is none of this many rows."""
    if len(stored) == _bitmap_bytes(rows):
        return int(np.unpackbits(stored, count=rows, bitorder="little").sum(dtype=np.int64))
    borders = stored.view("<u2").astype(np.int64)
    if np.any(np.diff(borders, append=rows) <= 0):
        raise ValueError("runs of selected rows that are out of order")
    return int(np.diff(borders, append=[rows] * (len(borders) % 2))[::2].sum())


def _encoded(mask: Mask) -> npt.NDArray[np.uint8]:
    """Return a block as the borders of its runs if that is shorter than a bitmap, else as a bitmap."""
    borders = np.flatnonzero(np.diff(mask, prepend=False))  # A run that ends with the block has no end.
    if 2 * len(borders) < _bitmap_bytes(len(mask)):
        return borders.astype("<u2").view(np.uint8)
    return np.packbits(mask, bitorder="little")


def _bitmap_bytes(rows: int) -> int:
    return -(-rows // 8)


def _sums(numbers: Iterable[int] | Array) -> Array:
    """Return the sums of the numbers before each one, and of all: int64 [numbers + 1]."""
    numbers = numbers if isinstance(numbers, np.ndarray) else list(numbers)
    return np.concatenate(([0], np.cumsum(numbers, dtype=np.int64)))

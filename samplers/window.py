"""A window: the rows of a few row groups, shuffled together."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from dataload.samplers.permutation import KeyedPermutation

Int64 = npt.NDArray[np.int64]

FEW = 1024  # rows that are not worth making guides for
GUIDES = 2  # at least so many for each piece


class Window:
    """Rows of consecutive pieces of row groups, in shuffled order.

    pieces: their numbers: int64 [k]; starts: the places where they begin before the shuffle, and where the window ends:
    int64 [k + 1], none of them empty. first: the row with which each piece of the dataset begins, by its number.
    """

    def __init__(self, pieces: Int64, starts: Int64, first: Int64, key: int) -> None:
        self._pieces = pieces
        self._starts = starts
        self._first = first
        self._shuffled = KeyedPermutation(int(starts[-1] - starts[0]), key)

    def rows(self, numbers: Int64) -> Int64:
        """The rows numbered so in the shuffled window, int64 of the same length."""
        numbers = self._shuffled[numbers]
        if len(numbers) >= FEW:
            return self._guides.rows(numbers)
        numbers += self._starts[0]
        found = np.searchsorted(self._starts, numbers, "right") - 1
        numbers += self._first[self._pieces[found]] - self._starts[found]
        return numbers

    @cached_property
    def _guides(self) -> _Guides:
        return _Guides(self._first[self._pieces], self._starts - self._starts[0])


class _Guides:
    """Finds the pieces of many rows.

    Looking up a piece by binary search costs more than all the rest, mostly in mispredicted branches. So guess by the
    piece at the start of a short stretch of rows; few stretches hold a border of pieces.
    """

    def __init__(self, first: Int64, starts: Int64) -> None:
        size = int(starts[-1])
        self._starts = starts
        self._shifts = first - starts[:-1]  # from the unshuffled window to the dataset
        self._stretch = (size // (2 * GUIDES * len(first))).bit_length()  # log2 of its rows
        reached = -(-starts[1:-1] >> self._stretch)  # by each piece but the first: the first stretch that begins in it
        self._guesses = np.bincount(reached, minlength=(size >> self._stretch) + 1)
        np.cumsum(self._guesses, out=self._guesses)

    def rows(self, numbers: Int64) -> Int64:
        """The rows numbered so in the unshuffled window; `numbers` is overwritten."""
        pieces = self._guesses[numbers >> self._stretch]
        wrong = np.flatnonzero(numbers >= self._starts[1:][pieces])
        pieces[wrong] = np.searchsorted(self._starts, numbers[wrong], "right") - 1
        numbers += self._shifts[pieces]
        return numbers

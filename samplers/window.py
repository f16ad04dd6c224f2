"""A window: the rows of a few row groups, shuffled together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataload.runtime.cached_property import cached_property
from dataload.samplers.interval_index import IntervalIndex
from dataload.samplers.permutation import KeyedPermutation

Int64 = npt.NDArray[np.int64]


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
        found = self._lookup.pieces(numbers)
        numbers += self._shifts[found]
        return numbers

    @cached_property
    def _lookup(self) -> IntervalIndex:
        return IntervalIndex(self._starts - self._starts[0])

    @cached_property
    def _shifts(self) -> Int64:
        """From the unshuffled window to the dataset, by piece."""
        shifts: Int64 = self._first[self._pieces] - (self._starts[:-1] - self._starts[0])
        return shifts

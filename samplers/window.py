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

    Args:
        pieces: Numbers of the pieces: int64 [k].
        starts: Place before the shuffle at which each piece begins, then the end of the window: int64 [k + 1].
        first: Number in the dataset of the first row of each piece of the dataset: int64 [P].
        key: Draws the permutation.
    """

    def __init__(self, pieces: Int64, starts: Int64, first: Int64, key: int) -> None:
        self._pieces = pieces
        self._starts = starts
        self._first = first
        self._shuffled = KeyedPermutation(int(starts[-1] - starts[0]), key)

    def rows(self, numbers: Int64) -> Int64:
        """Return the rows at these indices of the shuffled window: int64 of the same length."""
        numbers = self._shuffled[numbers]
        pieces = self._index.find(numbers)
        numbers += self._shifts.take(pieces, mode="clip")
        return numbers

    @cached_property
    def _index(self) -> IntervalIndex:
        return IntervalIndex(self._starts - self._starts[0])

    @cached_property
    def _shifts(self) -> Int64:
        """Difference between row number and index in the unshuffled window, by piece."""
        shifts: Int64 = self._first[self._pieces] - (self._starts[:-1] - self._starts[0])
        return shifts

"""A window: the rows of a few row groups, shuffled together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataload.samplers.permutation import KeyedPermutation

Int64 = npt.NDArray[np.int64]

GUIDES = 2  # at least so many guesses for each piece


class Window:
    """Rows of consecutive pieces of row groups, in shuffled order.

    first: the row with which each piece begins: int64 [k]; starts: where the pieces begin in the unshuffled window, and
    its number of rows: int64 [k + 1], none of them empty.
    """

    def __init__(self, first: Int64, starts: Int64, key: int) -> None:
        size = int(starts[-1])
        self._shuffled = KeyedPermutation(size, key)
        self._starts = starts
        self._shifts = first - starts[:-1]  # from the unshuffled window to the dataset
        # Looking up a piece by binary search costs more than all the rest, mostly in mispredicted branches. So guess by
        # the piece at the start of a short stretch of rows; few stretches hold a border of pieces.
        self._stretch = (size // (2 * GUIDES * len(first))).bit_length()  # log2 of its rows
        reached = -(-starts[1:-1] >> self._stretch)  # by each piece but the first: the first stretch that begins in it
        self._guesses = np.bincount(reached, minlength=(size >> self._stretch) + 1)
        np.cumsum(self._guesses, out=self._guesses)

    def rows(self, numbers: Int64) -> Int64:
        """The rows numbered so in the shuffled window, int64 of the same length."""
        numbers = self._shuffled[numbers]
        pieces = self._guesses[numbers >> self._stretch]
        wrong = np.flatnonzero(numbers >= self._starts[1:][pieces])
        pieces[wrong] = np.searchsorted(self._starts, numbers[wrong], "right") - 1
        numbers += self._shifts[pieces]
        return numbers

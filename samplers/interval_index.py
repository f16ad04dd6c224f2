"""Which of many consecutive pieces numbers fall into, for many numbers at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

FEW = 256  # numbers that a binary search finds sooner
GUIDES = 2  # at least so many for each piece


class IntervalIndex:
    """Finds pieces. starts: where each begins, from 0 on, and where the last one ends, ascending: int64 [k + 1].

    Notes: a binary search costs more than all the rest of an order, mostly in mispredicted branches. So guess by the
    piece at the start of a short stretch of numbers; few stretches hold a border of pieces.
    """

    def __init__(self, starts: Int64) -> None:
        self._starts = starts
        size = int(starts[-1])
        self._stretch = (size // max(1, 2 * GUIDES * (len(starts) - 1))).bit_length()  # log2 of its numbers
        reached = -(-starts[1:-1] >> self._stretch)  # by each piece but the first: the first stretch that begins in it
        self._guesses = np.bincount(reached, minlength=(size >> self._stretch) + 1)
        np.cumsum(self._guesses, out=self._guesses)

    def pieces(self, numbers: Int64) -> Int64:
        """The piece of each number, int64 of the same length. 0 <= numbers < starts[-1]."""
        if len(numbers) < FEW:
            return np.searchsorted(self._starts, numbers, "right") - 1
        pieces: Int64 = self._guesses[numbers >> self._stretch]
        wrong = np.flatnonzero(numbers >= self._starts[1:][pieces])
        pieces[wrong] = np.searchsorted(self._starts, numbers[wrong], "right") - 1
        return pieces

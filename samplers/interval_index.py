"""A vectorised lookup of the intervals that numbers fall into."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataload.runtime.cached_property import cached_property

Int64 = npt.NDArray[np.int64]

FEW = 1024  # numbers for which a plain binary search is faster
GUIDES = 2  # guesses per interval, at least


class IntervalIndex:
    """An index of consecutive intervals.

    Args:
        starts: Start of each interval, ascending from 0, then the end of the last one: int64 [k + 1].

    Notes: a binary search would cost more than the rest of an order, mostly in mispredicted branches. The index
    instead guesses the interval at the start of a short stretch of numbers; few stretches contain a border.
    """

    def __init__(self, starts: Int64) -> None:
        self._starts = starts
        size = int(starts[-1])
        self._stretch = (size // max(1, 2 * GUIDES * (len(starts) - 1))).bit_length()  # log2 of its length

    def find(self, numbers: Int64) -> Int64:
        """Return the interval of each number: int64 of the same length. Each number must be in [0, starts[-1])."""
        if len(numbers) < FEW:
            return np.searchsorted(self._starts, numbers, "right") - 1
        # `take` with "clip" gathers in half the time of an index.
        intervals: Int64 = self._guesses.take(numbers >> self._stretch, mode="clip")
        wrong = np.flatnonzero(numbers >= self._starts[1:].take(intervals, mode="clip"))
        intervals[wrong] = np.searchsorted(self._starts, numbers[wrong], "right") - 1
        return intervals

    @cached_property
    def _guesses(self) -> Int64:
        first_stretches = -(-self._starts[1:-1] >> self._stretch)  # per interval but the first: the first inside it
        guesses = np.bincount(first_stretches, minlength=(int(self._starts[-1]) >> self._stretch) + 1)
        return np.cumsum(guesses, out=guesses)

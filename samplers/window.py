"""A window: the rows of a few row groups, shuffled together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dataload.runtime.cached_property import cached_property
from dataload.samplers.interval_index import IntervalIndex
from dataload.samplers.permutation import KeyedPermutation

Int64 = npt.NDArray[np.int64]

LOOKUPS = 8  # rows of each piece whose pieces are looked up together at first: one in 3,000 has none of them
MOST_LOOKUPS = 2048


class Window:
    """Rows of consecutive pieces of row groups, in shuffled order.

    Args:
        pieces: Numbers of the pieces: int64 [k].
        starts: Place before the shuffle at which each piece begins, then the end of the window: int64 [k + 1].
        first: Number in the dataset of the first row of each piece of the dataset: int64 [P].
        key: Draws the permutation.

    Attributes:
        first_rows: Number in the dataset of the first row of each of its pieces: int64 [k].
    """

    def __init__(self, pieces: Int64, starts: Int64, first: Int64, key: int) -> None:
        self.first_rows = first[pieces]
        self._starts = starts
        self._shuffled = KeyedPermutation(int(starts[-1] - starts[0]), key)

    def rows(self, numbers: Int64) -> Int64:
        """Return the rows at these indices of the shuffled window: int64 of the same length."""
        numbers = self._shuffled[numbers]
        pieces = self._index.find(numbers)
        numbers += self._shifts.take(pieces, mode="clip")
        return numbers

    def indices_of(self, numbers: Int64) -> Int64:
        """Return the indices in the shuffled window of rows, given those before the shuffle: int64 [k] both."""
        return self._shuffled.inverse[numbers]

    def first_uses(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield (index in the shuffled window, piece) at the first index from `number` on of each piece, ascending."""
        sizes = np.diff(self._starts)
        unseen = np.ones(len(sizes), np.bool_)
        step = LOOKUPS * len(sizes)
        while number < len(self._shuffled) and unseen.any():
            step = min(step, MOST_LOOKUPS)
            if sizes[unseen].sum() <= step:  # The next rows may have none of so few.
                yield from self._uses_of(np.flatnonzero(unseen), number)
                return
            found = self._index.find(self._shuffled[number : number + step])
            distinct, firsts = np.unique(found, return_index=True)
            for first, piece in sorted(zip(firsts.tolist(), distinct.tolist(), strict=True)):
                if unseen[piece]:
                    unseen[piece] = False
                    yield number + first, piece
            number, step = number + step, 2 * step

    def _uses_of(self, pieces: Int64, number: int) -> Iterator[tuple[int, int]]:
        """Yield what `first_uses` does for some pieces, of which every row is looked up."""
        starts, sizes = (self._starts - self._starts[0])[pieces], np.diff(self._starts)[pieces]
        owners = np.repeat(pieces, sizes)
        rows = np.arange(len(owners)) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
        uses = self._shuffled.inverse[rows]
        order = np.argsort(uses)
        order = order[uses[order] >= number]
        firsts = order[np.sort(np.unique(owners[order], return_index=True)[1])]
        yield from zip(uses[firsts].tolist(), owners[firsts].tolist(), strict=True)

    @cached_property
    def _index(self) -> IntervalIndex:
        return IntervalIndex(self._starts - self._starts[0])

    @cached_property
    def _shifts(self) -> Int64:
        """Difference between row number and index in the unshuffled window, by piece."""
        shifts: Int64 = self.first_rows - (self._starts[:-1] - self._starts[0])
        return shifts

"""The rows of a source that repeats after a few rows: many of its epochs are drawn together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataload.samplers.keys import derive_key, mix
from dataload.samplers.lru import LRU
from dataload.samplers.order import Order

Int64 = npt.NDArray[np.int64]

MOST_ROWS = 1 << 9  # of a small source
DRAWN = 1 << 16  # rows whose hashes are in memory at a time
STREAM_BITS = 16  # of a hash, as many as `order.MOST_STREAMS` has


def is_small(order: Order) -> bool:
    """Return whether `SmallSourceRows` can draw a source's epochs: it has few rows, and one window has all of them."""
    groups = int(np.count_nonzero(order.block_lengths))
    return bool(order.shuffle) and order.n <= MOST_ROWS and (order.shuffle == "full" or groups <= order.window)


class SmallSourceRows:
    """The epochs of a small source: permutations of the rows of each stream, which one key draws for all epochs.

    The `Order` of a source derives several keys for each epoch, which takes 0.2 ms. A source of one row would take this
    time for each row.

    Args:
        order: The order of the source.
    """

    def __init__(self, order: Order) -> None:
        self._seed, self._n, self._streams = order.seed, order.n, order.num_streams
        self._rows, self._cuts = order.line()
        streams = np.repeat(np.arange(order.num_streams), np.diff(self._cuts))
        self._upper_bits = streams.astype(np.uint64) << np.uint64(64 - STREAM_BITS)
        self._latest: LRU[tuple[int, int], Int64] = LRU(4)

    def rows(self, epoch: int, wraps: Int64, positions: Int64) -> Int64:
        """Return the rows at positions of the source's epochs: int64 of the same length.

        Args:
            epoch: Epoch of the mixture.
            wraps: Number of the source's epoch in it: int64 [k].
            positions: Position in the source's epoch: int64 [k].
        """
        if self._n == 1 or not len(positions):
            only: Int64 = np.broadcast_to(self._rows[:1], positions.shape).copy()
            return only
        numbers = positions // self._streams
        places = self._cuts[positions - numbers * self._streams] + numbers
        if (wraps[1:] < wraps[:-1]).any():
            different, which = np.unique(wraps, return_inverse=True)
        else:
            begins = np.append(True, wraps[1:] != wraps[:-1])
            different, which = wraps[begins], np.cumsum(begins) - 1
        if len(different) == 1:
            latest: Int64 = self._latest.get((epoch, int(different[0])), self._one)[places]
            return latest
        rows, at_once = np.empty_like(positions), DRAWN // self._n
        for first in range(0, len(different), at_once):
            chosen = slice(None) if len(different) <= at_once else (which >= first) & (which < first + at_once)
            drawn = self._drawn(epoch, different[first : first + at_once])
            rows[chosen] = drawn[which[chosen] - first, places[chosen]]
        return rows

    def _one(self, key: tuple[int, int]) -> Int64:
        epoch, wrap = key
        rows: Int64 = self._drawn(epoch, np.array([wrap]))[0]
        return rows

    def _drawn(self, epoch: int, wraps: Int64) -> Int64:
        """Return the row at each place of some epochs of the source: int64 [epochs, n]."""
        numbers = (wraps[:, None] * self._n + np.arange(self._n)).astype(np.uint64)
        hashes = mix(derive_key("small source", self._seed, epoch), numbers) >> np.uint64(STREAM_BITS)
        hashes |= self._upper_bits
        drawn: Int64 = self._rows[np.argsort(hashes, axis=1, kind="stable")]
        return drawn

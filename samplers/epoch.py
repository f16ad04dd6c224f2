"""The order of one epoch: row groups shuffled within their streams, rows shuffled within windows of row groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU
from dataload.samplers.permutation import KeyedPermutation
from dataload.samplers.placement import Placement
from dataload.samplers.window import Window

Int64 = npt.NDArray[np.int64]

WINDOWS_AHEAD = 8  # kept, because the lookahead draws them before the batches do


class EpochOrder:
    """The mapping from places of the streams to rows, in the epoch that (seed, epoch) draws.

    Notes: memory is O(row groups); a window's permutation is computed on first use.
    """

    def __init__(self, placement: Placement, seed: int, epoch: int) -> None:
        self._placement = placement
        self._seed = seed
        self._epoch = epoch
        self._pieces = np.concatenate([self._shuffled(stream) for stream in range(len(placement.pieces) - 1)])
        self._starts = np.zeros(len(self._pieces) + 1, np.int64)
        np.take(placement.length, self._pieces, out=self._starts[1:], mode="clip")  # "raise" would copy the output
        np.cumsum(self._starts, out=self._starts)
        self._window_starts = self._starts[placement.windows]
        # A batch draws on all streams at once, and each stream may be at a border of two windows.
        self._windows: LRU[int, Window] = LRU(2 * len(placement.cuts) + WINDOWS_AHEAD)

    @property
    def window_starts(self) -> Int64:
        """First place of each window, then the number of places: int64 [V + 1]."""
        return self._window_starts

    def rows(self, places: Int64) -> Int64:
        """Return the rows at these places: int64 of the same length. Ascending places are fastest."""
        if (places[1:] < places[:-1]).any():
            ascending = np.argsort(places)
            rows = np.empty_like(places)
            rows[ascending] = self.rows(places[ascending])
            return rows
        rows = np.empty_like(places)
        done = 0
        while done < len(places):
            window = self._window_at(places[done])
            end = done + int(np.searchsorted(places[done:], self._window_starts[window + 1]))
            rows[done:end] = self._windows.get(window, self._window).rows(
                places[done:end] - self._window_starts[window]
            )
            done = end
        return rows

    def place_of(self, row: int) -> int:
        """Return the place of a row, as `rows` takes it."""
        first, length = self._placement.first, self._placement.length
        piece = int(np.flatnonzero((first <= row) & (row < first + length))[0])
        before = int(self._starts[np.flatnonzero(self._pieces == piece)[0]]) + row - int(first[piece])
        window = self._window_at(before)
        begin = int(self._window_starts[window])
        return begin + int(self._windows.get(window, self._window).indices_of(np.array([before - begin]))[0])

    def masks_before(self, ends: Int64) -> Iterator[npt.NDArray[np.bool_]]:
        """Yield which rows of each piece come before a place of their stream, in file order: bool [rows of it].

        Args:
            ends: The place of each stream: int64 [S].
        """
        windows = np.searchsorted(self._placement.windows, np.arange(len(self._pieces)), "right") - 1  # of each piece
        streams = np.searchsorted(self._placement.first_windows, windows, "right") - 1
        begins = self._window_starts[windows]
        counts, sizes = ends[streams] - begins, self._window_starts[windows + 1] - begins
        for piece in np.argsort(self._placement.first[self._pieces]).tolist():
            first, end = self._starts[piece : piece + 2].tolist()
            count, begin = int(counts[piece]), int(begins[piece])
            if 0 < count < sizes[piece]:
                window = self._windows.get(int(windows[piece]), self._window)
                yield window.indices_of(np.arange(first - begin, end - begin)) < count
            else:
                yield np.full(end - first, count > 0)

    def first_needs(self, place: int, end: int, starts: Int64) -> Iterator[tuple[int, int]]:
        """Yield (place, row group) at the first place of one stream that needs each row group, in ascending order.

        Args:
            place: First place of the range.
            end: End of the range (exclusive).
            starts: First row of each row group, then the number of rows: int64 [M + 1].
        """
        while place < end:
            number = self._window_at(place)
            begin, window = int(self._window_starts[number]), self._windows.get(number, self._window)
            groups = np.searchsorted(starts, window.first_rows, "right") - 1
            for needed, piece in window.first_uses(place - begin):
                yield begin + needed, int(groups[piece])
            place = int(self._window_starts[number + 1])

    def _window_at(self, place: int) -> int:
        return int(np.searchsorted(self._window_starts, place, "right")) - 1

    def _shuffled(self, stream: int) -> Int64:
        """Return the stream's pieces in this epoch's order."""
        first, end = self._placement.pieces[stream : stream + 2].tolist()
        key = derive_key("row groups", self._seed, self._epoch, stream)
        pieces = KeyedPermutation(end - first, key)[:]
        pieces += first
        return pieces

    def _window(self, number: int) -> Window:
        first, end = self._placement.windows[number : number + 2].tolist()
        stream = int(np.searchsorted(self._placement.first_windows, number, "right")) - 1
        key = derive_key("rows", self._seed, self._epoch, stream, number - int(self._placement.first_windows[stream]))
        return Window(self._pieces[first:end], self._starts[first : end + 1], self._placement.first, key)

"""The order of a dataset's rows as a formula: any part of any epoch by itself, in any process, without torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError
from dataload.samplers.epoch import EpochOrder
from dataload.samplers.lru import LRU
from dataload.samplers.placement import place
from dataload.samplers.window_size import default_window

Int64 = npt.NDArray[np.int64]
Shuffle = Literal["block", "full", False]

SHUFFLES: Final[dict[object, Shuffle]] = {True: "block", "block": "block", "full": "full", False: False}

MOST_STREAMS = 1 << 16  # each costs memory, whether it has rows or not; and 16 bits are sorted by radix


class Order:
    """Which row of a dataset is at which position of which epoch.

    Rows are numbered in file order: those of row group 0, then those of row group 1, and so on. Position p of an epoch
    belongs to stream p mod S and is that stream's row number p div S:

        position  0    1    2    3    4    5    6          S = 3 streams over n = 7 rows
        stream 0  a0             a1             a2         a, b, c: the streams' own orders,
        stream 1       b0             b1                   each over its own row groups
        stream 2            c0             c1

    block_lengths: rows of each row group, in file order; 0 is fine.
    shuffle: "block" (or True): a stream's row groups are shuffled, then its rows in windows of row groups; "full": its
        rows all together; False: file order, without streams.
    seed: of the shuffle; each (seed, epoch) gives an order of its own.
    window: row groups shuffled together, over all streams; None: `default_window`.
    num_streams: parts of the dataset, of equal rows and next to disjoint in row groups, that each global batch draws on
        equally.
    dataset_key: names the dataset; decides, with nothing else, which row groups a stream has.

    Raises ConfigError for an argument that cannot work.

    Notes: memory is O(row groups), whatever the number of rows; seeking costs the same everywhere. Threads may share
    one; pickled copies are small and draw the same order.
    """

    def __init__(
        self,
        block_lengths: Sequence[int] | npt.ArrayLike,
        *,
        shuffle: Shuffle | bool = "block",
        seed: int = 0,
        window: int | None = None,
        num_streams: int = 1,
        dataset_key: bytes = b"",
    ) -> None:
        if shuffle not in SHUFFLES:
            raise ConfigError(f'shuffle={shuffle!r}: use "block" (or True), "full" or False')
        lengths = np.asarray(block_lengths, np.int64)
        if lengths.ndim != 1 or lengths.min(initial=0) < 0:
            raise ConfigError("block_lengths must be one list of row counts, none of them negative")
        self.shuffle = SHUFFLES[shuffle]
        self.seed = int(seed)
        self.window = default_window(lengths) if window is None else int(window)
        self.num_streams = int(num_streams)
        self.dataset_key = dataset_key
        for name, number in (("window", self.window), ("num_streams", self.num_streams)):
            if number < 1:
                raise ConfigError(f"{name}={number}: must be at least 1")
        if self.num_streams > MOST_STREAMS:
            raise ConfigError(f"num_streams={self.num_streams}: must be at most {MOST_STREAMS}; one a node is enough")
        self._starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self._starts[1:])
        self.n = int(self._starts[-1])
        if self.shuffle is False:
            self.num_streams = 1
            return
        width = None if self.shuffle == "full" else max(1, self.window // self.num_streams)
        self._placement = place(self._starts, self.num_streams, width, dataset_key)
        self._epochs: LRU[int, EpochOrder] = LRU(2)  # at an epoch's end the next one is prefetched

    @property
    def block_lengths(self) -> Int64:
        """Rows of each row group: int64 [row groups]."""
        lengths: Int64 = np.diff(self._starts)
        return lengths

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """The rows at these positions of the epoch, by their numbers in the dataset.

        positions: int64 [k], each in [0, n). Returns int64 [k]. Raises IndexError for a position outside.
        """
        asked = np.asarray(positions, np.int64)
        if asked.size and (asked.min() < 0 or asked.max() >= self.n):
            raise IndexError(f"positions {asked.min()} to {asked.max()} are not all in an epoch of {self.n} rows")
        if self.shuffle is False:
            return asked.copy()
        if self.num_streams == 1:
            return self._epoch(epoch).rows(asked)
        numbers = asked // self.num_streams
        streams = asked - numbers * self.num_streams
        places: Int64 = self._placement.cuts[streams] + numbers
        if not (streams[1:] < streams[:-1]).any():
            return self._epoch(epoch).rows(places)
        by_stream = np.argsort(streams.astype(np.uint16), kind="stable")  # 16 bits: numpy sorts them by radix
        rows = np.empty_like(places)
        rows[by_stream] = self._epoch(epoch).rows(places[by_stream])
        return rows

    def blocks_from(self, epoch: int, position: int = 0, streams: Sequence[int] | None = None) -> Iterator[int]:
        """Row groups in the order in which positions from `position` on first need them, each once.

        streams: only the positions of these; None: all. Made as the iterator is walked. Raises IndexError when
        `position` is not in [0, n].
        """
        return (block for _, block in self.needs_from(epoch, position, streams))

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """(position, row group), as `blocks_from`, with the position that needs it first."""
        if not 0 <= position <= self.n:
            raise IndexError(f"position {position} is not in an epoch of {self.n} rows")
        if self.shuffle is False:
            starts = np.maximum(self._starts[:-1], position)
            needed = np.flatnonzero(self._starts[1:] > starts)
            return zip(starts[needed].tolist(), needed.tolist(), strict=True)
        chosen = range(self.num_streams) if streams is None else streams
        # A row group on a border of streams is needed by two of them.
        return _unique(heapq.merge(*(self._first_needs(epoch, position, stream) for stream in chosen)))

    def _first_needs(self, epoch: int, position: int, stream: int) -> Iterator[tuple[int, int]]:
        """(position, row group) where this stream, from `position` on, first needs each row group."""
        start, end = self._placement.cuts[stream : stream + 2].tolist()
        place = start + (position - stream + self.num_streams - 1) // self.num_streams
        for needed, block in self._epoch(epoch).first_needs(place, end, self._starts):
            yield (needed - start) * self.num_streams + stream, block

    def _epoch(self, epoch: int) -> EpochOrder:
        return self._epochs.get(epoch, lambda number: EpochOrder(self._placement, self.seed, number))


def _unique(needs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    seen: set[int] = set()
    for position, block in needs:
        if block not in seen:
            seen.add(block)
            yield position, block

"""The order of a dataset's rows as a formula: any process can compute any part of any epoch, without torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.runtime.cached_property import cached_property
from dataload.samplers.epoch import EpochOrder
from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU
from dataload.samplers.placement import place_row_groups, row_borders
from dataload.samplers.share import RUN_ROWS
from dataload.samplers.window_size import default_window

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Shuffle = Literal["block", "full", False]

OPTIONS: Final = ("shuffle", "seed", "window", "num_streams")
SHUFFLES: Final[dict[object, Shuffle]] = {True: "block", "block": "block", "full": "full", False: False}

MOST_STREAMS = 1 << 16  # an empty stream costs memory, too; and numpy sorts 16 bits by radix


def _row_counts(block_lengths: Any) -> Int64:
    """Return the rows of each row group. Raise ConfigError unless they are one list of numbers."""
    lengths = None
    # NumPy would first read all rows of a dataset.
    if isinstance(block_lengths, Sequence) or hasattr(block_lengths, "__array__"):
        with suppress(TypeError, ValueError, OverflowError):
            lengths = np.asarray(block_lengths, np.int64)
    if lengths is None or lengths.ndim != 1 or lengths.min(initial=0) < 0:
        raise ConfigError(
            "block_lengths must be one list of row counts, none of them negative: pass dataset.block_lengths"
        )
    return lengths


class Order:
    """The mapping from positions of an epoch to rows of a dataset.

    Rows are numbered in file order: first the rows of row group 0, then those of row group 1, and so on. Position p of
    an epoch belongs to stream p mod S and is row number p div S of that stream:

        position  0    1    2    3    4    5    6          S = 3 streams over n = 7 rows
        stream 0  a0             a1             a2         a, b, c: the streams' own orders,
        stream 1       b0             b1                   each over its own row groups
        stream 2            c0             c1

    Args:
        block_lengths: Rows of each row group, in file order: int64 [M]. 0 is allowed.
        shuffle: "block" (or True) shuffles the row groups of a stream, then its rows within windows of row groups.
            "full" shuffles all rows of a stream together. False keeps file order, without streams.
        seed: Seed of the shuffle; each (seed, epoch) has its own order.
        window: Row groups shuffled together, over all streams; None: `default_window`.
        num_streams: Number of shards of the dataset. Shards have equal numbers of rows and share row groups only at
            their borders. Each global batch draws equally on all of them.
        dataset_key: Identifies the dataset. It alone decides the row groups of each stream.

    Raises:
        ConfigError: An argument cannot work.

    Notes: memory is O(row groups), and a seek costs the same at every position. Threads may share one order. Pickled
    copies are small and draw the same order.
    """

    chosen: ClassVar[tuple[str, ...]] = "shuffle", "seed", "window"  # this and the next two as in `PositionOrder`
    homogeneous = False
    run_rows = RUN_ROWS
    taken = 0

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
        lengths = _row_counts(block_lengths)
        self.shuffle = SHUFFLES[shuffle]
        self.seed = whole_number("seed", seed)
        self.window = default_window(lengths) if window is None else whole_number("window", window, least=1)
        self.num_streams = whole_number("num_streams", num_streams, least=1)
        self.dataset_key = dataset_key
        if self.num_streams > MOST_STREAMS:
            raise ConfigError(f"num_streams={self.num_streams}: must be at most {MOST_STREAMS}; one a node is enough")
        self._starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self._starts[1:])
        self.n = int(self._starts[-1])
        if self.shuffle is False:
            self.num_streams = 1
            return
        width = None if self.shuffle == "full" else max(1, self.window // self.num_streams)
        self._placement = place_row_groups(self._starts, self.num_streams, width, dataset_key)
        self._epochs: LRU[int, EpochOrder] = LRU(2)  # at the end of an epoch, the loader prefetches the next one

    @property
    def block_lengths(self) -> Int64:
        """Rows of each row group: int64 [row groups]."""
        lengths: Int64 = np.diff(self._starts)
        return lengths

    @property
    def orders(self) -> tuple[Order, ...]:
        """The order of each dataset: this one."""
        return (self,)

    def most_rows(self, rows: int) -> list[int]:
        """Return how many rows of each dataset may be in `rows` consecutive positions: all."""
        return [rows]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments but for the dataset, as JSON-able values."""
        return {name: getattr(self, name) for name in OPTIONS}

    def with_options(self, **options: Any) -> Order:
        """Return the order of the same dataset with other arguments."""
        return Order(self.block_lengths, dataset_key=self.dataset_key, **{**self.options, **options})

    @cached_property
    def digest(self) -> str:
        """Digest of the dataset key and the row group lengths, which together determine the placement of rows."""
        return f"{derive_key('dataset', self.dataset_key, self.block_lengths.astype('<i8').tobytes()):016x}"

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows at these positions of the epoch.

        Args:
            epoch: Number of the epoch.
            positions: int64 [k], each in [0, n).

        Returns:
            Row numbers in the dataset: int64 [k].

        Raises:
            IndexError: A position is outside of the epoch.
        """
        requested = checked(positions, self.n)
        if self.shuffle is False:
            return requested.copy()
        if self.num_streams == 1:
            return self._epoch(epoch).rows(requested)
        numbers = requested // self.num_streams
        streams = requested - numbers * self.num_streams
        places: Int64 = self._placement.cuts[streams] + numbers
        if not (streams[1:] < streams[:-1]).any():
            return self._epoch(epoch).rows(places)
        by_stream = np.argsort(streams.astype(np.uint16), kind="stable")  # numpy sorts 16 bits by radix
        rows = np.empty_like(places)
        rows[by_stream] = self._epoch(epoch).rows(places[by_stream])
        return rows

    def positions_of(self, epoch: int, row: int) -> Int64:
        """Return where a row of the dataset comes in an epoch: int64 [1], without a look at other rows."""
        if self.shuffle is False:
            return np.array([row], np.int64)
        place, cuts = self._epoch(epoch).place_of(row), self._placement.cuts
        stream = int(np.searchsorted(cuts, place, "right")) - 1
        return np.array([(place - int(cuts[stream])) * self.num_streams + stream], np.int64)

    def had(self, epoch: int, position: int) -> Iterator[tuple[int, Iterator[Mask], bool]]:
        """Yield which rows of each dataset an epoch has had before a position.

        Yields:
            (number of the dataset, which rows of each of its row groups, whether they are of another pass over it than
            the first one). Without a mixture there is one dataset and one pass.
        """
        yield 0, self.masks_before(epoch, position), False

    def masks_before(self, epoch: int, position: int) -> Iterator[Mask]:
        """Yield which rows of each row group come before a position: bool [rows of it], in file order.

        Only the windows that go on at the position are looked into.
        """
        if self.shuffle is False:
            for start, end in pairwise(self._starts.tolist()):
                yield np.arange(start, end) < position
            return
        streams = np.arange(self.num_streams)
        taken = np.maximum(0, (position - streams + self.num_streams - 1) // self.num_streams)
        pieces = self._epoch(epoch).masks_before(
            np.minimum(self._placement.cuts[:-1] + taken, self._placement.cuts[1:])
        )
        for rows in np.diff(self._starts).tolist():
            mask = next(pieces) if rows else np.empty(0, np.bool_)
            while len(mask) < rows:  # A border of streams cuts the row group.
                mask = np.concatenate((mask, next(pieces)))
            yield mask

    def window_starts(self, epoch: int) -> Int64:
        """Return the first position of each window of an order of one stream, then n: int64 [V + 1].

        Orders without windows have parts of many rows instead.
        """
        return self._epoch(epoch).window_starts if self.shuffle == "block" else row_borders(self.n)

    def line(self) -> tuple[Int64, Int64]:
        """Return (rows of all streams in a line, without the shuffle, int64 [n]; their cuts, int64 [S + 1]).

        Memory is O(n). An order without a shuffle has no streams, and raises AttributeError.
        """
        first, length = self._placement.first, self._placement.length
        return np.arange(self.n) + np.repeat(first - np.cumsum(length) + length, length), self._placement.cuts

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) once for each row group: the first position that needs it, in ascending order.

        Args:
            epoch: Number of the epoch.
            position: Start of the positions, in [0, n].
            streams: Consider only the positions of these streams; None: all.

        Raises:
            IndexError: `position` is outside of the epoch.
        """
        if not 0 <= position <= self.n:
            raise IndexError(f"position {position} is not in an epoch of {self.n} rows")
        if self.shuffle is False:
            starts = np.maximum(self._starts[:-1], position)
            needed = np.flatnonzero(self._starts[1:] > starts)
            return zip(starts[needed].tolist(), needed.tolist(), strict=True)
        chosen = range(self.num_streams) if streams is None else streams
        # Two streams need a row group that lies on their border.
        return _unique(heapq.merge(*(self._first_needs(epoch, position, stream) for stream in chosen)))

    def _first_needs(self, epoch: int, position: int, stream: int) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) at the first position from `position` on where this stream needs a row group."""
        start, end = self._placement.cuts[stream : stream + 2].tolist()
        place = start + (position - stream + self.num_streams - 1) // self.num_streams
        for needed, block in self._epoch(epoch).first_needs(place, end, self._starts):
            yield (needed - start) * self.num_streams + stream, block

    def _epoch(self, epoch: int) -> EpochOrder:
        return self._epochs.get(epoch, lambda number: EpochOrder(self._placement, self.seed, number))


def checked(positions: npt.ArrayLike, n: int) -> Int64:
    """Return positions of an epoch of n rows as an array: int64 [k].

    Raises:
        IndexError: A position is outside of the epoch.
    """
    requested = np.asarray(positions, np.int64)
    if requested.size and (requested.min() < 0 or requested.max() >= n):
        raise IndexError(f"positions {requested.min()} to {requested.max()} are not all in an epoch of {n} rows")
    return requested


def _unique(needs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    seen: set[int] = set()
    for position, block in needs:
        if block not in seen:
            seen.add(block)
            yield position, block

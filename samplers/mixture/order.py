"""The order of a mixture's rows as a formula: any process can compute any part of any epoch, without torch."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError
from dataload.runtime.cached_property import cached_property
from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU
from dataload.samplers.mixture.borders import BLOCK, END, Borders
from dataload.samplers.mixture.schedule import Schedule, schedule, shuffled
from dataload.samplers.mixture.weights import integer_weights
from dataload.samplers.order import Order, Shuffle

Int64 = npt.NDArray[np.int64]
Stop = Literal["first_exhausted", "all_exhausted"]
Batching = Literal["mixed", "homogeneous"]

OPTIONS: Final = ("shuffle", "seed", "windows", "num_streams", "weights", "stop", "num_rows", "batching", "batch_rows")
MOST_WRAPS = 1 << 40  # source epochs in one epoch of the mixture
MOST_SOURCES = 1 << 10


@dataclass(frozen=True, eq=False)
class Source:
    """One dataset of a mixture.

    Args:
        block_lengths: Rows of each row group, in file order: int64 [M].
        name: Draws the source's own shuffle, with the seed of the mixture. Names must differ.
        dataset_key: Identifies the dataset; see `Order`.
    """

    block_lengths: Sequence[int] | npt.ArrayLike
    name: str
    dataset_key: bytes = b""


class MixtureOrder:
    """The mapping from positions of an epoch to rows of several datasets; otherwise like `Order`.

    Rows and row groups are numbered through all sources, in the order of the sources. An epoch is a sequence of units.
    All rows of a unit are of one source; a unit has `unit` positions:

        position   0   1   2   3   4   5   6   7   8   9        weights 3 : 1 : 1, unit = 1
        source     a   b   a   c   a   a   a   c   b   a        quotas of a: 0.6 p, of b and c: 0.2 p
        index      0   0   1   0   2   3   4   1   1   5

    Before each position p that begins a unit, a source with share w has p w rows, with an error of less than one unit.
    The same quotas hold in all epochs; (seed, epoch) draws the sequence within blocks of 65,536 units. Index i of a
    source with n rows is its row number i mod n in its epoch i div n, in the order of a dataset of its own. So each row
    comes once before any row comes twice. Each epoch of the mixture begins with new epochs of all sources.

    A unit is one row, or `num_streams` rows: one of each stream of the source. So a node reads row groups of its own
    streams only. With batching="homogeneous" a unit is a global batch.

    Args:
        sources: The datasets.
        weights: One positive number for each source, see `integer_weights`; None: by rows.
        stop: "first_exhausted": the epoch ends before a source can repeat a row. "all_exhausted": it ends when all
            sources must have come once. Both are exact for weights by rows and units of one row; otherwise the epoch is
            shorter or longer by less than one unit of a source, so that its length is the same in all epochs.
        num_rows: Rows of an epoch, instead of `stop`.
        batching: "mixed" or "homogeneous".
        batch_rows: Rows of a global batch, for "homogeneous".
        shuffle: As for `Order`, in each source.
        seed: Seed of the mixture. Each source's own seed follows from it and the name.
        windows: Window of each source, see `Order`; None: the defaults.
        num_streams: Number of streams of each source.

    Attributes:
        n: Rows of an epoch.
        weights: The weights as integers.
        unit: Rows of a unit.
        orders: Order of each source.
        first_rows: Number of the first row of each source, then the number of all rows: int64 [S + 1].
        first_blocks: Number of the first row group of each source, then the number of all: int64 [S + 1].

    Raises:
        ConfigError: An argument cannot work.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Any] | None = None,
        *,
        stop: Stop = "first_exhausted",
        num_rows: int | None = None,
        batching: Batching = "mixed",
        batch_rows: int | None = None,
        shuffle: Shuffle | bool = "block",
        seed: int = 0,
        windows: Sequence[int | None] | None = None,
        num_streams: int = 1,
    ) -> None:
        self.sources, self.seed = tuple(sources), int(seed)
        self.stop, self.num_rows = stop, None if num_rows is None else int(num_rows)
        self.batching, self.batch_rows = batching, None if batch_rows is None else int(batch_rows)
        windows = [None] * len(self.sources) if windows is None else windows
        self._check(weights, windows)
        self.orders = tuple(
            Order(
                source.block_lengths,
                shuffle=shuffle,
                seed=derive_key("source", self.seed, source.name),
                window=window,
                num_streams=num_streams,
                dataset_key=source.dataset_key,
            )
            for source, window in zip(self.sources, windows, strict=True)
        )
        self._rows = [order.n for order in self.orders]
        if 0 in self._rows:
            raise ConfigError(f"source {self.sources[self._rows.index(0)].name!r} has no rows")
        self.shuffle, self.num_streams = self.orders[0].shuffle, self.orders[0].num_streams
        self.windows = [order.window for order in self.orders]
        self.window = sum(self.windows)
        self.block_lengths: Int64 = np.concatenate([order.block_lengths for order in self.orders])
        self.first_rows: Int64 = np.cumsum([0, *self._rows])
        self.first_blocks: Int64 = np.cumsum([0, *(len(order.block_lengths) for order in self.orders)])
        self.weights = integer_weights(self._rows if weights is None else weights)
        self.unit = (self.batch_rows or 1) if batching == "homogeneous" else self.num_streams
        self.n = self._length()
        if self.n > self.unit * (END - BLOCK):
            raise ConfigError(f"an epoch of {self.n} rows is too long: raise the smallest weights, or set num_rows")
        self._borders = Borders(self.weights)
        self._schedules: LRU[int, Schedule] = LRU(2)
        self._blocks: LRU[tuple[int, int], _Block] = LRU(4)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments but for the sources, as JSON-able values that give the same order."""
        return {name: getattr(self, name) for name in OPTIONS} | {"weights": list(self.weights)}

    def with_options(self, **options: Any) -> MixtureOrder:
        """Return the order of the same sources with other arguments."""
        return MixtureOrder(self.sources, **{**self.options, **options})

    @cached_property
    def digest(self) -> str:
        """Digest of all sources: of their names, dataset keys and row group lengths."""
        parts = [(source.name, order.digest) for source, order in zip(self.sources, self.orders, strict=True)]
        return f"{derive_key('mixture', *itertools.chain(*parts)):016x}"

    def draws(self, epoch: int, positions: npt.ArrayLike) -> tuple[Int64, Int64]:
        """Return the source and the index in the source at these positions: int64 [k] each.

        Raises:
            IndexError: A position is outside of the epoch.
        """
        requested = np.asarray(positions, np.int64)
        if requested.size and (requested.min() < 0 or requested.max() >= self.n):
            raise IndexError(
                f"positions {requested.min()} to {requested.max()} are not all in an epoch of {self.n} rows"
            )
        units, offsets = np.divmod(requested, self.unit)
        blocks = units // BLOCK
        sources, indices = np.empty_like(units), np.empty_like(units)
        for number in np.unique(blocks).tolist():
            chosen = np.flatnonzero(blocks == number)
            block, inside = self._block(epoch, number), units[chosen] - number * BLOCK
            sources[chosen], indices[chosen] = block.source[inside], block.index[inside]
        return sources, indices * self.unit + offsets

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows at these positions of the epoch: int64 [k], numbered through all sources.

        Raises:
            IndexError: A position is outside of the epoch.
        """
        sources, indices = self.draws(epoch, positions)
        rows = np.empty_like(indices)
        by_source = np.argsort(sources.astype(np.uint16), kind="stable")  # numpy sorts 16 bits by radix
        borders = np.searchsorted(sources[by_source], np.arange(len(self.orders) + 1))
        for source, (first, end) in enumerate(itertools.pairwise(borders.tolist())):
            if first < end:
                chosen = by_source[first:end]
                rows[chosen] = self._source_rows(source, epoch, indices[chosen]) + self.first_rows[source]
        return rows

    def blocks_from(self, epoch: int, position: int = 0, streams: Sequence[int] | None = None) -> Iterator[int]:
        """Yield the row groups of `needs_from`."""
        return (block for _, block in self.needs_from(epoch, position, streams))

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) for each row group that the rest of an epoch needs, in ascending order.

        A row group comes once in each epoch of its source. The position is the first one that the quota allows for its
        first row; the row comes there or less than two units of its source later.

        Args:
            epoch: Number of the epoch.
            position: Start of the positions, in [0, n].
            streams: Consider only the positions of these streams; None: all. Up to num_streams - 1 rows at the end of
                each epoch of a source may be of other streams; they are left out.

        Raises:
            IndexError: `position` is outside of the epoch.
        """
        if not 0 <= position <= self.n:
            raise IndexError(f"position {position} is not in an epoch of {self.n} rows")
        starts, ends = self._indices_at(epoch, position), self._indices_at(epoch, self.n)
        return heapq.merge(
            *(
                self._source_needs(source, epoch, position, start, end, streams)
                for source, (start, end) in enumerate(zip(starts, ends, strict=True))
            )
        )

    def _check(self, weights: Sequence[Any] | None, windows: Sequence[int | None]) -> None:
        count = len(self.sources)
        if not 0 < count <= MOST_SOURCES:
            raise ConfigError(f"a mixture of {count} sources: it needs 1 to {MOST_SOURCES}")
        if len({source.name for source in self.sources}) < count:
            raise ConfigError("the names of the sources must differ")
        for name, given in (("weights", weights), ("windows", windows)):
            if given is not None and len(given) != count:
                raise ConfigError(f"{len(given)} {name} for {count} sources")
        if self.stop not in ("first_exhausted", "all_exhausted"):
            raise ConfigError(f'stop={self.stop!r}: use "first_exhausted" or "all_exhausted"')
        if self.batching not in ("mixed", "homogeneous"):
            raise ConfigError(f'batching={self.batching!r}: use "mixed" or "homogeneous"')
        if self.batching == "homogeneous" and self.batch_rows is None:
            raise ConfigError('batching="homogeneous" needs batch_rows, the rows of a global batch')
        for name, number in (("num_rows", self.num_rows), ("batch_rows", self.batch_rows)):
            if number is not None and number < 1:
                raise ConfigError(f"{name}={number}: must be at least 1")

    def _length(self) -> int:
        if self.num_rows is not None:
            return self.num_rows
        total, pairs = sum(self.weights), list(zip(self._rows, self.weights, strict=True))
        if self.stop == "first_exhausted":  # before the first position that the quota allows for the first repetition
            return min(rows // self.unit * total // weight * self.unit + rows % self.unit for rows, weight in pairs)
        # after the last position that the quota allows for the last row
        last = [(rows - 1) // self.unit + 1 for rows in self._rows]
        return max(
            (-(-units * total // weight) - 1) * self.unit + (rows - 1) % self.unit + 1
            for units, (rows, weight) in zip(last, pairs, strict=True)
        )

    def _block(self, epoch: int, number: int) -> _Block:
        return self._blocks.get((epoch, number), self._make_block)

    def _make_block(self, key: tuple[int, int]) -> _Block:
        epoch, number = key
        units = self._schedules.get(number, lambda block: schedule(self._borders, block * BLOCK))
        source = shuffled(units, derive_key("mixture", self.seed, epoch, number)).source.astype(np.uint16)
        by_source = np.argsort(source, kind="stable")
        counts = np.bincount(source, minlength=len(self.orders))
        shifts = self._borders.counts(number * BLOCK) - (np.cumsum(counts) - counts)
        index = np.empty(BLOCK, np.int64)
        index[by_source] = np.arange(BLOCK) + np.repeat(shifts, counts)
        return _Block(source, index)

    def _indices_at(self, epoch: int, position: int) -> list[int]:
        """Return the rows of each source before a position."""
        unit, offset = divmod(position, self.unit)
        number, inside = divmod(unit, BLOCK)
        counts = self._borders.counts(number * BLOCK)
        if inside or offset:
            block = self._block(epoch, number)
            counts = counts + np.bincount(block.source[:inside], minlength=len(self.orders))
        rows: list[int] = (counts * self.unit).tolist()
        if offset:
            rows[int(block.source[inside])] += offset
        return rows

    def _source_rows(self, source: int, epoch: int, indices: Int64) -> Int64:
        """Return the rows of a source at these indices, numbered in the source."""
        order, size = self.orders[source], self._rows[source]
        wraps = indices // size
        positions = self._in_own_streams(source, indices - wraps * size, wraps)
        low, high = int(wraps.min()), int(wraps.max())
        if low == high:
            return order.rows(source_epoch(epoch, low), positions)
        rows = np.empty_like(indices)
        by_wrap = np.argsort(wraps, kind="stable")
        numbers, firsts = np.unique(wraps[by_wrap], return_index=True)
        for number, chosen in zip(numbers.tolist(), np.split(by_wrap, firsts[1:]), strict=True):
            rows[chosen] = order.rows(source_epoch(epoch, number), positions[chosen])
        return rows

    def _in_own_streams(self, source: int, positions: Int64, wraps: Int64) -> Int64:
        """Return positions of a source's epoch such that index i belongs to stream i mod num_streams in all epochs.

        Each epoch of the source begins at another stream, if streams do not divide its rows. So the positions of each
        stripe of num_streams are rotated, except for the last, partial stripe.
        """
        streams, size = self.num_streams, self._rows[source]
        if streams == 1:
            return positions
        numbers = positions % streams
        rotated = positions - numbers + (numbers + wraps % streams * (size % streams)) % streams
        return np.where(positions < size - size % streams, rotated, positions)

    def _source_needs(
        self, source: int, epoch: int, position: int, start: int, end: int, streams: Sequence[int] | None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) for the indices from `start` to `end` of a source."""
        size, total, weight = self._rows[source], sum(self.weights), self.weights[source]
        shift = int(self.first_blocks[source])
        while start < end:
            wrap, first = divmod(start, size)
            first -= first % self.num_streams
            for needed, block in self.orders[source].needs_from(source_epoch(epoch, wrap), first, streams):
                index = wrap * size + needed - needed % self.num_streams  # of the stripe, see `_in_own_streams`
                if index >= end:
                    return
                unit, offset = divmod(index, self.unit)
                yield max(position, unit * total // weight * self.unit + offset), shift + block
            start = (wrap + 1) * size


@dataclass(frozen=True, eq=False)
class _Block:
    """The sources of a block's units, uint16 [BLOCK], and their numbers in their sources, int64 [BLOCK]."""

    source: npt.NDArray[np.uint16]
    index: Int64


def source_epoch(epoch: int, wrap: int) -> int:
    """Return the number that draws a source's order when it comes for the wrap-th time in an epoch of a mixture."""
    return epoch * MOST_WRAPS + wrap

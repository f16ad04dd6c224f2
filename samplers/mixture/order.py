"""The order of a mixture's rows as a formula: any process can compute any part of any epoch, without torch."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, pairwise
from numbers import Real
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.runtime.cached_property import cached_property
from dataload.samplers.keys import derive_key
from dataload.samplers.mixture.borders import BLOCK
from dataload.samplers.mixture.continued import ContinuedRows
from dataload.samplers.mixture.quotas import END, Quotas
from dataload.samplers.mixture.sequence import UnitSequence
from dataload.samplers.mixture.source import STRETCH, MixtureSource, SourceRows
from dataload.samplers.mixture.weights import Weights, integer_weights, knots, plain, weights_of
from dataload.samplers.order import Mask, Order, Shuffle, checked
from dataload.samplers.placement import MOST_ROWS, row_borders
from dataload.samplers.rest import Left, LeftOrder
from dataload.samplers.share import RUN_ROWS

Int64 = npt.NDArray[np.int64]
Stop = Literal["first_exhausted", "all_exhausted"]
Batching = Literal["mixed", "homogeneous"]

OPTIONS: Final = ("shuffle", "seed", "windows", "num_streams", "weights", "stop", "num_rows", "batching", "batch_rows")
MOST_SOURCES = 1 << 10
MOST_RUNS = 8  # of RUN_ROWS that are computed together
NEEDS_APART = 1 << 10  # positions between two needs of a row group of a small source, if it repeats more often


def check_choices(stop: str, batching: str) -> None:
    """Raise ConfigError unless both arguments of a mixture have one of their values."""
    if stop not in ("first_exhausted", "all_exhausted"):
        raise ConfigError(f'stop={stop!r}: use "first_exhausted" or "all_exhausted"')
    if batching not in ("mixed", "homogeneous"):
        raise ConfigError(f'batching={batching!r}: use "mixed" or "homogeneous"')


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
        weights: One positive number for each source, see `integer_weights`, or a `Schedule`; None: by rows.
        stop: "first_exhausted": the epoch ends before a source can repeat a row. "all_exhausted": it ends when all
            sources must have come once. Both are exact for weights by rows and units of one row; otherwise the epoch is
            shorter or longer by less than one unit of a source, so that its length is the same in all epochs.
        num_rows: Rows of an epoch, instead of `stop`.
        batching: "mixed" or "homogeneous". Padding of a partial homogeneous batch repeats rows of that batch.
        batch_rows: Rows of a global batch, for "homogeneous".
        shuffle: As for `Order`, in each source.
        seed: Seed of the mixture. Each source's own seed follows from it and the name.
        windows: Window of each source, see `Order`; None: the defaults.
        num_streams: Number of streams of each source.
        left: What is left of the pass over each source, of an epoch whose data has changed; None: all.
        left_by_rows: Whether the sources have shares of the epoch by these rows, because the weights are by rows.

    Attributes:
        n: Rows of an epoch.
        weights: The weights as integers, or a `Schedule` of them.
        unit: Rows of a unit.
        orders: Order of each source.
        first_rows: Number of the first row of each source, then the number of all rows: int64 [S + 1].
        first_blocks: Number of the first row group of each source, then the number of all: int64 [S + 1].

    Raises:
        ConfigError: An argument cannot work.
    """

    chosen: ClassVar[tuple[str, ...]] = "shuffle", "seed", "windows"  # this and the next one as in `PositionOrder`
    taken = 0

    def __init__(
        self,
        sources: Sequence[MixtureSource],
        weights: Sequence[Any] | Weights | None = None,
        *,
        stop: Stop = "first_exhausted",
        num_rows: int | None = None,
        batching: Batching = "mixed",
        batch_rows: int | None = None,
        shuffle: Shuffle | bool = "block",
        seed: int = 0,
        windows: Sequence[int | None] | None = None,
        num_streams: int = 1,
        left: Sequence[Left] | None = None,
        left_by_rows: bool = False,
    ) -> None:
        self.sources, self.seed = tuple(sources), whole_number("seed", seed)
        self.stop, self.num_rows = stop, num_rows
        self.batching = batching
        self.batch_rows = None if batch_rows is None else whole_number("batch_rows", batch_rows, least=1)
        self.homogeneous = batching == "homogeneous"
        windows = [None] * len(self.sources) if windows is None else windows
        self._check(windows)
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
        rows = [order.n for order in self.orders]
        if 0 in rows:
            raise ConfigError(f"source {self.sources[rows.index(0)].name!r} has no rows")
        self.shuffle, self.num_streams = self.orders[0].shuffle, self.orders[0].num_streams
        self.windows = [order.window for order in self.orders]
        self.block_lengths: Int64 = np.concatenate([order.block_lengths for order in self.orders])
        self.first_rows: Int64 = np.cumsum([0, *rows])
        self.first_blocks: Int64 = np.cumsum([0, *(len(order.block_lengths) for order in self.orders)])
        self.weights = weights_of(rows if weights is None else weights)
        if (count := len(knots(self.weights).weights[0])) != len(rows):
            raise ConfigError(f"{count} weights for {len(rows)} sources: give one for each")
        self.unit = (self.batch_rows or 1) if batching == "homogeneous" else self.num_streams
        many = len(self.orders) // 16
        self.run_rows = RUN_ROWS * min(MOST_RUNS, 1 + many)  # each source costs its own overhead
        whole = [SourceRows(order, STRETCH // 4 if many else STRETCH) for order in self.orders]
        self._first_pass, self._source_rows, shares = rows, list[SourceRows | ContinuedRows](whole), self.weights
        if left is not None:
            parts = [LeftOrder.of(order, part) for order, part in zip(self.orders, left, strict=True)]
            self._first_pass = [part.n for part in parts]
            self._source_rows = [ContinuedRows(*each) for each in zip(parts, whole, strict=True)]
            if left_by_rows and any(self._first_pass):  # What is left comes once, too.
                shares = integer_weights(self._first_pass, zero=True)
        self._quotas = Quotas(shares, self.unit)
        self.n, last = self.length(self.unit)
        if self.n > self.unit * (END - BLOCK):
            if last is not None and not knots(self.weights).weights[-1][last]:
                raise ConfigError(
                    f'stop="all_exhausted": source {self.sources[last].name!r} has the weight 0 at the end of the '
                    "schedule, before all of its rows have come: set num_rows, or give it a weight there"
                )
            raise ConfigError(f"an epoch of {self.n} rows is too long: raise the smallest weights, or set num_rows")
        self._units = UnitSequence(self._quotas, self.seed, self.n // self.unit + 1, reshuffled=bool(self.shuffle))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments but for the sources, as JSON-able values that give the same order."""
        return {name: getattr(self, name) for name in OPTIONS} | {"weights": plain(self.weights)}

    def with_options(self, **options: Any) -> MixtureOrder:
        """Return the order of the same sources with other arguments."""
        return MixtureOrder(self.sources, **{**self.options, **options})

    @cached_property
    def digest(self) -> str:
        """Digest of all sources: of their names, dataset keys and row group lengths."""
        parts = [(source.name, order.digest) for source, order in zip(self.sources, self.orders, strict=True)]
        return f"{derive_key('mixture', *chain(*parts)):016x}"

    def draws(self, epoch: int, positions: npt.ArrayLike) -> tuple[Int64, Int64]:
        """Return the source and the index in the source at these positions: int64 [k] each.

        Raises:
            IndexError: A position is outside of the epoch.
        """
        requested = checked(positions, self.n)
        units = requested // self.unit
        sources, numbers = self._units.draws(epoch, units)
        return sources, (numbers - units) * self.unit + requested

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows at these positions of the epoch: int64 [k], numbered through all sources.

        Raises:
            IndexError: A position is outside of the epoch.
        """
        requested = checked(positions, self.n)
        if len(requested) and (np.diff(requested) == 1).all():
            return self._consecutive(epoch, int(requested[0]), int(requested[-1]) + 1)
        sources, indices = self.draws(epoch, requested)
        rows = np.empty_like(indices)
        by_source = np.argsort(sources.astype(np.uint16), kind="stable")  # numpy sorts 16 bits by radix
        borders = np.searchsorted(sources[by_source], np.arange(len(self.orders) + 1))
        for source, (first, end) in enumerate(pairwise(borders.tolist())):
            if first < end:
                chosen = by_source[first:end]
                rows[chosen] = self._source_rows[source].rows(epoch, indices[chosen]) + self.first_rows[source]
        return rows

    def positions_of(self, epoch: int, row: int) -> Int64:
        """Return where a row comes in an epoch, ascending: int64 [k]. A source of several streams is walked through."""
        source = int(np.searchsorted(self.first_rows, row, "right")) - 1
        count = self._indices_at(epoch, self.n)[source]
        found = []
        for index in self._source_rows[source].indices_of(epoch, row - int(self.first_rows[source]), count).tolist():
            start, end = (limit(self._quotas, source, index, self.unit) for limit in (_earliest, _latest))
            positions = np.arange(start, min(end + 1, self.n))
            sources, indices = self.draws(epoch, positions)
            found.append(positions[(sources == source) & (indices == index)])
        return np.concatenate([np.empty(0, np.int64), *found])

    def had(self, epoch: int, position: int) -> Iterator[tuple[int, Iterator[Mask], bool]]:
        """Yield what the passes over the sources that go on at a position have had, as `Order.had` does."""
        for source, count in enumerate(self._indices_at(epoch, position) if position else ()):
            if count:
                yield source, self._source_rows[source].had(epoch, count), count > self._first_pass[source]

    def window_starts(self, epoch: int) -> Int64:  # noqa: ARG002
        """Return the first position of parts of the epoch, then n: int64. None has more than a window of a source."""
        least = MOST_ROWS
        for order, rows in zip(self.orders, self.most_rows(MOST_ROWS), strict=True):
            window = order.n * order.window // max(1, len(order.block_lengths)) if order.shuffle == "block" else order.n
            least = min(least, window * MOST_ROWS // max(1, rows))
        return row_borders(self.n, least)

    def most_rows(self, rows: int) -> list[int]:
        """Return how many rows of each source may be in `rows` consecutive positions."""
        units = -(-rows // self.unit) + 1
        return [min(rows, most * self.unit) for most in self._quotas.most(units)]

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) for each row group that the rest of an epoch needs, in ascending order.

        A row group comes once in each epoch of its source, or once in about `NEEDS_APART` positions if its source has
        few rows and repeats more often. The position is the first one that the quota allows for its first row; the row
        comes there or less than two units of its source later.

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
        starts = self._indices_at(epoch, position) if position else [0] * len(self.orders)
        needs = (self._source_needs(source, epoch, position, start, streams) for source, start in enumerate(starts))
        return heapq.merge(*needs, key=operator.itemgetter(0))

    def _check(self, windows: Sequence[int | None]) -> None:
        count = len(self.sources)
        if not 0 < count <= MOST_SOURCES:
            raise ConfigError(f"a mixture of {count} sources: it needs 1 to {MOST_SOURCES}")
        if len({source.name for source in self.sources}) < count:
            raise ConfigError("the names of the sources must differ")
        if len(windows) != count:
            raise ConfigError(f"{len(windows)} windows for {count} sources: give one for each")
        check_choices(self.stop, self.batching)
        if self.batching == "homogeneous" and self.batch_rows is None:
            raise ConfigError('batching="homogeneous" needs batch_rows, the rows of a global batch')
        if (number := self.num_rows) is not None:
            if not isinstance(number, Real) or number < 1 or number % 1:
                raise ConfigError(f"num_rows={number}: must be a whole number of at least 1")
            self.num_rows = int(number)

    def length(self, unit: int) -> tuple[int, int | None]:
        """Return the rows of an epoch in units of `unit` rows, and the source that ends it; None: `num_rows` does."""
        if self.num_rows is not None:
            return self.num_rows, None
        rows = self._first_pass
        if not any(rows):
            return 0, None
        quotas = self._quotas if unit == self.unit else Quotas(self.weights, unit)
        if self.stop == "first_exhausted":  # before the first position that the quota allows for the first repetition
            return min((_earliest(quotas, source, count, unit), source) for source, count in enumerate(rows))
        # after the last position that the quota allows for the last row
        return max((1 + _latest(quotas, source, count - 1, unit), source) for source, count in enumerate(rows) if count)

    def _consecutive(self, epoch: int, start: int, end: int) -> Int64:
        """Return the rows at the positions from `start` to `end`: int64 [end - start]."""
        first, last = start // self.unit, -(-end // self.unit)
        rows = np.empty(last - first if self.unit == 1 else (last - first, self.unit), np.int64)
        for source, places, number in self._units.parts(epoch, first, last):
            indices = number * self.unit, (number + len(places)) * self.unit
            found = self._source_rows[source].consecutive(epoch, *indices) + self.first_rows[source]
            rows[places] = found if self.unit == 1 else found.reshape(-1, self.unit)
        return rows.ravel()[start - first * self.unit :][: end - start]

    def _indices_at(self, epoch: int, position: int) -> list[int]:
        """Return the rows of each source before a position."""
        unit, offset = divmod(position, self.unit)
        rows: list[int] = (self._units.counts(epoch, unit) * self.unit).tolist()
        if offset:
            [source], _ = self._units.draws(epoch, np.array([unit]))
            rows[source] += offset
        return rows

    def _source_needs(
        self, source: int, epoch: int, position: int, start: int, streams: Sequence[int] | None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) for the indices of a source from `start` to the end of the epoch."""
        units, rest = divmod(self.n, self.unit)
        quota = self._last_quotas[source]
        # The quota leaves the number of rows open by one unit. Only the last block of the epoch determines it.
        least, most = math.floor(quota) * self.unit, math.ceil(quota) * self.unit + rest
        if start >= least:
            least = most = self._indices_at(epoch, self.n)[source]
        shift, apart = int(self.first_blocks[source]), max(1, int(NEEDS_APART * quota / max(1, units)))
        for index, block in self._source_rows[source].needs(epoch, start, most, streams, apart):
            if index >= least and index >= self._indices_at(epoch, self.n)[source]:
                return
            yield max(position, _earliest(self._quotas, source, index, self.unit)), shift + block

    @cached_property
    def _last_quotas(self) -> list[Fraction]:
        """Quota of each source at the last border of units of an epoch."""
        return self._quotas.at(self.n // self.unit)


def _earliest(quotas: Quotas, source: int, index: int, unit: int) -> int:
    """Return the first position that the quota allows for an index of a source, in units of `unit` rows."""
    number, offset = divmod(index, unit)
    return quotas.earliest(source, number) * unit + offset


def _latest(quotas: Quotas, source: int, index: int, unit: int) -> int:
    """Return the last position that the quota allows for an index of a source, in units of `unit` rows."""
    number, offset = divmod(index, unit)
    return quotas.latest(source, number) * unit + offset

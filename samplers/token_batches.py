"""Batches of variable numbers of rows within a token budget, as a formula: an order whose positions are cut by length.

The rows of a *plan window*, consecutive positions of another order, are sorted by length and cut into batches, each as
long as its padded size stays within the budget. Groups of `together` similar batches then come in a shuffled order. So
any process knows any batch from the lengths of its plan window alone, and all ranks of a step have similar batches.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.weights import Weights, knots
from dataload.samplers.order import Order
from dataload.samplers.permutation import KeyedPermutation

Int64 = npt.NDArray[np.int64]

STEPS = 16  # of a plan window, at least: the last step of each has smaller batches
OPTIONS: Final = ("batch_tokens", "pad_to_multiple", "together")


@dataclass(frozen=True)
class TokenBudget:
    """What batches are cut by.

    Args:
        tokens: Most tokens of a batch: rows times the longest one, rounded up to `multiple`.
        lengths: Returns the lengths of rows, given their numbers: int64 [k] both.
        mean: Mean length.
        multiple: Padded lengths are multiples of it.
        name: Identifies the lengths.
        means: Mean length of each source of a mixture.
    """

    tokens: int
    lengths: Callable[[Int64], Int64]
    mean: float
    multiple: int = 1
    name: str = ""
    means: tuple[float, ...] = ()

    def mean_of(self, weights: Weights | None) -> float:
        """Return about the mean length of the rows of an epoch. weights: of a mixture; None: each row comes once."""
        if weights is None or not self.means:
            return self.mean
        shares = np.mean([np.array(each) / sum(each) for each in knots(weights).weights], axis=0)
        return float(shares @ np.array(self.means))

    def padded(self, lengths: Int64) -> Int64:
        """Return lengths with padding: int64 [k]. An empty row counts as one token."""
        padded: Int64 = -(-np.maximum(lengths, 1) // self.multiple) * self.multiple
        return padded


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of a plan window.

    Args:
        rows: Row numbers, batch by batch: int64 [rows].
        ends: Rows up to the end of each batch: int64 [batches].
    """

    rows: Int64
    ends: Int64


class TokenOrder:
    """An order whose positions are the rows of another one, batch by batch. Otherwise like that order.

    Args:
        order: The other order, of one stream.
        budget: What batches are cut by.
        together: Similar batches that come one after the other: those of a step, if there are as many ranks.
    """

    homogeneous = False

    def __init__(self, order: Order | MixtureOrder, budget: TokenBudget, together: int) -> None:
        self._base, self.budget, self.together = order, budget, together
        self.batch_tokens, self.pad_to_multiple = budget.tokens, budget.multiple
        self.n, self.chosen = order.n, order.chosen
        mean = budget.mean_of(getattr(order, "weights", None))
        self._least = -int(-STEPS * together * budget.tokens // max(mean, 1.0))  # rows of a plan window
        self._borders: LRU[int, list[int]] = LRU(2)
        self._plans: LRU[tuple[int, int], Plan] = LRU(4)
        self._counts: LRU[int, list[int]] = LRU(4)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._base, name)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments but for the dataset, as JSON-able values."""
        return self._base.options | {name: getattr(self, name) for name in OPTIONS}

    @property
    def digest(self) -> str:
        """Identifies the rows and their lengths."""
        return f"{derive_key('token batches', self._base.digest, self.budget.name):016x}"

    def with_options(self, **options: Any) -> TokenOrder:
        """Return the order of the same rows with other options.

        Raises:
            ConfigError: They have another budget.
        """
        together = options.pop("together", self.together)
        own = {"batch_tokens": self.batch_tokens, "pad_to_multiple": self.pad_to_multiple}
        for name, value in own.items():
            if (saved := options.pop(name, value)) != value:
                raise ConfigError(
                    f"the state is in an epoch with {name}={saved}, whose batches {name}={value} would cut elsewhere: "
                    f"pass {name}={saved} until the epoch ends, or begin another one with set_epoch"
                )
        return TokenOrder(self._base.with_options(**options), self.budget, together)

    def most_rows(self, rows: int) -> list[int]:
        """Return how many rows of each dataset may be in `rows` consecutive positions."""
        return self._base.most_rows(rows + 2 * self._least)

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows at these positions of the epoch: int64 [k]."""
        requested = np.asarray(positions, np.int64)
        found, borders = np.empty_like(requested), self.borders(epoch)
        windows = np.searchsorted(borders, requested, "right") - 1
        for window in np.unique(windows).tolist():
            chosen = windows == window
            found[chosen] = self.plan(epoch, window).rows[requested[chosen] - borders[window]]
        return found

    def positions_of(self, epoch: int, row: int) -> Int64:
        """Return where a row comes in an epoch, ascending: int64 [k]."""
        borders = self.borders(epoch)
        windows = {self.window_at(epoch, position) for position in self._base.positions_of(epoch, row).tolist()}
        found = [borders[window] + np.flatnonzero(self.plan(epoch, window).rows == row) for window in sorted(windows)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) as the other order does. A batch may need all row groups of its plan window."""
        borders = self.borders(epoch)
        for needed, group in self._base.needs_from(epoch, borders[self.window_at(epoch, position)], streams):
            yield max(position, borders[self.window_at(epoch, needed)]), group

    def borders(self, epoch: int) -> list[int]:
        """Return the first position of each plan window of an epoch, and the number of positions."""
        return self._borders.get(epoch, self._merged)

    def window_at(self, epoch: int, position: int) -> int:
        """Return the plan window of a position; at the end of the epoch, the last one."""
        borders = self.borders(epoch)
        return max(0, min(bisect_right(borders, position), len(borders) - 1) - 1)

    def plan(self, epoch: int, window: int) -> Plan:
        """Return the batches of a plan window."""
        return self._plans.get((epoch, window), self._planned)

    def ends_from(self, epoch: int, position: int) -> Iterator[int]:
        """Yield the position after each batch from `position` on, which is the border of two batches.

        Raises:
            ConfigError: It is inside a batch.
        """
        borders = self.borders(epoch)
        for window in range(self.window_at(epoch, position), len(borders) - 1):
            ends = self.plan(epoch, window).ends + borders[window]
            first = int(np.searchsorted(ends, position, "right"))
            if position > (ends[first - 1] if first else borders[window]):
                raise ConfigError(f"position {position} is inside a batch: give all that state_dict() returned")
            yield from ends[first:].tolist()
            position = borders[window + 1]

    def tokens_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the tokens of an epoch and the places of padding beside them, for which all lengths are read."""
        tokens = places = 0
        for window in range(len(self.borders(epoch)) - 1):
            rows, ends = self._cuts(epoch, window)
            lengths = self.budget.lengths(rows)
            sizes = np.diff(ends, prepend=0)
            tokens += int(lengths.sum())
            places += int((self.budget.padded(lengths)[ends - sizes] * sizes).sum())  # Each begins with its longest.
        return tokens, places - tokens

    def batches(self, epoch: int) -> int:
        """Return the batches of an epoch, for which all lengths are read."""
        return sum(self._counts.get(epoch, self._counted))

    def _counted(self, epoch: int) -> list[int]:
        return [len(self._cuts(epoch, window)[1]) for window in range(len(self.borders(epoch)) - 1)]

    def _merged(self, epoch: int) -> list[int]:
        borders = [0]
        for start in self._base.window_starts(epoch)[1:].tolist():
            if start - borders[-1] >= self._least or start == self.n:
                borders.append(start)
        if len(borders) > 2 and borders[-1] - borders[-2] < self._least:
            del borders[-2]
        return borders

    def _cuts(self, epoch: int, window: int) -> tuple[Int64, Int64]:
        """Return the rows of a plan window from the longest to the shortest, and the ends of batches."""
        start, end = self.borders(epoch)[window : window + 2]
        rows = self._base.rows(epoch, np.arange(start, end))
        padded = self.budget.padded(self.budget.lengths(rows))
        by_length = np.argsort(-padded, kind="stable")  # rows of equal length stay shuffled
        rows, padded = rows[by_length], padded[by_length]
        most = np.maximum(self.budget.tokens // padded, 1).tolist()
        # The first batch has a part of its rows only, another one in each epoch: so neighbours change.
        place = 1 + derive_key("first", self.seed, epoch, window) % most[0] if self.shuffle else most[0]
        ends = []
        while place < len(most):
            ends.append(place)
            place += most[place]
        ends.append(len(most))
        whole = min(-(-len(ends) // self.together) * self.together, len(most) // self.together * self.together)
        return rows, np.array(halved(ends, max(len(ends), whole)))

    def _planned(self, key: tuple[int, int]) -> Plan:
        epoch, window = key
        rows, ends = self._cuts(epoch, window)
        if not self.shuffle:
            return Plan(rows, ends)
        count, size = len(ends), self.together
        groups = KeyedPermutation(count // size, derive_key("groups", self.seed, epoch, window))[:]
        within = KeyedPermutation(count, derive_key("batches", self.seed, epoch, window))[:]
        # Batches that are left over, if there are too few rows for whole groups, come last.
        order = np.lexsort((within, np.append(groups, count // size)[np.arange(count) // size]))
        parts = np.split(rows, ends[:-1])
        return Plan(
            np.concatenate([parts[batch] for batch in order.tolist()]), np.cumsum(np.diff(ends, prepend=0)[order])
        )


def halved(ends: Sequence[int], count: int, start: int = 0) -> list[int]:
    """Return the ends of batches after the largest ones are cut in two, until there are `count` or all have one row.

    Args:
        ends: Rows up to the end of each batch.
        count: The number of batches that is wanted, not below that of `ends`.
        start: Rows before the first batch.
    """
    batches = [(begin - end, begin) for begin, end in pairwise([start, *ends])]
    heapq.heapify(batches)
    while len(batches) < count and batches[0][0] < -1:
        size, begin = heapq.heappop(batches)
        half = -size // 2
        heapq.heappush(batches, (-half, begin))
        heapq.heappush(batches, (size + half, begin + half))
    return sorted(begin - size for size, begin in batches)

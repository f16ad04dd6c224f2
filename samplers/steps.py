"""The steps of an epoch: which rows each rank has in each of them. Nothing here moves; see `RankSampler` for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.samplers.order import Mask, Order
from dataload.samplers.share import Share

Int64 = npt.NDArray[np.int64]


class PositionOrder(Protocol):
    """A mapping from the positions of an epoch to rows: an `Order`, a `MixtureOrder` or a `TokenOrder`.

    Attributes:
        n: Rows of an epoch.
        num_streams: Position p of an epoch belongs to stream p mod num_streams.
        seed: Seed of the shuffle.
        homogeneous: Whether a global batch must not have rows of other positions, such as the epoch's first ones.
        run_rows: Rows that a rank computes together.
        taken: First position that can be read: those before are of data that has changed since, see `Continued`.
        chosen: Names of the options that an epoch takes from the arguments of the sampler, not from a state.
    """

    chosen: ClassVar[tuple[str, ...]]
    n: int
    num_streams: int
    seed: int
    homogeneous: bool
    run_rows: int
    taken: int

    @property
    def orders(self) -> tuple[Order, ...]:
        """The order of each dataset."""

    def most_rows(self, rows: int) -> list[int]:
        """Return how many rows of each dataset may be in `rows` consecutive positions."""

    @property
    def shuffle(self) -> Any:
        """Kind of the shuffle; False for file order."""

    @property
    def options(self) -> dict[str, Any]:
        """JSON-able values that give the same order of the same data."""

    @property
    def digest(self) -> str:
        """Identifies the data."""

    def with_options(self, **options: Any) -> Self:
        """Return the order of the same data with other options."""

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows at these positions of the epoch: int64 [k]."""

    def positions_of(self, epoch: int, row: int) -> Int64:
        """Return where a row comes in an epoch, ascending: int64 [k]."""

    def had(self, epoch: int, position: int) -> Iterator[tuple[int, Iterator[Mask], bool]]:
        """Yield (dataset, which rows of each of its row groups, whether a later pass has them) before a position."""

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) for the row groups that the rest of the epoch needs, in ascending order."""


@dataclass(frozen=True)
class Steps(ABC):
    """The steps of the epochs of an order, and one rank's batch in each: `EvenSteps`, or `BudgetSteps`.

    A cursor is the number of rows of the epoch before a step. Both classes cut the epoch into units, of which a step
    has `units` of its own: rows, or the batches of a token budget.

    Args:
        order: The order.
        share: How the ranks divide it.
    """

    order: Any  # a `PositionOrder`
    share: Share
    is_even: ClassVar[bool]  # whether all batches but the last have `batch_size` rows

    @property
    @abstractmethod
    def text(self) -> str:
        """The size of a batch in words."""

    @property
    @abstractmethod
    def units(self) -> int:
        """Units of a step."""

    @abstractmethod
    def runs(self, epoch: int, cursor: int) -> Iterator[tuple[Int64, int, int]]:
        """Yield the rank's batches from a cursor on, several of equal size at a time.

        Yields:
            (rows: int64 [batches, rows of each], cursor of the first batch, rows of each step)
        """

    @abstractmethod
    def units_between(self, epoch: int, start: int, end: int) -> int:
        """Return the units that end after the cursor `start` and not after `end`."""

    @abstractmethod
    def after_units(self, epoch: int, cursor: int, units: int) -> int:
        """Return the cursor after so many more units, at most the end of the epoch."""

    @abstractmethod
    def left(self, epoch: int, cursor: int) -> int:
        """Return the steps of the rest of an epoch."""

    def is_over(self, epoch: int, cursor: int) -> bool:
        """Return whether no step is left."""
        return self.left(epoch, cursor) == 0

    @abstractmethod
    def padding(self, epoch: int, cursor: int) -> int:
        """Return the number of this rank's rows that repeat others in the rest of an epoch."""

    @abstractmethod
    def remainder(self, cursor: int) -> int:
        """Return the rows of the last step from a cursor on if some ranks' batches may have padding, else 0."""

    @abstractmethod
    def tokens_of(self, rows: Int64) -> tuple[int, int] | None:
        """Return the tokens, and the places of padding beside them, of a batch of these rows; None: unknown."""

    def check(self, epoch: int, cursor: int) -> None:  # noqa: ARG002
        """Raise ConfigError unless a step may begin here."""
        if not 0 <= cursor <= self.order.n:
            raise ConfigError(f"cursor {cursor} is not in an epoch of {self.order.n} rows")

    def after(self, epoch: int, cursor: int, steps: int) -> int:
        """Return the cursor after so many more steps, at most the end of the epoch."""
        return self.after_units(epoch, cursor, steps * self.units)

    def number_at(self, epoch: int, cursor: int) -> tuple[int, int]:
        """Return the number of whole steps of the epoch before a cursor, and how many units are left over."""
        return divmod(self.units_between(epoch, 0, cursor), self.units)

    def of_rank(self, rank: int) -> Self:
        """Return the steps with the batches of another rank."""
        rank = whole_number("rank", rank)
        if rank >= self.share.num_replicas:
            raise ConfigError(f"rank={rank} is not among the {self.share.num_replicas} ranks: they count from 0")
        return replace(self, share=replace(self.share, rank=rank))

    def seeds(self, epoch: int) -> tuple[tuple[int, int, int], tuple[int, int] | None]:
        """Return what draws the random numbers of transforms in an epoch, and the documents of packed sequences."""
        seed = self.order.seed
        return (seed, epoch, self.share.rank), (seed, epoch) if self.order.shuffle else None


class EvenSteps(Steps):
    """Steps of `batch_size` rows for each rank, but for the last one. Their units are rows."""

    is_even: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """The size of a batch in words."""
        return f"{self.share.batch_size:,} rows a batch"

    @property
    def units(self) -> int:
        """Rows of a step."""
        return self.share.global_batch_size

    def runs(self, epoch: int, cursor: int) -> Iterator[tuple[Int64, int, int]]:
        """Yield the rank's batches from a cursor on, as in `Steps`, in growing groups."""
        for positions in self.share.runs(cursor, self.order.n):
            yield self.order.rows(epoch, positions.ravel()).reshape(positions.shape), cursor, self.units
            cursor += self.units * len(positions)

    def units_between(self, epoch: int, start: int, end: int) -> int:  # noqa: ARG002
        """Return the rows between two cursors."""
        return end - start

    def after_units(self, epoch: int, cursor: int, units: int) -> int:  # noqa: ARG002
        """Return the cursor after so many more rows, at most the end of the epoch."""
        return min(cursor + units, int(self.order.n))

    def left(self, epoch: int, cursor: int) -> int:  # noqa: ARG002
        """Return the steps of the rest of an epoch."""
        return self.share.num_batches(self.order.n - cursor)

    def padding(self, epoch: int, cursor: int) -> int:  # noqa: ARG002
        """Return the number of this rank's rows that repeat others in the rest of an epoch."""
        return self.share.padding(self.order.n - cursor)

    def remainder(self, cursor: int) -> int:
        """Return the rows of the last step from a cursor on, if it is a partial one, else 0."""
        return 0 if self.share.drop_last else (self.order.n - cursor) % self.units

    def tokens_of(self, rows: Int64) -> None:  # noqa: ARG002
        """Return None: the tokens of a batch are unknown."""
        return


@dataclass(frozen=True)
class EpochPlace:
    """The place of a rank in an epoch, to look at its steps without a sampler that moves.

    Args:
        steps: The steps of the epoch, with the batches of the rank.
        epoch: Number of the epoch.
        cursor: Rows of it before the place.
    """

    steps: Steps
    epoch: int
    cursor: int

    @property
    def step(self) -> int:
        """Number of the next step in the epoch."""
        return self.steps.number_at(self.epoch, self.cursor)[0]

    @property
    def left(self) -> int:
        """Steps of the rest of the epoch."""
        return self.steps.left(self.epoch, self.cursor)

    @property
    def batch(self) -> Int64:
        """The rows of the rank in the next step: int64 [rows]."""
        rows: Int64 = next(self.steps.runs(self.epoch, self.cursor))[0][0]
        return rows

    @property
    def batches(self) -> list[Int64]:
        """The rows of each rank in the next step."""
        return [self.of_rank(rank).batch for rank in range(self.steps.share.num_replicas)]

    def of_rank(self, rank: int) -> EpochPlace:
        """Return the same place of another rank."""
        return replace(self, steps=self.steps.of_rank(rank))

    def later(self, steps: int) -> EpochPlace:
        """Return the place so many steps later, at most the end of the epoch."""
        return replace(self, cursor=self.steps.after(self.epoch, self.cursor, steps))

    def steps_with(self, row: int) -> list[int]:
        """Return the numbers, counted from here, of the steps that have a row in the rest of the epoch, ascending."""
        steps, positions = self.steps, self.steps.order.positions_of(self.epoch, row)
        ahead = positions[positions >= self.cursor].tolist()
        return sorted({steps.units_between(self.epoch, self.cursor, position) // steps.units for position in ahead})

"""The rest of an epoch whose data has changed: rows of the new data, after a prefix that the old data has given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError
from dataload.samplers.order import Mask, Order, checked

if TYPE_CHECKING:
    from dataload.samplers.mixture.order import MixtureOrder

Int64 = npt.NDArray[np.int64]


class Left(Protocol):
    """The rows of a dataset that the epoch has not had."""

    @property
    def lengths(self) -> Int64:
        """Such rows of each row group: int64 [M]."""

    def rows(self, numbers: Int64) -> Int64:
        """Return their numbers in the dataset, by their numbers among such rows: int64 [k] both."""

    def among(self, masks: Iterator[Mask]) -> Iterator[Mask]:
        """Yield which rows of each row group of the dataset some of them are, given which of such rows."""


class LeftOrder(Order):
    """An order of the rows that are left of a dataset, which have the numbers that they have in the dataset."""

    def __init__(self, left: Left, **options: Any) -> None:
        super().__init__(left.lengths, **options)
        self._left = left

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows at these positions of the epoch, as `Order.rows` does."""
        return self._left.rows(super().rows(epoch, positions))

    def masks_before(self, epoch: int, position: int) -> Iterator[Mask]:
        """Yield which rows of each row group of the dataset come before a position, as `Order.masks_before` does."""
        return self._left.among(super().masks_before(epoch, position))

    @classmethod
    def of(cls, order: Order, left: Left) -> LeftOrder:
        """Return the order of what is left of the dataset of another order, with the same options."""
        return cls(left, dataset_key=order.dataset_key, **order.options)


class Continued:
    """An epoch that goes on with other data. Otherwise like `Order`; see `PositionOrder`.

    Positions count from the beginning of the epoch, so the first `taken` are of the old data and cannot be read.

    Args:
        plain: The order of a whole epoch of the new data, which later epochs have.
        left: The order of the rows that the epoch has not had.
        taken: Rows of the epoch that the old data has given.
        parts: What is left of each dataset, of which `left` is the order.
    """

    homogeneous = True  # Padding repeats rows of the last batch: the first ones of the epoch may be gone.

    def __init__(
        self, plain: Order | MixtureOrder, left: LeftOrder | MixtureOrder, taken: int, parts: Sequence[Left]
    ) -> None:
        self.plain, self.left, self.taken, self.parts = plain, left, taken, parts
        self.n, self.num_streams = taken + left.n, left.num_streams

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "plain":
            raise AttributeError(name)
        return getattr(self.plain, name)  # such as its options, its digest, and the weights of a mixture

    @property
    def orders(self) -> tuple[Order, ...]:
        """The order of each dataset."""
        return self.left.orders

    def most_rows(self, rows: int) -> list[int]:
        """Return how many rows of each dataset may be in `rows` consecutive positions."""
        return self.left.most_rows(rows)

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows of the new data at these positions.

        Raises:
            IndexError: A position is outside of the epoch.
            ConfigError: A position is of the old data.
        """
        requested = checked(positions, self.n)
        if requested.size and requested.min() < self.taken:
            raise ConfigError(
                f"row {requested.min()} of epoch {epoch} is of data that has changed since, up to row {self.taken}: a "
                "trainer that skips the batches that it has had cannot continue then, so begin an epoch with set_epoch"
            )
        return self.left.rows(epoch, requested - self.taken)

    def positions_of(self, epoch: int, row: int) -> Int64:
        """Return where a row of the new data comes in the rest of the epoch: int64 [k], by a look at all of it."""
        return self.taken + np.flatnonzero(self.left.rows(epoch, np.arange(self.left.n)) == row)

    def had(self, epoch: int, position: int) -> Iterator[tuple[int, Iterator[Mask], bool]]:
        """Yield what the epoch has had of the new data before a position, as `Order.had` does."""
        return self.left.had(epoch, position - self.taken)

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) of the rest of the epoch, as `Order.needs_from` does."""
        if streams is not None:  # Position p is of stream p mod S, here and in the order of what is left.
            streams = [(stream - self.taken) % self.num_streams for stream in streams]
        needs = self.left.needs_from(epoch, max(0, position - self.taken), streams)
        return ((self.taken + needed, group) for needed, group in needs)

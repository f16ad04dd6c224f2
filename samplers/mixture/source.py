"""The rows of one source of a mixture, epoch after epoch of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.order import Order

Int64 = npt.NDArray[np.int64]

MOST_WRAPS = 1 << 40  # epochs of a source in one epoch of the mixture


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


class SourceRows:
    """The endless sequence of a source's rows: index i is row number i mod n of its epoch i div n.

    Index i belongs to stream i mod num_streams in all epochs. If streams do not divide n, each epoch of the source
    begins at another stream: positions are rotated within stripes of num_streams, except for the last, partial stripe.
    The rows of that stripe, fewer than num_streams, may be of other streams than their index.

    Args:
        order: The order of the source.
    """

    def __init__(self, order: Order) -> None:
        self._order = order

    def rows(self, epoch: int, indices: Int64) -> Int64:
        """Return the rows at these indices in an epoch of the mixture: int64 of the same length."""
        wraps = indices // self._order.n
        positions = self._rotated(indices - wraps * self._order.n, wraps)
        low, high = int(wraps.min(initial=0)), int(wraps.max(initial=0))
        if low == high:
            return self._order.rows(source_epoch(epoch, low), positions)
        rows = np.empty_like(indices)
        by_wrap = np.argsort(wraps, kind="stable")
        numbers, firsts = np.unique(wraps[by_wrap], return_index=True)
        for number, chosen in zip(numbers.tolist(), np.split(by_wrap, firsts[1:]), strict=True):
            rows[chosen] = self._order.rows(source_epoch(epoch, number), positions[chosen])
        return rows

    def needs(self, epoch: int, start: int, end: int, streams: Sequence[int] | None) -> Iterator[tuple[int, int]]:
        """Yield (index, row group) for the row groups of the indices from `start` to `end` (exclusive).

        The index is the first one of the stripe of num_streams that needs the row group first.
        """
        stripe = self._order.num_streams
        while start < end:
            wrap, first = divmod(start, self._order.n)
            needs = self._order.needs_from(source_epoch(epoch, wrap), first - first % stripe, streams)
            for position, block in needs:
                index = start - first + position - position % stripe
                if index >= end:
                    return
                yield index, block
            start += self._order.n - first

    def _rotated(self, positions: Int64, wraps: Int64) -> Int64:
        stripe, n = self._order.num_streams, self._order.n
        if stripe == 1:
            return positions
        numbers = positions % stripe
        rotated = positions - numbers + (numbers + wraps % stripe * (n % stripe)) % stripe
        return np.where(positions < n - n % stripe, rotated, positions)


def source_epoch(epoch: int, wrap: int) -> int:
    """Return the number that draws a source's order when it comes for the wrap-th time in an epoch of a mixture."""
    return epoch * MOST_WRAPS + wrap

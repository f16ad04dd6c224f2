"""The rows of one source of a mixture, epoch after epoch of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.lru import LRU
from dataload.samplers.mixture.small_source import SmallSourceRows, is_small
from dataload.samplers.order import Mask, Order

Int64 = npt.NDArray[np.int64]

MOST_WRAPS = 1 << 40  # epochs of a source in one epoch of the mixture
STRETCH = 1 << 14  # rows computed together: numpy's overhead for each computation is the time for 10,000 rows
WALKED = 1 << 20  # rows that a walk through a source computes together
FIRST_STRETCH = 1 << 8  # rows, so that the first batch does not wait for many others; each further stretch is longer


@dataclass(frozen=True, eq=False)
class MixtureSource:
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
        stretch: Most rows that `consecutive` computes together and keeps: a power of two.
    """

    def __init__(self, order: Order, stretch: int = STRETCH) -> None:
        self._order = order
        self._stretch = stretch
        self._stretches: LRU[tuple[int, int, int, int], Int64] = LRU(2)
        self._small = SmallSourceRows(order) if is_small(order) else None
        self._groups = np.repeat(np.arange(len(order.block_lengths)), order.block_lengths) if self._small else None

    def rows(self, epoch: int, indices: Int64) -> Int64:
        """Return the rows at these indices in an epoch of the mixture: int64 of the same length."""
        wraps = indices // self._order.n
        positions = self._rotated(indices - wraps * self._order.n, wraps)
        if self._small is not None:
            return self._small.rows(epoch, wraps, positions)
        low, high = int(wraps.min(initial=0)), int(wraps.max(initial=0))
        if low == high:
            return self._order.rows(source_epoch(epoch, low), positions)
        rows = np.empty_like(indices)
        by_wrap = np.argsort(wraps, kind="stable")
        numbers, firsts = np.unique(wraps[by_wrap], return_index=True)
        for number, chosen in zip(numbers.tolist(), np.split(by_wrap, firsts[1:]), strict=True):
            rows[chosen] = self._order.rows(source_epoch(epoch, number), positions[chosen])
        return rows

    def consecutive(self, epoch: int, start: int, end: int) -> Int64:
        """Return the rows at the indices from `start` to `end`, as `rows` does. The caller must not change them."""
        if self._small is not None:
            return self.rows(epoch, np.arange(start, end))
        parts = []
        while start < end:
            wrap, position = divmod(start, self._order.n)
            size = min(max(FIRST_STRETCH, 1 << max(0, position.bit_length() - 1)), self._stretch)
            first = position % size
            key = epoch, wrap, position - first, size
            parts.append(self._stretches.get(key, self._computed)[first : first + end - start])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def had(self, epoch: int, count: int) -> Iterator[Mask]:
        """Yield which rows of each row group the last pass has had before the index `count`, which is positive."""
        wrap = (count - 1) // self._order.n
        position = count - wrap * self._order.n
        # Positions are rotated within a stripe, so a whole stripe has the rows that it has without.
        whole = 0 if self._small is not None else position - position % self._order.num_streams
        others = np.sort(self.rows(epoch, np.arange(count - position + whole, count)))
        ends = np.cumsum(self._order.block_lengths)
        parts = np.split(others, np.searchsorted(others, ends[:-1]))
        masks = self._order.masks_before(source_epoch(epoch, wrap), whole)
        for mask, rows, first in zip(masks, parts, (ends - self._order.block_lengths).tolist(), strict=True):
            mask[rows - first] = True
            yield mask

    def indices_of(self, epoch: int, row: int, end: int) -> Int64:
        """Return the indices below `end` that have a row, ascending: int64 [k]."""
        n, found = self._order.n, [np.empty(0, np.int64)]
        if self._small is None and self._order.num_streams == 1:
            wraps = range(-(-end // n))
            found += [wrap * n + self._order.positions_of(source_epoch(epoch, wrap), row) for wrap in wraps]
        else:
            for start in range(0, end, WALKED):
                indices = np.arange(start, min(start + WALKED, end))
                found.append(indices[self.rows(epoch, indices) == row])
        indices = np.concatenate(found)
        return indices[indices < end]

    def needs(
        self, epoch: int, start: int, end: int, streams: Sequence[int] | None, at_once: int = 1
    ) -> Iterator[tuple[int, int]]:
        """Yield (index, row group) for the row groups of the indices from `start` to `end` (exclusive).

        The index is the first one of the stripe of num_streams that needs the row group first. A small source that
        repeats more often than each `at_once` indices yields its row groups once in about so many indices.
        """
        n = self._order.n
        while start < end:
            wrap, first = divmod(start, n)
            for index, block in self._needs_of(epoch, wrap, first, streams):
                if index >= end:
                    return
                yield index, block
            start = (wrap + 1) * n
            if self._small is not None and not first:
                start += (at_once - 1) // n * n

    def _computed(self, key: tuple[int, int, int, int]) -> Int64:
        epoch, wrap, first, size = key
        begin = wrap * self._order.n
        return self.rows(epoch, np.arange(begin + first, begin + min(first + size, self._order.n)))

    def _needs_of(self, epoch: int, wrap: int, first: int, streams: Sequence[int] | None) -> Iterator[tuple[int, int]]:
        """Yield the needs of one epoch of the source, from position `first` on."""
        stripe, begin = self._order.num_streams, wrap * self._order.n
        aligned = first - first % stripe
        if self._groups is None:
            for position, block in self._order.needs_from(source_epoch(epoch, wrap), aligned, streams):
                yield begin + position - position % stripe, block
            return
        indices = np.arange(begin + aligned, begin + self._order.n)
        if streams is not None and len(streams) < stripe:
            whole = indices < begin + self._order.n - self._order.n % stripe
            indices = indices[whole & np.isin(indices % stripe, streams)]
        groups, firsts = np.unique(self._groups[self.rows(epoch, indices)], return_index=True)
        for index, block in sorted(zip(indices[firsts].tolist(), groups.tolist(), strict=True)):
            yield index - (index - begin) % stripe, block

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

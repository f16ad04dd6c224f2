"""A mixture whose data has changed within an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dataload.samplers.mixture.source import SourceRows, source_epoch
from dataload.samplers.order import Mask
from dataload.samplers.rest import LeftOrder

Int64 = npt.NDArray[np.int64]


class ContinuedRows:
    """The endless sequence of a source in such an epoch: what is left of a pass over it, then whole passes.

    Args:
        left: The order of what is left.
        whole: The sequence of whole passes.
    """

    def __init__(self, left: LeftOrder, whole: SourceRows) -> None:
        self._left, self._whole = left, whole

    def rows(self, epoch: int, indices: Int64) -> Int64:
        """Return the rows at these indices, as `SourceRows.rows` does."""
        rows, first = np.empty_like(indices), indices < self._left.n
        rows[first] = self._left.rows(source_epoch(epoch, 0), indices[first])
        rows[~first] = self._whole.rows(epoch, indices[~first] - self._left.n)
        return rows

    def consecutive(self, epoch: int, start: int, end: int) -> Int64:
        """Return the rows at the indices from `start` to `end`, as `rows` does."""
        return self.rows(epoch, np.arange(start, end))

    def had(self, epoch: int, count: int) -> Iterator[Mask]:
        """Yield which rows the last pass has had before an index, as `SourceRows.had` does."""
        if count > self._left.n:
            return self._whole.had(epoch, count - self._left.n)
        return self._left.masks_before(source_epoch(epoch, 0), count)

    def indices_of(self, epoch: int, row: int, count: int) -> Int64:
        """Return which of the first `count` indices have a row, as `SourceRows.indices_of` does: by a look at all."""
        return np.flatnonzero(self.rows(epoch, np.arange(count)) == row)

    def needs(
        self, epoch: int, start: int, end: int, streams: Sequence[int] | None, at_once: int = 1
    ) -> Iterator[tuple[int, int]]:
        """Yield (index, row group) for the row groups of some indices, as `SourceRows.needs` does."""
        left, stripe = self._left.n, self._left.num_streams
        if start < left:
            for position, group in self._left.needs_from(source_epoch(epoch, 0), start - start % stripe, streams):
                if position >= end:
                    return
                yield position - position % stripe, group
        if end > left:
            for index, group in self._whole.needs(epoch, max(0, start - left), end - left, streams, at_once):
                yield left + index, group

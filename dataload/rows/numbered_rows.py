"""A batch as a sequence of row dicts that also knows the rows' numbers in the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dataload.rows.collate import Batch, Empty, Rows, columns_of, cut
from dataload.rows.columns import Array
from dataload.rows.row_block import Records
from dataload.runtime.cached_property import cached_property

ROW_ID = "row_id"
"""Name of the column of row numbers."""


class NumberedRows(Rows):
    """A batch as a sequence of row dicts, which are made on access.

    Args:
        records: The rows.
        numbers: Their numbers in the dataset, int64 [B].
        row_ids: Whether batches have the numbers as column "row_id".
        **shape: Arguments of `to_batch`.

    Attributes:
        numbers: As above.
    """

    def __init__(self, records: Records, numbers: Array, *, row_ids: bool = False, **shape: Any) -> None:
        super().__init__(records, **shape)
        self.numbers = numbers
        self._row_ids = row_ids
        self._shape = shape

    @cached_property
    def columns(self) -> Batch:
        """The whole batch, as `batch` returns it."""
        return self.batch()

    def batch(self, empty: Empty | None = None) -> Batch:
        """Return the rows as a batch, in memory that `empty` allocates. See `to_batch`."""
        return next(self.batches([len(self)], empty))

    def batches(self, sizes: Sequence[int], empty: Empty | None = None) -> Iterator[Batch]:
        """Return consecutive batches of these sizes. The Python objects of a batch are made when it is taken."""
        batch = columns_of(self._records, **self._shape, empty=empty)
        if self._row_ids:
            # A copy: a transform that changes the column must not change the order of the rows.
            size, dtype = (len(self),), torch.int64
            column = torch.empty(size, dtype=dtype) if empty is None else empty(size, dtype)
            column.numpy()[...] = self.numbers
            batch[ROW_ID] = column
        return cut(batch, sizes, empty)

    def shaped(self, *, row_ids: bool = False, **shape: Any) -> NumberedRows:
        """Return the same rows with other arguments of `to_batch`, with or without their numbers."""
        return NumberedRows(self._records, self.numbers, row_ids=row_ids, **shape)

    def part(self, span: slice) -> NumberedRows:
        """Return some of the rows."""
        return NumberedRows(self._records[span], self.numbers[span], row_ids=self._row_ids, **self._shape)

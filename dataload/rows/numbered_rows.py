"""A batch as a sequence of row dicts that also knows the rows' numbers in the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch

from dataload.catalog.locations import Location
from dataload.errors import ConfigError, DataError, RowError
from dataload.rows.collate import Batch, Empty, columns_of, cut, row_value, with_strings
from dataload.rows.columns import Array
from dataload.rows.row_block import Records
from dataload.runtime.bisection import bisected
from dataload.runtime.cached_property import cached_property
from dataload.runtime.fatal_frames import reading

ROW_ID = "row_id"
"""Name of the column of row numbers."""

Computed = Mapping[str, Callable[[Array], Array]]
"""Names of columns, and for each a function from row numbers to int64 values, [B] both."""

Locate = Callable[[int], Location]

ROW_IDS: Computed = {ROW_ID: np.asarray}
"""The column of row numbers."""


class NumberedRows(Sequence[dict[str, Any]]):
    """A batch as a sequence of row dicts, with the numbers of the rows. Each dict is made at its first access.

    Args:
        records: The rows.
        numbers: Their numbers in the dataset, int64 [B].
        locate: Returns the location of a row of the dataset, given its number.
        computed: Columns of batches that are computed from the numbers.
        **shape: Arguments of `to_batch`.

    Attributes:
        numbers: As above.
    """

    def __init__(
        self, records: Records, numbers: Array, locate: Locate, *, computed: Computed | None = None, **shape: Any
    ) -> None:
        self._records = records
        self.numbers = numbers
        self._locate = locate
        self._computed = computed or {}
        self._shape = shape
        self._made = dict[int, dict[str, Any]]()  # kept, because collate functions may change rows in place

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"a sequence of rows has no attribute {name!r}: a collate_fn for lists of rows needs "
            "lambda rows: collate_fn(list(rows))"
        )

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, row: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        places = range(len(self))
        if isinstance(row, slice):
            return [self[place] for place in places[row]]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a batch of {len(self)}")
        place = places[row]
        if place not in self._made:
            self._made[place] = {name: row_value(column, place) for name, column in self.columns.items()}
        return self._made[place]

    @cached_property
    def columns(self) -> Batch:
        """The whole batch, as `batch` returns it."""
        return self.batch()

    def batch(self, empty: Empty | None = None) -> Batch:
        """Return the rows as a batch, in memory that `empty` allocates. See `to_batch`.

        Raises:
            ConfigError: A batch can hold each of the rows, but not all of them. It names the column.
            DataError: A batch cannot hold a value. It names the file, the row group and the column.
        """
        try:
            return with_strings(next(self.batches([len(self)], empty)))
        except DataError as error:
            row = bisected(len(self), self._fails)
            if not self._fails(slice(row, row + 1)):
                raise ConfigError(str(error)) from error
            location = self._locate(int(self.numbers[row]))
            raise RowError(f"{location.text}: {error}", str(error)) from error

    def _fails(self, span: slice) -> bool:
        """Return whether no batch can be made of some of the rows."""
        some = self.part(span)
        try:
            next(some.batches([len(some)]))
        except DataError:
            return True
        return False

    def batches(self, sizes: Sequence[int], empty: Empty | None = None) -> Iterator[Batch]:
        """Return consecutive batches of these sizes, whose strings `with_strings` makes.

        The other Python objects of a batch are made when it is taken.
        """
        batch = reading(self._records.place, columns_of, self._records, **self._shape, empty=empty)
        for name, values in self._computed.items():
            # A copy: a transform that changes the column must not change the order of the rows.
            size, dtype = (len(self),), torch.int64
            column = torch.empty(size, dtype=dtype, device="cpu") if empty is None else empty(size, dtype)
            column.numpy()[...] = values(self.numbers)
            batch[name] = column
        return cut(batch, sizes, empty)

    def shaped(self, *, computed: Computed | None = None, **shape: Any) -> NumberedRows:
        """Return the same rows with other computed columns and other arguments of `to_batch`."""
        return NumberedRows(self._records, self.numbers, self._locate, computed=computed, **shape)

    def part(self, span: slice) -> NumberedRows:
        """Return some of the rows."""
        some, numbers = self._records[span], self.numbers[span]
        return NumberedRows(some, numbers, self._locate, computed=self._computed, **self._shape)

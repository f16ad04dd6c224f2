"""A batch as a list of row dicts that also knows the rows' numbers in the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import torch

from dataload.catalog.locations import Location
from dataload.errors import ConfigError, DataError, RowError
from dataload.rows.collate import Batch, Empty, Padded, columns_of, cut, row_values, spans, with_lists, with_strings
from dataload.rows.columns import Array
from dataload.rows.packing import OF_BATCHES
from dataload.rows.row_block import Records
from dataload.rows.row_store import Draw
from dataload.rows.sequences import Sequences
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


class PlacedRows(list[int]):
    """The row numbers of a loader's batch.

    Attributes:
        place: (stream, cursor) of the batch, see `Request`, which decide its random numbers.
        draw: The order of its epoch, see `Request`.
    """

    def __init__(self, rows: Iterable[int], place: tuple[tuple[int, ...], int], draw: Draw) -> None:
        super().__init__(rows)
        self.place, self.draw = place, draw


class NumberedRows(list[dict[str, Any]]):
    """A batch as a list of row dicts, with the numbers of the rows. The dicts are made at the first look at the list.

    Whoever only asks for `columns` or `numbers` makes none: each method of a list makes them first. C code that reads a
    list without its methods would find None for each row. It is pickled and copied as a plain list.

    Args:
        records: The rows.
        numbers: Their numbers in the dataset, int64 [B].
        locate: Returns the location of a row of the dataset, given its number.
        computed: Columns of batches that are computed from the numbers.
        lengths: Returns the lengths of rows, given their numbers, int64 [B] both. No padded list may be longer.
        **shape: Arguments of `columns_of`.

    Attributes:
        numbers: As above.
        place: That of `PlacedRows`; None: the rows are no batch of a loader.
        draw: That of `PlacedRows`, or of epoch 0.
    """

    place: tuple[tuple[int, ...], int] | None = None
    draw: Draw = None

    def __new__(cls, rows: Any = (), numbers: Array | None = None, *_: Any, **__: Any) -> Any:
        """Return a plain list of rows if only these are given: trainers rebuild lists by `type(rows)(others)`."""
        return list(rows) if numbers is None else super().__new__(cls)

    def __init__(
        self,
        records: Records | Sequences,
        numbers: Array,
        locate: Locate,
        *,
        computed: Computed | None = None,
        lengths: Callable[[Array], Array] | None = None,
        **shape: Any,
    ) -> None:
        super().__init__([None] * len(numbers))  # type: ignore[list-item]
        self._records = records
        self.numbers = numbers
        self._locate = locate
        self._computed = computed or {}
        self._lengths = lengths
        self._shape = shape
        self._is_filled = False

    def single(self) -> dict[str, Any]:
        """Return the row of a batch of one, with the values of the batch."""
        return {name: next(iter(row_values(column))) for name, column in self._columns_of_rows.items()}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)

    def __radd__(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*rows, *self]  # `list + list` would look into this one itself

    def _fill(self) -> None:
        if not self._is_filled:
            columns = self._columns_of_rows
            self._is_filled = True
            values = (
                row_values(column) if isinstance(column, torch.Tensor) else with_lists(row_values(column))
                for column in columns.values()
            )
            self[:] = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]

    @cached_property
    def columns(self) -> Batch:
        """The whole batch, as `batch` returns it."""
        return self.batch()

    @property
    def _columns_of_rows(self) -> Batch:
        """The columns with a value for each row."""
        if isinstance(self._records, Records):
            return self.columns
        return {name: column for name, column in self.columns.items() if name not in OF_BATCHES}

    def batch(self, empty: Empty | None = None) -> Batch:
        """Return the rows as a batch, in memory that `empty` allocates. See `to_batch`.

        Raises:
            ConfigError: A batch can hold each of the rows, but not all of them. It names the column.
            DataError: A batch cannot hold a value. It names the file, the row group and the column.
        """
        try:
            return with_strings(next(self.batches([len(self.numbers)], empty)))
        except DataError as error:
            row = bisected(len(self.numbers), self._fails)
            if row is None:
                raise ConfigError(str(error)) from error
            location = self._locate(int(self.numbers[row]))
            raise RowError(f"{location.text}: {error}", str(error)) from error

    def _fails(self, span: slice) -> bool:
        """Return whether no batch can be made of some of the rows."""
        some = self.part(span)
        try:
            next(some.batches([len(some.numbers)]))
        except DataError:
            return True
        return False

    def batches(self, sizes: Sequence[int], empty: Empty | None = None) -> Iterator[Batch]:
        """Return consecutive batches of these sizes, whose strings `with_strings` makes.

        The other Python objects of a batch are made when it is taken.
        """
        records = self._records
        make: Callable[..., Batch] = records.columns if isinstance(records, Sequences) else partial(columns_of, records)
        batch = reading(records.place, make, **self._shape, empty=empty)
        self._check_lengths(batch)
        for name, values in self._computed.items():
            # A copy: a transform that changes the column must not change the order of the rows.
            size, dtype = (len(self.numbers),), torch.int64
            column = torch.empty(size, dtype=dtype, device="cpu") if empty is None else empty(size, dtype)
            column.numpy()[...] = values(self.numbers)
            batch[name] = column
        parts = cut(batch, sizes, empty)
        return records.with_bounds(parts, sizes, empty) if isinstance(records, Sequences) else parts

    def _check_lengths(self, batch: Batch) -> None:
        """Raise DataError for a padded list that is longer than the token budget counts."""
        for name, column in batch.items():
            if self._lengths is None or not isinstance(column, Padded):
                continue
            found, counted = np.diff(column.rows.offsets), self._lengths(self.numbers)
            longer = np.flatnonzero(found > counted)
            if len(longer):
                row = longer[0]
                raise DataError(
                    f"column {name!r} has {found[row]:,} values, and batch_tokens counts {counted[row]:,}, by the "
                    f"column that length= names: correct it, pass length={name!r}, or leave {name!r} out with columns="
                )

    def shaped(self, *, computed: Computed | None = None, **shape: Any) -> NumberedRows:
        """Return the same rows with other computed columns and other arguments of `columns_of`."""
        return NumberedRows(self._records, self.numbers, self._locate, computed=computed, **shape)

    def tokens(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the tokens, the places of padding and the documents left out of batches; none of what isn't packed."""
        records = self._records
        if isinstance(records, Records):
            return [(0, 0, 0)] * len(sizes)
        filled, left_out = (
            np.add.reduceat(each, [span.start for span in spans(sizes)]).tolist()
            for each in (records.filled, records.left_out)
        )
        places = [records.packing.length * size for size in sizes]
        return [(tokens, each - tokens, out) for tokens, each, out in zip(filled, places, left_out, strict=True)]

    def part(self, span: slice) -> NumberedRows:
        """Return some of the rows."""
        some, numbers = self._records[span], self.numbers[span]
        return NumberedRows(some, numbers, self._locate, computed=self._computed, lengths=self._lengths, **self._shape)


def _filled(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(rows: NumberedRows, *args: Any, **kwargs: Any) -> Any:
        rows._fill()  # noqa: SLF001 (of this module)
        return method(rows, *args, **kwargs)

    return call


_OF_THE_TYPE = {"__new__", "__init__", "__getattribute__", "__class_getitem__"}
for _name in {name for name, method in vars(list).items() if callable(method)} - _OF_THE_TYPE:
    setattr(NumberedRows, _name, _filled(getattr(list, _name)))

"""From Arrow to what training takes: a batch is a dict of arrays by row, of lists of bytes, or of lists of strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

Batch = dict[str, Any]
Row = dict[str, Any]


class Read(Protocol):
    """What there is to know of a workload to make its batches."""

    @property
    def batch_size(self) -> int: ...
    @property
    def transform(self) -> Callable[[Row], Row] | None: ...


def batches_of(table: pa.Table, read: Read) -> Iterator[Batch]:
    """The rows of `table`, in order, in batches (the last may be smaller), each transformed."""
    for chunk in table.combine_chunks().to_batches(read.batch_size):
        yield transformed({name: values(chunk.column(name)) for name in table.column_names}, read.transform)


def values(column: pa.Array) -> Any:
    """A column without nulls as numpy array, shape (rows,) or (rows, length), without a copy; else as a list."""
    if pa.types.is_fixed_size_list(column.type):
        return column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.to_pylist()
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [value.as_buffer() for value in column]
    return column.to_numpy()


def transformed(batch: Batch, transform: Callable[[Row], Row] | None) -> Batch:
    """The batch with `transform` applied to each row and the results stacked."""
    return stacked([transform(row) for row in rows_of(batch)]) if transform else batch


def rows_of(batch: Batch) -> Iterator[Row]:
    names = batch.keys()
    for row in zip(*batch.values(), strict=True):
        yield dict(zip(names, row, strict=True))


def stacked(rows: list[Row]) -> Batch:
    """One batch of many rows: numbers and arrays stacked, bytes and strings as lists. What a collate function does."""
    return {name: _stack([row[name] for row in rows]) for name in rows[0]}


def _stack(column: list[Any]) -> Any:
    first = column[0]
    if isinstance(first, np.ndarray):
        return np.stack(column)
    if isinstance(first, (int, float, np.generic)):
        return np.array(column)
    return column

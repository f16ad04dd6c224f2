"""Batches from Arrow tables. A batch is a dict of arrays, of lists of bytes, or of lists of strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

Batch = dict[str, Any]
Row = dict[str, Any]


class Read(Protocol):
    """The properties of a workload that determine its batches from the files."""

    @property
    def batch_size(self) -> int: ...
    @property
    def from_file(self) -> Callable[[Row], Row] | None: ...


def batches_of(table: pa.Table, read: Read) -> Iterator[Batch]:
    """Yield the rows of `table` in order in transformed batches. The last batch may be smaller."""
    for chunk in table.combine_chunks().to_batches(read.batch_size):
        yield transformed({name: values(chunk.column(name)) for name in table.column_names}, read.from_file)


def values(column: pa.Array) -> Any:
    """Return a column without nulls as a numpy array of shape (rows,) or (rows, length), or as a list.

    Numbers are not copied.
    """
    if pa.types.is_fixed_size_list(column.type):
        return column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.to_pylist()
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [value.as_buffer() for value in column]
    return column.to_numpy()


def transformed(batch: Batch, transform: Callable[[Row], Row] | None) -> Batch:
    """Apply `transform` to each row of a batch. Return the stacked results."""
    return stacked([transform(row) for row in rows_of(batch)]) if transform else batch


def rows_of(batch: Batch) -> Iterator[Row]:
    names = batch.keys()
    for row in zip(*batch.values(), strict=True):
        yield dict(zip(names, row, strict=True))


def stacked(rows: list[Row]) -> Batch:
    """Collate rows to a batch: numbers and arrays are stacked, bytes and strings become lists."""
    return {name: _stack([row[name] for row in rows]) for name in rows[0]}


def _stack(column: list[Any]) -> Any:
    first = column[0]
    if isinstance(first, np.ndarray):
        return np.stack(column)
    if isinstance(first, (int, float, np.generic)):
        return np.array(column)
    return column

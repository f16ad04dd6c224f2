"""Decoding of Arrow columns into numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataload.errors import DataError
from dataload.formats.schema import Field, is_bytes, is_text, number, storage

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dense:
    """A column with one value, or one array of fixed shape, per row.

    Attributes:
        values: The values, [rows, …] of the column's dtype.
    """

    values: Array


@dataclass(frozen=True)
class Ragged:
    """A column with a varying number of values per row. Row i is values[offsets[i]:offsets[i + 1]].

    Attributes:
        values: Numbers, or bytes as uint8, [total].
        offsets: Where each row starts, int64 [rows + 1].
    """

    values: Array
    offsets: Array


Column = Dense | Ragged


def concatenate(parts: Sequence[Column]) -> Column:
    """Return the rows of several columns as one column. All are `Dense` or all are `Ragged`; there is at least one."""
    values = np.concatenate([part.values for part in parts])
    lengths = [np.diff(part.offsets) for part in parts if isinstance(part, Ragged)]
    if not lengths:
        return Dense(values)
    return Ragged(values, np.concatenate(([0], np.cumsum(np.concatenate(lengths)))))


def decode(table: pa.Table, fields: Sequence[Field], fill_null: Any, where: str) -> dict[str, Column]:
    """Return columns of an Arrow table as arrays, by name.

    Args:
        table: The table.
        fields: The columns to decode. A member of a struct has a dotted name.
        fill_null: Replacement of nulls, for all columns or, as a mapping, by column. None makes nulls an error.
        where: File and row group, for errors.

    Raises:
        DataError: A column has nulls without a replacement, or the replacement has the wrong type. It names `where`
            and the column.
    """
    while any(pa.types.is_struct(storage(kind)) for kind in table.schema.types):
        table = _plain(table).flatten()
    columns = {}
    for field in fields:
        filling = fill_null.get(field.name) if isinstance(fill_null, Mapping) else fill_null
        columns[field.name] = _Decoder(field, filling, f"{where} column {field.name!r}").decode(table[field.name])
    return columns


class _Decoder:
    """A decoder of one column.

    Args:
        field: The column.
        filling: Replacement of nulls, or None.
        where: File, row group and column, for errors.
    """

    def __init__(self, field: Field, filling: Any, where: str) -> None:
        self._field = field
        self._filling = filling
        self._where = where

    def decode(self, chunks: pa.ChunkedArray) -> Column:
        column = _whole(_plain_column(chunks))
        if column.null_count and self._filling is None:
            raise DataError(f"{self._where} has {column.null_count} nulls: pass fill_null= to replace them")
        if not self._field.ragged:
            values = self._dense(column)
            if column.null_count:
                values = values.copy()
                values[~_valid(column)] = self._filling_of(column.type)
            return Dense(values)
        if column.null_count:
            column = self._filled(column)
        if is_bytes(column.type):
            return _bytes(column)
        values = _plain_column(column.flatten())
        self._check_no_nulls(values.null_count)
        lengths = _stored(pc.list_value_length(column))
        return Ragged(_numbers(values), np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))

    def _dense(self, column: pa.Array) -> Array:
        """Return the values, [rows, …]. The value of a null row is undefined."""
        if not pa.types.is_fixed_size_list(column.type):
            return _numbers(column)
        size, count = column.type.list_size, len(column)
        inner = _plain_column(column.values.slice(column.offset * size, count * size))
        if inner.null_count:
            self._check_no_nulls(int(np.count_nonzero(~_valid(inner).reshape(count, size)[_valid(column)])))
        values = self._dense(inner)
        return values.reshape(count, size, *values.shape[1:])

    def _filling_of(self, kind: pa.DataType) -> Any:
        """Return the replacement of a null dense value: a value, or one number for all of its elements."""
        kinds = [kind]
        while pa.types.is_fixed_size_list(kinds[-1]):
            kinds.append(storage(kinds[-1].value_type))
        if pa.types.is_decimal(kinds[-1]):
            kinds.append(pa.float64())
        for candidate in kinds:
            try:
                value = self._dense(_plain_column(pa.array([self._filling], candidate)))[0]
            except (pa.ArrowException, TypeError, ValueError):
                continue
            if pa.types.is_integer(candidate) and value != self._filling:  # Arrow truncates fractions.
                continue
            return value
        raise self._no_filling(kind)

    def _filled(self, column: pa.Array) -> pa.Array:
        try:
            return pc.fill_null(column, pa.scalar(self._filling, column.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise self._no_filling(column.type) from error

    def _no_filling(self, kind: pa.DataType) -> DataError:
        return DataError(f"{self._where}: fill_null={self._filling!r} is no {kind}")

    def _check_no_nulls(self, count: int) -> None:
        if count:
            raise DataError(f"{self._where} has nulls inside its lists, which cannot be filled: rewrite it")


def _plain(table: pa.Table) -> pa.Table:
    return pa.table([_plain_column(column) for column in table.columns], table.column_names)


def _plain_column(column: Any) -> Any:
    """Return the column with extension types replaced by their storage, and dictionary codes by their values."""
    while column.type != (kind := storage(column.type)):
        if isinstance(column.type, pa.BaseExtensionType):
            column = _storage_of(column)
        else:
            column = column.cast(column.type.value_type)
    # Use 64-bit offsets: a column may have more than 2 GiB.
    return column.cast(pa.large_string() if is_text(kind) else pa.large_binary()) if is_bytes(kind) else column


def _storage_of(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column.storage


def _whole(chunks: pa.ChunkedArray) -> pa.Array:
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def _valid(column: pa.Array) -> Array:
    return _stored(column.is_valid())


def _numbers(column: pa.Array) -> Array:
    """Return the numbers as numpy's dtype. The number of a null is undefined."""
    kind = column.type
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return _stored(column).astype(number(kind), copy=False)


def _stored(column: pa.Array) -> Array:
    """Return a view of a number column's memory. Arrow's `to_numpy` would import pandas first, which is slow."""
    dtype, first, count = number(column.type), column.offset, len(column)
    assert dtype is not None
    if not count:
        return np.empty(0, dtype)
    data = column.buffers()[1]
    if dtype == np.bool_:
        bits = np.frombuffer(data, np.uint8)[first // 8 : -(-(first + count) // 8)]
        return np.unpackbits(bits, count=first % 8 + count, bitorder="little")[first % 8 :].view(np.bool_)
    values: Array = np.frombuffer(data, dtype, first + count)
    return values[first:]


def _bytes(column: pa.Array) -> Ragged:
    _, offsets, data = column.buffers()
    bounds = np.zeros(1, np.int64)
    if len(column):
        bounds = np.frombuffer(offsets, np.int64, column.offset + len(column) + 1)[column.offset :]
    return Ragged(np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), bounds)

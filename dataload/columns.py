"""Decoded columns of a row group, and gathering rows of several row groups from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataload.errors import DataError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dense:
    """One value, or k values, a row. values: [rows] or [rows, k], of the column's dtype."""

    values: Array

    @classmethod
    def gather(cls, parts: Sequence[Dense], which: Array, rows: Array) -> Dense:
        """Row `rows[i]` of `parts[which[i]]` for each i, copied: [len(rows)] or [len(rows), k]."""
        first = parts[0].values
        values = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for number, part in enumerate(parts):
            positions = np.flatnonzero(which == number)
            values[positions] = part.values.take(rows[positions], axis=0)
        return cls(values)


@dataclass(frozen=True)
class Ragged:
    """As many values a row as it happens to have; row i is values[offsets[i]:offsets[i + 1]].

    values: [total], numbers, or bytes as uint8; offsets: int64 [rows + 1]; kind: "list", "binary" or "string".
    """

    values: Array
    offsets: Array
    kind: str

    @classmethod
    def gather(cls, parts: Sequence[Ragged], which: Array, rows: Array) -> Ragged:
        """Row `rows[i]` of `parts[which[i]]` for each i, copied side by side."""
        starts, stops = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for number, part in enumerate(parts):
            positions = np.flatnonzero(which == number)
            starts[positions] = part.offsets[rows[positions]]
            stops[positions] = part.offsets[rows[positions] + 1]
        offsets = np.concatenate(([0], np.cumsum(stops - starts)))
        values = np.empty(offsets[-1], parts[0].values.dtype)
        for row in range(len(rows)):
            values[offsets[row] : offsets[row + 1]] = parts[which[row]].values[starts[row] : stops[row]]
        return cls(values, offsets, parts[0].kind)


Column = Dense | Ragged


def gather(parts: Sequence[Mapping[str, Column]], which: Array, rows: Array) -> dict[str, Column]:
    """Row `rows[i]` of `parts[which[i]]` for each i, in every column."""
    return {name: _gather([part[name] for part in parts], which, rows) for name in parts[0]}


def _gather(parts: Sequence[Any], which: Array, rows: Array) -> Column:
    kind: type[Column] = type(parts[0])
    return kind.gather(parts, which, rows)


def check_types(schema: pa.Schema) -> None:
    """Raises DataError naming the first column of a type that batches cannot hold."""
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if not (_is_number(kind) or _is_bytes(kind) or _is_numbers(kind)):
            raise DataError(
                f"column {field.name!r} has type {field.type}, which batches cannot hold: leave it out with columns="
            )


def decode(table: pa.Table, fill_null: Any, where: str) -> dict[str, Column]:
    """The columns of an Arrow table as arrays.

    fill_null: what stands for nulls, in all columns or, as a mapping, by column; None: nulls are an error.
    Raises DataError naming `where` and the column when there are nulls and nothing to stand for them.
    """
    return {name: _decode(name, table.column(name), fill_null, where) for name in table.column_names}


def _decode(name: str, chunks: pa.ChunkedArray, fill_null: Any, where: str) -> Column:
    if pa.types.is_dictionary(chunks.type):
        chunks = chunks.cast(chunks.type.value_type)
    if _is_bytes(chunks.type):
        chunks = chunks.cast(pa.large_string() if _is_text(chunks.type) else pa.large_binary())  # over 2 GiB in all
    column = chunks.combine_chunks()
    if column.null_count:
        filling = fill_null.get(name) if isinstance(fill_null, Mapping) else fill_null
        if filling is None:
            raise DataError(f"{where} column {name!r} has {column.null_count} nulls: pass fill_null= to replace them")
        column = _fill(name, column, filling, where)
    if _is_number(column.type):
        return Dense(column.to_numpy(zero_copy_only=False))
    if pa.types.is_fixed_size_list(column.type):
        return Dense(_numbers(name, column.flatten(), where).reshape(len(column), column.type.list_size))
    if _is_bytes(column.type):
        return _bytes(column)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return Ragged(_numbers(name, column.flatten(), where), offsets - offsets[0], "list")


def _fill(name: str, column: pa.Array, filling: Any, where: str) -> pa.Array:
    try:
        return pc.fill_null(column, pa.scalar(filling, column.type))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{where} column {name!r}: fill_null={filling!r} is no {column.type}") from error


def _numbers(name: str, values: pa.Array, where: str) -> Array:
    if values.null_count:
        raise DataError(f"{where} column {name!r} has nulls inside its lists, which cannot be filled: rewrite it")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _bytes(column: pa.Array) -> Ragged:
    _, offsets, data = column.buffers()
    bounds = np.zeros(1, np.int64)
    if len(column):
        bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    values = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    return Ragged(values, bounds, "string" if _is_text(column.type) else "binary")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
    )


def _is_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    lists = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    return bool(lists and _is_number(kind.value_type))

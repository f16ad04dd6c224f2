"""Decoded columns as numpy arrays, and as Arrow arrays where they are nested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.formats.schema import NULL, SPAN

Array = npt.NDArray[Any]
LONG_STRINGS = 1024  # bytes of a string on average, from which on Arrow's copies take longer than a loop
ARROW = int(pa.__version__.split(".", maxsplit=1)[0])
FAST_ARROW = 26  # from which release on `to_pylist` takes 0.1 µs for a string instead of 0.7 µs or more


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
        values: Numbers, or bytes as uint8, [total]; for lists of arrays, [total, …].
        offsets: Where each row starts, int64 [rows + 1].
        valid: Which rows are not null, bool [rows]; None: all. A null has no values.
    """

    values: Array
    offsets: Array
    valid: Array | None = None


@dataclass(frozen=True)
class Coded:
    """A column of strings or bytes whose rows share values. There are fewer distinct values than rows.

    Attributes:
        values: The bytes of the distinct values, uint8 [total].
        spans: `SPAN` of each distinct value in them, uint32 [distinct, 2].
        codes: The distinct value of each row, int64 [rows].
    """

    values: Array
    spans: Array
    codes: Array


@dataclass(frozen=True)
class Nested:
    """A column of nested values.

    Attributes:
        values: An Arrow array that can be gathered, see `plain`.
    """

    values: pa.Array


Column = Dense | Ragged | Coded | Nested


def concatenate(parts: Sequence[Column]) -> Column:
    """Return the rows of several columns of one kind as one column. There is at least one."""
    if len(parts) == 1:
        return parts[0]
    nested = [part.values for part in parts if isinstance(part, Nested)]
    if nested:
        return Nested(pa.concat_arrays(nested))
    if any(isinstance(part, Coded) for part in parts):
        return _concatenate_coded(parts)
    values = np.concatenate([used_values(part) if isinstance(part, Ragged) else part.values for part in parts])
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return Dense(values)
    lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
    masks = [np.ones(len(part.offsets) - 1, np.bool_) if part.valid is None else part.valid for part in ragged]
    has_nulls = any(part.valid is not None for part in ragged)
    return Ragged(values, np.concatenate(([0], np.cumsum(lengths))), np.concatenate(masks) if has_nulls else None)


def length_of(column: Column) -> int:
    """Return the number of rows of a column."""
    if isinstance(column, Ragged):
        return len(column.offsets) - 1
    return len(column.codes if isinstance(column, Coded) else column.values)


def rows_of(column: Column, start: int, stop: int) -> Column:
    """Return the rows [start, stop) of a column, as views."""
    if isinstance(column, Dense):
        return Dense(column.values[start:stop])
    if isinstance(column, Coded):
        return Coded(column.values, column.spans, column.codes[start:stop])
    if isinstance(column, Nested):
        return Nested(column.values[start:stop])
    valid = None if column.valid is None else column.valid[start:stop]
    return Ragged(column.values, column.offsets[start : stop + 1], valid)


def _concatenate_coded(parts: Sequence[Column]) -> Coded:
    """Join columns of strings or bytes of which one is coded. A dictionary that neighbours share is kept once."""
    dictionaries: list[tuple[Array, Array]] = []  # values, spans
    codes, first = [], 0
    for part in parts:
        assert isinstance(part, Ragged | Coded)
        own = used_values(part), spans_of(part)
        if not dictionaries or not all(map(np.array_equal, own, dictionaries[-1])):
            first += len(dictionaries[-1][1]) if dictionaries else 0
            dictionaries.append(own)
        codes.append(codes_of(part) + first)
    values, spans = zip(*dictionaries, strict=True)
    starts = np.cumsum([0, *map(len, values[:-1])])
    moved = [part + np.array([start, 0], np.uint32) for part, start in zip(spans, starts, strict=True)]
    return Coded(np.concatenate(values), np.concatenate(moved), np.concatenate(codes))


def spans_of(column: Column) -> Array:
    """Return the `SPAN` of each distinct value, or of each row of a `Ragged`, uint32 [distinct, 2].

    The values begin with those of row 0.
    """
    if isinstance(column, Coded):
        return column.spans
    assert isinstance(column, Ragged)
    spans = np.stack([column.offsets[:-1] - column.offsets[0], np.diff(column.offsets)], axis=1).astype(np.uint32)
    if column.valid is not None:
        spans[~column.valid, 1] = NULL
    return spans


def used_values(column: Ragged | Coded) -> Array:
    """Return the values of a column from that of row 0 on, without those of other columns around them."""
    return column.values if isinstance(column, Coded) else column.values[column.offsets[0] : column.offsets[-1]]


def whole_bytes(column: Ragged | Coded) -> int:
    """Return the bytes of a column's values and their spans if each row had its own."""
    codes, (lengths, _) = codes_of(column), lengths_of(spans_of(column))
    return int(lengths[codes].sum()) + len(codes) * SPAN.itemsize


def codes_of(column: Column) -> Array:
    """Return the number of each row's value in `spans_of`, int64 [rows]."""
    if isinstance(column, Coded):
        return column.codes
    assert isinstance(column, Ragged)
    return np.arange(len(column.offsets) - 1)


def strings_of(heaps: Iterable[memoryview], spans: Array) -> list[str | None]:
    """Return the strings of these spans of these heaps; None for a null."""
    strings: list[str | None] = [str(heap[start:stop], "utf-8") for heap, start, stop in bounds_of(heaps, spans, 1)]
    return with_nulls(strings, spans)


def string_array(heap: memoryview, spans: Array) -> pa.LargeStringArray | None:
    """Return all strings of a heap as an Arrow array over it.

    Returns:
        None if Arrow would take longer than a loop over the strings.
    """
    if len(heap) > LONG_STRINGS * len(spans) or ARROW < FAST_ARROW:
        return None
    lengths, valid = lengths_of(spans)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.LargeStringArray.from_buffers(len(spans), pa.py_buffer(offsets), pa.py_buffer(heap), bitmap)


def bounds_of(heaps: Iterable[memoryview], spans: Array, itemsize: int) -> Iterable[tuple[memoryview, int, int]]:
    """Return (heap, first byte, end) of each span."""
    lengths, _ = lengths_of(spans)
    starts = spans[:, 0].astype(np.int64) * itemsize
    return zip(heaps, starts.tolist(), (starts + lengths * itemsize).tolist(), strict=True)


def with_nulls(values: list[Any], spans: Array) -> list[Any]:
    """Return the values with None in place of those whose span is null."""
    for row in np.flatnonzero(spans[:, 1] == NULL).tolist():
        values[row] = None
    return values


def lengths_of(spans: Array) -> tuple[Array, Array | None]:
    """Return the number of elements of each span, int64 [n], and which are not null; None: all."""
    lengths = spans[:, 1].astype(np.int64)
    nulls = lengths == NULL
    if not nulls.any():
        return lengths, None
    lengths[nulls] = 0
    return lengths, ~nulls

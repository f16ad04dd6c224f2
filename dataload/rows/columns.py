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
LONG_STRINGS = 4096  # bytes of a string on average, from which on Arrow's copy takes longer than a loop
VIEWED = 12  # bytes of a string that its view in Arrow holds itself
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


def arrow_strings(heaps: Sequence[memoryview], parts: Iterable[Array], spans: Array) -> pa.LargeStringArray | None:
    """Return the strings of some rows as an Arrow array, which copies each once and makes Python strings fast.

    Args:
        heaps: The heaps that hold the strings.
        parts: The rows whose strings each heap holds.
        spans: `SPAN` of each row's string in its heap.

    Returns:
        None if a loop over the strings is faster, or a heap is too large.

    Raises:
        pa.ArrowInvalid: A string is not UTF-8.

    Notes:
        Arrow calls the 16 bytes of a string a view: its length, then up to 12 bytes of its own, or else the first four,
        the number of the heap and the place in it. Comparisons want these four and zeros after short strings; a copy
        needs neither.
    """
    if ARROW < FAST_ARROW or any(len(heap) >= 1 << 31 for heap in heaps):
        return None
    lengths, valid = lengths_of(spans)
    if lengths.sum() > LONG_STRINGS * len(spans):
        return None
    views = np.empty((len(spans), 4), np.int32)
    views[:, 0], views[:, 1], views[:, 3] = lengths, 0, spans[:, 0]
    is_short = lengths <= VIEWED
    for number, (heap, part) in enumerate(zip(heaps, parts, strict=True)):
        views[part, 2] = number
        short = part[is_short[part]]
        if len(short):
            views[short, 1:] = _first_bytes(heap, views[short, 3])
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [bitmap, pa.py_buffer(views), *map(pa.py_buffer, heaps)]
    strings = pa.Array.from_buffers(pa.string_view(), len(spans), buffers).cast(pa.large_string())
    strings.validate(full=True)
    return strings


def _first_bytes(heap: memoryview, starts: Array) -> Array:
    """Return the `VIEWED` bytes from each of these places on, int32 [n, VIEWED // 4]. Zeros follow the heap."""
    found, size = np.empty(len(starts), f"V{VIEWED}"), len(heap) - VIEWED + 1
    places = np.ndarray(max(0, size), found.dtype, heap, strides=(1,))
    inside = starts < size
    found[inside] = places[starts[inside]]
    for row in np.flatnonzero(~inside).tolist():
        found[row] = bytes(heap[starts[row] :][:VIEWED]).ljust(VIEWED, b"\0")
    return found.view(np.int32).reshape(-1, VIEWED // 4)


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

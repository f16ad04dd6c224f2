"""Checksums of rows: equal for equal rows, whatever the files, row groups and chunks they are in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from dataload.formats.arrow_types import has_part

Hashes = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NULL = np.uint64(0x2545F4914F6CDD1D)
CACHED_ROWS = 1 << 13  # whose hashes stay in the processor's cache


def row_sum(table: pa.Table, first_row: int | None = None) -> int:
    """Return the checksum of the rows of a table. Those of the parts of a dataset add up, modulo 2**64, to its own.

    Args:
        table: The rows.
        first_row: The number of the first row, if the order counts; None: it does not.
    """
    total = done = 0
    has_dictionary = any(has_part(field.type, pa.types.is_dictionary) for field in table.schema)
    for rows in table.to_batches(max_chunksize=None if has_dictionary else CACHED_ROWS):  # each hashes its dictionaries
        hashes = np.zeros(rows.num_rows, np.uint64)
        for column in rows.columns:
            hashes = mixed(hashes * GOLDEN + _hashes(column))
        if first_row is not None:
            numbers = np.arange(len(hashes), dtype=np.uint64) + np.uint64(first_row + done)
            hashes = mixed(hashes + numbers * GOLDEN)
        total += int(hashes.sum(dtype=np.uint64))
        done += len(hashes)
    return total % (1 << 64)


def mixed(values: Hashes) -> Hashes:
    """Return the values with their bits mixed: the finalizer of splitmix64."""
    values = values + GOLDEN
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _hashes(array: pa.Array) -> Hashes:
    """Return the hash of each value."""
    if isinstance(array, pa.ExtensionArray):
        return _hashes(array.storage)
    if pa.types.is_null(array.type):
        return np.full(len(array), NULL)
    if pa.types.is_dictionary(array.type):
        hashes = _of_codes(array)
    elif pa.types.is_nested(array.type):
        hashes = _of_nested(array)
    else:
        hashes = _of_plain(array)
    if array.null_count:
        hashes = np.where(array.is_valid().to_numpy(zero_copy_only=False), hashes, NULL)
    return hashes


def _of_codes(array: pa.Array) -> Hashes:
    values = np.append(_hashes(array.dictionary), NULL)  # The last one is for nulls.
    found: Hashes = values[array.indices.cast(pa.int64()).fill_null(len(values) - 1).to_numpy()]
    return found


def _of_nested(array: pa.Array) -> Hashes:
    kind = array.type
    if pa.types.is_struct(kind):
        hashes = np.zeros(len(array), np.uint64)
        for number in range(kind.num_fields):
            hashes = mixed(hashes * GOLDEN + _hashes(array.field(number)))
        return hashes
    if pa.types.is_fixed_size_list(kind):
        return _of_lists(array.values, _steps(array, kind.list_size))
    return _of_lists(array.values, _offsets(array, large=pa.types.is_large_list(kind)))


def _of_plain(array: pa.Array) -> Hashes:
    kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _of_plain(array.cast(pa.large_binary()))
    if pa.types.is_boolean(kind):
        return _of_numbers(array.cast(pa.uint8()))
    if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
        return _of_bytes(array.buffers()[2], _offsets(array, large=True))
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return _of_bytes(array.buffers()[2], _offsets(array, large=False))
    return _of_numbers(array)


def _of_numbers(array: pa.Array) -> Hashes:
    size = array.type.bit_width // 8
    if size not in (1, 2, 4, 8):
        return _of_bytes(array.buffers()[1], _steps(array, size))
    bits = np.frombuffer(array.buffers()[1] or b"", f"u{size}")
    return mixed(bits[array.offset : array.offset + len(array)].astype(np.uint64))


def _steps(array: pa.Array, size: int) -> npt.NDArray[np.int64]:
    steps: npt.NDArray[np.int64] = (np.arange(len(array) + 1, dtype=np.int64) + array.offset) * size
    return steps


def _offsets(array: pa.Array, *, large: bool) -> npt.NDArray[np.int64]:
    if not len(array):  # Its buffer may be missing.
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(array.buffers()[1], np.int64 if large else np.int32)
    return offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _of_bytes(data: pa.Buffer | None, offsets: npt.NDArray[np.int64]) -> Hashes:
    view: Any = memoryview(data or b"")
    bounds = offsets.tolist()
    found = (xxh3_64_intdigest(view[start:stop]) for start, stop in pairwise(bounds))
    return np.fromiter(found, np.uint64, len(bounds) - 1)


def _of_lists(values: pa.Array, offsets: npt.NDArray[np.int64]) -> Hashes:
    first, last = int(offsets[0]), int(offsets[-1])
    lengths = np.maximum(np.diff(offsets), 0)
    starts = offsets[:-1] - first
    elements = _hashes(values[first:last])
    within = np.arange(len(elements), dtype=np.int64) - np.repeat(starts, lengths)
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed(elements + within.astype(np.uint64) * GOLDEN))])
    return mixed(totals[offsets[1:] - first] - totals[starts] + lengths.astype(np.uint64))

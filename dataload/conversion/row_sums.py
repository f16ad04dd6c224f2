"""Checksums of rows: equal for equal rows, whatever the files, row groups and chunks they are in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from dataload.formats.arrow_arrays import Array, bounds, elements
from dataload.formats.arrow_types import has_part, is_bytes

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
    return _of_lists(*elements(array))


def _of_plain(array: pa.Array) -> Hashes:
    kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _of_plain(array.cast(pa.large_binary()))
    if pa.types.is_boolean(kind):
        return _of_numbers(array.cast(pa.uint8()))
    if is_bytes(kind) and not pa.types.is_fixed_size_binary(kind):
        starts, data = bounds(array)
        return _of_bytes(data, starts)
    return _of_numbers(array)


def _of_numbers(array: pa.Array) -> Hashes:
    size = array.type.bit_width // 8
    if size not in (1, 2, 4, 8):
        return _of_bytes(array.buffers()[1] or b"", (np.arange(len(array) + 1) + array.offset) * size)
    bits = np.frombuffer(array.buffers()[1] or b"", f"u{size}", array.offset + len(array))
    return mixed(bits[array.offset :].astype(np.uint64))


def _of_bytes(data: Any, starts: Array) -> Hashes:
    """Return the hash of each value. starts: where each begins in the data, and the last one ends."""
    view = memoryview(data)
    found = (xxh3_64_intdigest(view[start:stop]) for start, stop in pairwise(starts.tolist()))
    return np.fromiter(found, np.uint64, len(starts) - 1)


def _of_lists(lengths: Array, values: pa.Array) -> Hashes:
    """Return the hash of each list, given their lengths and all their values."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    within = np.arange(len(values)) - np.repeat(starts, lengths)
    totals = np.cumsum(mixed(_hashes(values) + within.astype(np.uint64) * GOLDEN))
    totals = np.concatenate([np.zeros(1, np.uint64), totals])
    return mixed(totals[ends] - totals[starts] + lengths.astype(np.uint64))

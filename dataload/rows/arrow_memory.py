"""Views of the memory of Arrow arrays. Arrow's own `to_numpy` would import pandas first, which is slow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.formats.schema import number

Array = npt.NDArray[Any]


def numbers(column: pa.Array) -> Array:
    """Return the numbers as the dtype of batches. The number of a null is undefined."""
    kind = column.type
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return stored(column).astype(number(kind), copy=False)


def stored(column: pa.Array) -> Array:
    """Return a view of the memory of a column of numbers."""
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


def valid(column: pa.Array) -> Array:
    """Return which values are not null."""
    return stored(column.is_valid())


def bounds(column: pa.Array) -> tuple[Array, Array]:
    """Return where each string or binary value starts, [n + 1], and the bytes of all values."""
    _, offsets, data = column.buffers()
    dtype = np.int64 if column.type in (pa.large_string(), pa.large_binary()) else np.int32
    starts = np.zeros(1, dtype)
    if len(column):
        starts = np.frombuffer(offsets, dtype, column.offset + len(column) + 1)[column.offset :]
    return starts, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)

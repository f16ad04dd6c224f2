"""Values of users in Arrow types that hold them unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.formats.arrow_arrays import numbers, unwrapped
from dataload.formats.arrow_types import is_list, number


def array_of(value: Any, kind: pa.DataType) -> pa.Array:
    """Return a value as an array of one row. Floats are rounded to those of the type.

    Raises:
        Exception: One of `NO_VALUE`. The type cannot hold the value, or a part of the value is null. Without this
            check, Arrow truncates fractions and times, and replaces large numbers by infinity.
    """
    array = pa.array([_without_numpy_floats(value)], kind)
    elements = unwrapped(array)
    while is_list(elements.type) or pa.types.is_fixed_size_list(elements.type):
        elements = unwrapped(elements.flatten())
    if elements.null_count:
        raise ValueError("a part of the value is null")
    if number(elements.type) is not None and not pa.types.is_decimal(elements.type):
        for part, held in zip(_parts(value), numbers(elements).tolist(), strict=True):
            _check(part, held, elements.type)
    return array


def _check(part: Any, held: Any, kind: pa.DataType) -> None:
    if not isinstance(part, (int, float, Decimal, np.number)) or isinstance(part, (np.datetime64, np.timedelta64)):
        pa.scalar(part).cast(kind)  # raises if data would be lost
    elif math.isfinite(part) != math.isfinite(held) if pa.types.is_floating(kind) else part != held:
        raise ValueError(f"{part!r} becomes {held!r}")


def _parts(value: Any) -> Iterator[Any]:
    """Yield the elements of lists and arrays, at any depth, or the value itself."""
    if isinstance(value, pa.ListScalar):
        value = value.values
    if isinstance(value, (Sequence, np.ndarray, pa.Array, pa.ChunkedArray)) and not isinstance(value, str):
        for each in value:
            yield from _parts(each)
    else:
        yield value


def _without_numpy_floats(value: Any) -> Any:
    """Return the value with floats of Python: Arrow converts no others to float16."""
    if isinstance(value, (np.ndarray, np.floating)) and value.dtype.kind == "f":
        return value.tolist()
    return [_without_numpy_floats(each) for each in value] if isinstance(value, (list, tuple)) else value

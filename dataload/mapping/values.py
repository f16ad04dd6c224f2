"""Columns that a function returned, as arrays of numbers, lists of arrays, or Arrow arrays."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from dataload.errors import DataError
from dataload.formats.arrow_types import (
    NO_VALUE,
    children,
    has_part,
    is_bytes,
    is_list,
    is_text,
    portable,
    with_members,
)
from dataload.formats.text import TextErrors
from dataload.rows.collate import Flat, unflattened
from dataload.rows.columns import Array

WAYS = (
    "return an array or a tensor [B, …], a list with a value for each row, or pa.array(values, type); or leave the "
    "column out, and name the others with columns=, so that it stays as it is"
)
_EXACT = {torch.bfloat16: torch.float32, torch.float8_e4m3fn: torch.float16, torch.float8_e5m2: torch.float16}
_EXACT |= {
    getattr(torch, name): wider
    for name, wider in (
        ("float8_e4m3fnuz", torch.float16),
        ("float8_e5m2fnuz", torch.float16),
        ("float8_e8m0fnu", torch.float32),  # powers of two from 2^-127 to 2^127
    )
    if hasattr(torch, name)
}
"""The smallest dtype of NumPy that holds each value of a dtype that NumPy lacks."""
_TIMES = {"datetime64": {"Y": "D", "M": "D", "W": "D", "h": "s", "m": "s"}, "timedelta64": dict.fromkeys("WDhm", "s")}
"""For units that Arrow lacks, one that it has and that holds each value."""
_ANY_DECIMAL = pa.decimal256(76, 38)
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Tensors:
    """A list of arrays of one dtype and of two or more dimensions.

    Args:
        values: The arrays; None for a null.
        shape: The length of each dimension, or -1 if it varies. With a null, the first one does: a list of tensors
            may have None, and one tensor of all rows may not.
    """

    values: Sequence[Array | None]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, values: Sequence[Array | None], varying: Sequence[int] = ()) -> Tensors:
        """Return a column. varying: the shape as far as it is known, where -1 is a dimension that varies in any case.

        Raises:
            DataError: They differ in their dimensions.
        """
        shapes = [value.shape for value in values if value is not None]
        if len({len(shape) for shape in shapes}) > 1:
            raise DataError(f"column {name!r} has arrays of {_dimensions(shapes)} dimensions: return the same number")
        shape = reduce(common_shape, shapes, tuple(varying) or shapes[0])
        return cls(values, shape if len(shapes) == len(values) else (-1, *shape[1:]))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of all arrays."""
        return next(value.dtype for value in self.values if value is not None)


Returned: TypeAlias = "Array | Tensors | pa.Array"
"""A column that a function returned: numbers [B, …], a list of arrays, or anything else."""


class Values:
    """Makes a column of what a function returned.

    Args:
        name: Name of the column.
        like: The column of the source of that name. It tells the types of values of Python that do not tell them
            themselves, such as maps and nanoseconds.
        errors: What to do about text that is not UTF-8, as for `make_dataset`.
    """

    def __init__(self, name: str, like: pa.Field | None = None, errors: TextErrors = "raise") -> None:
        self._name = name
        kind = None if like is None else portable(like.type)
        is_told = kind is None or not pa.types.is_nested(kind) or not has_part(kind, _is_not_told)
        self._like = None if is_told else _with_leaves(kind, _of_python)
        self._errors = errors

    def column(self, value: Any) -> Returned:
        """Return a column.

        Raises:
            DataError: No column can hold the values.
        """
        if isinstance(value, torch.Tensor):
            value = _rows_of_nested(value) if value.is_nested else self._numpy(value)
        elif _is_arrow(value):
            value = self._exported(value)
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            whole = _whole(value)
            return pa.concat_arrays([whole, whole[:0]])  # a copy: the function may use its memory again
        if isinstance(value, np.ma.MaskedArray):
            raise self._error("is a masked array: fill it, such as by .filled(np.nan)")
        if isinstance(value, Flat):
            shape = (-1, *value.values.shape[1:]) if isinstance(value.values, torch.Tensor) else ()
            return self._of_list(unflattened(value), shape)
        if hasattr(value, "__array__") and not isinstance(value, np.generic):
            value = np.asarray(value)
        if isinstance(value, _Nested):
            return self._of_list(value.rows, value.shape)
        if isinstance(value, np.ndarray) and value.ndim:
            return self._of_array(value)
        if isinstance(value, (list, tuple)):
            return self._of_list(value)
        raise self._error(f"is {_type(value)}: {WAYS}")

    def _error(self, text: str) -> DataError:
        return DataError(f"column {self._name!r} {text}")

    def _exported(self, value: Any) -> pa.Array | pa.ChunkedArray:
        try:
            return pa.chunked_array(value) if hasattr(value, "__arrow_c_stream__") else pa.array(value)
        except NO_VALUE as error:
            raise self._error(f"has the type {value.dtype}, which Arrow lacks: {WAYS}") from error

    def _of_array(self, array: Array) -> Returned:
        if array.dtype.kind in "OUT":
            return self._of_list(array.tolist())
        if array.dtype.kind in "mM":
            flat = pa.array(self._times(array.reshape(-1)))
            return of_fixed_lists(flat, array.shape[1:], len(array))
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise self._error(f"is an array of {array.dtype}: {WAYS}")
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    def _of_list(self, values: Sequence[Any], varying: Sequence[int] = ()) -> Returned:
        values = [self._numpy(value) if isinstance(value, torch.Tensor) else value for value in values]
        values = [[] if _is_empty(value) else value for value in values]
        known = [value for value in values if value is not None and not (isinstance(value, list) and not value)]
        for kind in (np.datetime64, np.timedelta64):
            if known and all(isinstance(value, kind) for value in values if value is not None):
                return self._of_array(np.array([kind("NaT") if value is None else value for value in values]))
        if not known or not all(isinstance(value, np.ndarray) for value in known):
            return self._of_values(values)
        if any(isinstance(value, np.ma.MaskedArray) for value in known):
            raise self._error("has masked arrays: fill them, such as by .filled(np.nan)")
        if len(found := {value.dtype for value in known}) > 1:
            raise self._error(f"has arrays of {' and '.join(sorted(map(str, found)))}: return one dtype")
        [dtype] = found
        most = max(value.ndim for value in known)
        if not most:
            return self._of_list([value[()] if isinstance(value, np.ndarray) else value for value in values])
        if most == 1 or dtype.kind in "mMOUT":
            return self._of_values(self._plain(values) if dtype.kind in "mM" else values)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise self._error(f"has arrays of {dtype}: {WAYS}")
        empty = np.empty((0, *known[0].shape[1:]), dtype)
        arrays = [empty if isinstance(value, list) else value for value in values]
        native = dtype.newbyteorder("=")
        arrays = [None if value is None else value.astype(native, copy=False) for value in arrays]
        return Tensors.of(self._name, arrays, varying)

    def _of_values(self, values: Sequence[Any]) -> pa.Array:
        """Return values of Python as an Arrow array.

        Raises:
            DataError: They have no type in common.
        """
        try:
            try:
                return self._typed(values)
            except NO_VALUE:
                return self._typed(self._plain(values))  # which takes as long as Arrow does
        except MemoryError:  # Arrow's is also an ArrowException.
            raise
        except OverflowError as error:
            text = "has an integer that int64 cannot hold: return an array, such as np.array(…, np.uint64)"
            raise self._error(text) from error
        except UnicodeEncodeError as error:
            text = f"has text that is not Unicode ({error}): pass errors='replace' to make_dataset to replace it"
            raise self._error(text) from error
        except NO_VALUE as error:
            reason = str(error).partition("\n")[0]
            raise self._error(f"has values that no type holds together ({reason}): {WAYS}") from error

    def _typed(self, values: Sequence[Any]) -> pa.Array:
        """Return values with the types that they tell, or with those of the source that they do not tell."""
        if self._like is not None:
            with suppress(*NO_VALUE):
                array = _whole(pa.array(values, self._like))
                if _equal(array.to_pylist(), values):
                    return array
        array = _whole(pa.array(values))
        kind, is_decimal = array.type, pa.types.is_decimal
        leaves = [*_leaves(values, kind)]
        for value, leaf in leaves:
            if (beside := _lossy(value, leaf)) is not None:
                raise TypeError(f"{value!r} beside {beside}")
        if is_decimal(kind):  # Batches have floats.
            return pa.array([None if value is None else float(value) for value in values])
        if is_list(kind) and is_decimal(kind.value_type):
            floats = [None if row is None else [None if v is None else float(v) for v in row] for row in values]
            return pa.array(floats, pa.list_(pa.float64()))
        if has_part(kind, is_decimal):
            kind = _with_leaves(kind, lambda leaf: _ANY_DECIMAL if is_decimal(leaf) else leaf)
        if any(hasattr(value, "nanosecond") or hasattr(value, "nanoseconds") for value, _ in leaves):  # of pandas
            with suppress(*NO_VALUE):  # of years that nanoseconds do not reach
                return _whole(pa.array(values, _with_leaves(kind, _in_ns)))
        return array if kind == array.type else _whole(pa.array(values, kind))

    def _plain(self, value: Any) -> Any:  # noqa: PLR0911 (a kind each)
        """Return a value with what Arrow takes in place of tensors, arrays and times of NumPy, at any depth."""
        if isinstance(value, torch.Tensor):
            value = self._numpy(value)
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "mM":
            times = self._times(value)
            return times.tolist() if times.dtype == "datetime64[D]" else times
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind not in "OUT":
            return value.astype(value.dtype.newbyteorder("="), copy=False)
        if isinstance(value, np.ndarray):
            return self._plain(list(value) if value.ndim else value[()])
        if isinstance(value, (np.datetime64, np.timedelta64)):
            return self._plain(np.array([value]))[0]
        if isinstance(value, str) and self._errors == "replace":
            return _SURROGATES.sub("\ufffd", value)
        if isinstance(value, dt.datetime) and value != value:  # noqa: PLR0124 (NaT of pandas)
            return None
        if isinstance(value, Mapping):
            return {key: self._plain(each) for key, each in value.items()}
        return [self._plain(each) for each in value] if isinstance(value, (list, tuple)) else value

    def _numpy(self, tensor: torch.Tensor) -> Array:
        try:
            array: Array = tensor.detach().to("cpu", _EXACT.get(tensor.dtype, tensor.dtype)).numpy()
        except (TypeError, RuntimeError) as error:  # quantized and sparse tensors
            raise self._error(f"has a tensor that numpy cannot hold ({error}): convert it") from error
        return array

    def _times(self, array: Array) -> Array:
        """Return a copy of times, in a unit that Arrow has."""
        unit, count = np.datetime_data(array.dtype)
        family = "datetime64" if array.dtype.kind == "M" else "timedelta64"
        known = ("s", "ms", "us", "ns", *(["D"] if family == "datetime64" else []))
        unit = _TIMES[family].get(unit, unit)
        if unit not in known:
            raise self._error(f"has times in {array.dtype}, which Arrow lacks: return them in s, ms, us or ns")
        return np.array(array, np.dtype(f"{family}[{unit}]") if count == 1 else f"{family}[{unit}]")


def _is_arrow(value: Any) -> bool:
    """Return whether values, such as a Series of polars or pandas, have a type that NumPy lacks."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype) or str(dtype) == "Object":  # polars exports the address of objects
        return False
    return hasattr(value, "__arrow_c_stream__") or hasattr(getattr(value, "array", value), "__arrow_array__")


@dataclass(frozen=True)
class _Nested:
    """The rows of a nested tensor of torch, and their shape, where -1 is a dimension that varies."""

    rows: Sequence[torch.Tensor]
    shape: tuple[int, ...]


def _rows_of_nested(tensor: torch.Tensor) -> _Nested:
    rows = tensor.detach().unbind()
    if tensor.layout is torch.jagged:
        return _Nested(rows, tuple(size if isinstance(size, int) else -1 for size in tensor.shape[1:]))
    return _Nested(rows, (-1,) * (tensor.dim() - 1))


def _is_empty(value: Any) -> bool:
    """Return whether a value is `np.array([])`, which is a list of whatever type."""
    return isinstance(value, np.ndarray) and value.shape == (0,) and value.dtype.kind == "f"


def _whole(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _of_python(leaf: pa.DataType) -> pa.DataType:
    """Return the type of a number of Python in place of a smaller one. Only unsigned ones may need all 64 bits."""
    types = pa.types
    if types.is_integer(leaf) and not types.is_uint64(leaf):
        return pa.int64()
    return pa.float64() if types.is_floating(leaf) else leaf


def _is_not_told(kind: pa.DataType) -> bool:
    """Return whether values of Python do not tell a type."""
    types = pa.types
    is_of_time = types.is_timestamp(kind) or types.is_duration(kind)
    is_in_ns = is_of_time and kind.unit == "ns"
    return bool(types.is_map(kind) or types.is_uint64(kind) or types.is_decimal(kind) or is_in_ns)


def _equal(found: Any, value: Any) -> bool:
    """Return whether Arrow kept a value, at any depth. NaN equals NaN; 1.0 and True are not 1."""
    if isinstance(found, list) or isinstance(value, (list, tuple)):
        is_alike = isinstance(found, (list, tuple)) and isinstance(value, (list, tuple)) and len(found) == len(value)
        return is_alike and all(map(_equal, found, value))
    if isinstance(found, dict):
        is_alike = isinstance(value, Mapping) and value.keys() == found.keys()
        return is_alike and all(_equal(each, value[key]) for key, each in found.items())
    if isinstance(found, (bool, int, float)):
        return type(found) is type(value) and (found == value or found != found)  # noqa: PLR0124 (NaN)
    return not isinstance(value, (np.ndarray, torch.Tensor)) and bool(found == value)


def _leaves(values: Iterable[Any], kind: pa.DataType) -> Iterator[tuple[Any, pa.DataType]]:
    """Yield each text, bytes, date and time that is in values of a type, with the type that Arrow inferred there."""
    if not has_part(kind, _may_lose):
        return
    values = [value for value in values if value is not None]
    if _may_lose(kind):
        yield from ((value, kind) for value in values)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves((value.get(field.name) for value in values), field.type)
    else:
        yield from _leaves((each for value in values for each in value), kind.value_type)


def _may_lose(kind: pa.DataType) -> bool:
    is_of_bytes = is_bytes(kind) and not is_text(kind)
    return is_of_bytes or bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind))


def _lossy(value: Any, kind: pa.DataType) -> str | None:
    """Return what is beside a value, if Arrow inferred a type that loses a part of it, such as its zone."""
    if is_bytes(kind):
        return "bytes" if isinstance(value, str) else None
    if pa.types.is_date(kind):
        return "dates" if isinstance(value, dt.datetime) else None
    if pa.types.is_timestamp(kind) and (kind.tz is None) != (getattr(value, "tzinfo", None) is None):
        return "times with a zone" if kind.tz else "times without a zone"
    return None


def _with_leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with other types of the values that have no parts."""
    fields = [child.with_type(_with_leaves(child.type, leaf)) for child in children(kind)]
    return with_members(kind, fields) if fields else leaf(kind)


def _in_ns(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf):
        return pa.timestamp("ns", leaf.tz)
    return pa.duration("ns") if pa.types.is_duration(leaf) else leaf


def common_shape(here: tuple[int, ...], there: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one if one == other else -1 for one, other in zip(here, there, strict=True))


def of_fixed_lists(numbers: pa.Array, shape: Sequence[int], count: int) -> pa.Array:
    """Return `count` arrays of a shape as lists of fixed sizes."""
    for size in reversed(shape):
        numbers = (
            pa.FixedSizeListArray.from_arrays(numbers, size)
            if size
            else pa.array([[]] * count, pa.list_(numbers.type, 0))
        )
    return numbers


def _dimensions(shapes: Iterable[Sequence[int]]) -> str:
    return " and ".join(map(str, sorted({len(shape) for shape in shapes})))


def _type(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"one {name}" if np.isscalar(value) or value is None else f"a {name}"

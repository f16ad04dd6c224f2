"""The columns that a function may return: arrays of numbers, lists of arrays, and whatever Arrow can hold.

Arrays of numbers are columns of records as they are. Everything else becomes an Arrow array, which is decoded as that
of a file is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from dataload.catalog.common_schema import is_like, promoted
from dataload.errors import DataError
from dataload.formats.arrow_types import (
    NO_VALUE,
    children,
    has_part,
    is_bytes,
    is_list,
    is_text,
    portable,
    storage,
    tensors_of_varying_shape,
    with_members,
)
from dataload.formats.null_types import filled, has_null_type
from dataload.formats.schema import Field, fields_of, flatten_table, mask_name, structs_of
from dataload.formats.text import TextErrors
from dataload.rows.arrow_decode import decode
from dataload.rows.collate import Flat, unflattened
from dataload.rows.columns import Array, Column, Dense
from dataload.runtime.cached_property import cached_property

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
        shape = reduce(_common_shape, shapes, tuple(varying) or shapes[0])
        return cls(values, shape if len(shapes) == len(values) else (-1, *shape[1:]))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of all arrays."""
        return next(value.dtype for value in self.values if value is not None)


Returned: TypeAlias = "Array | Tensors | pa.Array"
"""A column that a function returned: numbers [B, …], a list of arrays, or anything else."""


@dataclass(frozen=True)
class Form:
    """What a sample tells of a column.

    Args:
        type: The type of the values; of `Tensors`, that of a number.
        shape: The shape of `Tensors`, or None.
        is_empty: Whether these are lists of floats that are all empty: `np.array([])` is one of whatever type.
    """

    type: pa.DataType
    shape: tuple[int, ...] | None = None
    is_empty: bool = False

    @classmethod
    def of(cls, value: Returned) -> Form:
        """Return the form of a column."""
        if isinstance(value, pa.Array):
            return cls(value.type, is_empty=_without_type(value) is not value)
        number = pa.from_numpy_dtype(value.dtype)
        if isinstance(value, Tensors):
            return cls(number, value.shape)
        return cls(pa.fixed_shape_tensor(number, value.shape[1:]) if value.ndim > 1 else number)

    def field(self, name: str) -> pa.Field:
        """Return the column. Tensors that vary in their first dimension only are lists of arrays of one shape."""
        if self.shape is None:
            return pa.field(name, self.type)
        if min(self.shape) >= 0:
            return pa.field(name, pa.fixed_shape_tensor(self.type, self.shape))
        if min(self.shape[1:]) >= 0:
            return pa.field(name, pa.list_(_fixed_lists(self.type, self.shape[1:])))
        return tensors_of_varying_shape(name, self.type, len(self.shape))


def joined(name: str, forms: Iterable[Form], source: pa.Schema) -> pa.Field:
    """Return the column that holds the values of all samples: their types are promoted as those of files are.

    Args:
        name: Name of the column.
        forms: The forms of the samples.
        source: The columns of the source, of which one may have this name. It tells what the samples leave open.

    Raises:
        DataError: Types have none in common, or no sample has a value.
    """
    forms = list(forms)
    forms = [form for form in forms if not form.is_empty] or forms
    known = [form for form in forms if not pa.types.is_null(form.type)]
    if known and all(form.shape is not None for form in known) and len({len(form.shape or ()) for form in known}) == 1:
        number = reduce(_common(name), (pa.field(name, form.type) for form in known)).type
        shape = reduce(_common_shape, (form.shape or () for form in known))
        return Form(number, shape if len(known) == len(forms) else (-1, *shape[1:])).field(name)
    field = reduce(_common(name), (form.field(name) for form in known)) if known else pa.field(name, pa.null())
    before = source.field(name) if name in source.names else None
    is_open = has_null_type(field.type) or fields_of(pa.schema([field]))[0].kind == "nested"
    if before is not None and is_open and _fits(before, field):
        return before
    kind = storage(field.type)
    if pa.types.is_null(kind) or (is_list(kind) and pa.types.is_null(kind.value_type)):
        raise DataError(
            f"column {name!r} has only None or empty lists in the sample: return an array of a dtype, or "
            "pa.array(values, type); or leave the column out"
        )
    return field


@dataclass(frozen=True)
class Made:
    """The columns that a function makes.

    Args:
        schema: The columns, in which members of structs are dotted columns.
        masks: Names of the columns that mark rows with nulls, which are added to them.
        fill_null: Replacement of nulls, as for `make_dataset`.
        skips: Whether errors are stored in place of the rows with which the function fails.
        errors: What to do about text that is not UTF-8, as for `make_dataset`.
    """

    schema: pa.Schema
    masks: tuple[str, ...] = ()
    fill_null: Any = None
    skips: bool = False
    errors: TextErrors = "raise"

    @cached_property
    def fields(self) -> dict[str, Field]:
        """The columns of batches, without masks."""
        return {field.name: field for field in fields_of(self.schema)}

    @property
    def columns(self) -> list[Field]:
        """The columns of batches."""
        return [*self.fields.values(), *(Field(mask, "mask", np.bool_) for mask in self.masks)]

    def fitted(self, values: Mapping[str, Returned]) -> dict[str, Column]:
        """Return the columns of records of what the function returned.

        Raises:
            DataError: It has other columns than the sample, or other types, or nulls that no batch can hold.
        """
        columns: dict[str, Column] = {}
        arrays: dict[str, tuple[pa.Field, pa.Array]] = {}
        for name, value in values.items():
            field = self.fields.get(name)
            if field is not None and not isinstance(value, pa.Array) and (dense := _dense(field, value)) is not None:
                columns[name] = dense
                if (mask := mask_name(field)) in self.masks:
                    columns[mask] = Dense(np.zeros(len(value), np.bool_))
            elif isinstance(value, pa.Array):
                array = _without_type(value)
                arrays[name] = pa.field(name, array.type), array
            elif field is None or not isinstance(value, Tensors):
                self._refuse(Form.of(value).field(name))
            else:
                arrays[name] = self._of_tensors(value, field)
        for name in self.schema.names:
            if not {name, *structs_of(name)} & values.keys():
                raise DataError(f"it did not return the column {name!r}, unlike for the rows before: return it")
        return columns | self._decoded(arrays, columns)

    def _decoded(self, arrays: Mapping[str, tuple[pa.Field, pa.Array]], others: Mapping[str, Column]) -> dict[str, Any]:
        """Return the columns of Arrow arrays, decoded as those of a file. others: the columns that are there."""
        if not arrays:
            return {}
        schema = pa.schema([field for field, _ in arrays.values()])
        table = flatten_table(pa.Table.from_arrays([array for _, array in arrays.values()], schema=schema))
        for field in table.schema:
            is_null = pa.types.is_null(field.type) and any(field.name in structs_of(name) for name in self.schema.names)
            if not is_null and (field.name not in self.fields or not _fits(self.schema.field(field.name), field)):
                self._refuse(field)
        fields = {name: field for name, field in self.fields.items() if name not in others}
        masks = {mask_name(field): name for name, field in fields.items()}
        returned = [field for name, field in fields.items() if name in masks]  # They would be taken for masks to make.
        made = [field for name, field in fields.items() if name not in masks]
        made += [Field(mask, "mask", np.bool_) for mask in self.masks if masks.get(mask) in fields]
        columns: dict[str, Column] = {}
        for part in (made, returned):
            columns |= decode(table, part, self.fill_null, "its", self.schema, errors=self.errors) if part else {}
        return columns

    def _of_tensors(self, tensors: Tensors, field: Field) -> tuple[pa.Field, pa.Array]:
        """Return a list of arrays as the type of the column."""
        want, values = self.schema.field(field.name), tensors.values
        shape = (-1, *field.shape) if field.kind == "list" else field.shape
        arrays = [value for value in values if value is not None]
        if not shape or not _has_numbers(field, tensors) or not all(_has_shape(value, shape) for value in arrays):
            self._refuse(Form.of(tensors).field(field.name))
        number = pa.array(_flat(_exact(field, value) for value in arrays))
        nulls = pa.array([value is None for value in values])
        if field.kind == "dense":
            number = pa.array(_flat(np.zeros(shape, field.dtype) if v is None else _exact(field, v) for v in values))
            flat = pa.FixedSizeListArray.from_arrays(number, int(np.prod(shape)), mask=nulls)
            kind = pa.fixed_shape_tensor(number.type, shape)
            return pa.field(field.name, kind), pa.ExtensionArray.from_storage(kind, flat)
        if field.kind == "list":
            lengths = [0 if value is None else len(value) for value in values]
            offsets = pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
            inner = _of_fixed_lists(number, field.shape, sum(lengths))
            return want.with_type(pa.large_list(inner.type)), pa.LargeListArray.from_arrays(offsets, inner, mask=nulls)
        sizes = [0 if value is None else value.size for value in values]
        offsets = pa.array(np.concatenate(([0], np.cumsum(sizes))).astype(np.int32))
        shapes = np.array([(0,) * len(shape) if value is None else value.shape for value in values], np.int32)
        data = pa.ListArray.from_arrays(offsets, number)
        parts = [data, pa.FixedSizeListArray.from_arrays(pa.array(shapes.reshape(-1)), len(shape))]
        struct = pa.StructArray.from_arrays(parts, ["data", "shape"], mask=nulls)
        return want.with_type(struct.type), struct

    def _refuse(self, found: pa.Field) -> None:
        """Raise DataError for a column of another type than in the sample, or that the sample lacks."""
        name = found.name
        if name not in self.fields:
            raise DataError(f"it returned the column {name!r}, unlike for the rows before: return the same columns")
        want = self.schema.field(name)
        both, hint = [self.fields[name], *fields_of(pa.schema([found]))], ""
        if has_null_type(want.type):
            hint = ", because the sample has only None or empty lists there"
        elif both[0].dtype == both[1].dtype and all(
            each.kind == "list" or (each.kind == "dense" and each.shape) for each in both
        ):
            hint = "; if the shapes of its rows differ, return torch.nested.nested_tensor(arrays)"
        raise DataError(
            f"column {name!r} is {_text(found)} here, and {_text(want)} in the rows before: return one type, as an "
            f"array or pa.array(values, type){hint}; or leave the column out"
        )


def as_column(name: str, value: Any, like: pa.Field | None = None) -> Returned:
    """Return a column that a function returned.

    Args:
        name: Name of the column.
        value: The values.
        like: A column of the source. Values of Python have its type if it is nested and has them all, because they do
            not tell it themselves: maps, small numbers and nanoseconds inside.

    Raises:
        DataError: No column can hold the values.
    """
    if isinstance(value, torch.Tensor):
        value = _rows_of_nested(value) if value.is_nested else _numpy(name, value)
    elif _is_arrow(value):
        value = _exported(name, value)
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        whole = _whole(value)
        return pa.concat_arrays([whole, whole[:0]])  # a copy: the function may use its memory again
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(f"column {name!r} is a masked array: fill it, such as by .filled(np.nan)")
    if isinstance(value, Flat):
        shape = (-1, *value.values.shape[1:]) if isinstance(value.values, torch.Tensor) else ()
        return _of_list(name, unflattened(value), like, shape)
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, _Nested):
        return _of_list(name, value.rows, like, value.shape)
    if isinstance(value, np.ndarray) and value.ndim:
        return _of_array(name, value, like)
    if isinstance(value, (list, tuple)):
        return _of_list(name, value, like)
    raise DataError(f"column {name!r} is {_type(value)}: {WAYS}")


def _is_arrow(value: Any) -> bool:
    """Return whether values, such as a Series of polars or pandas, have a type that NumPy lacks."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype) or str(dtype) == "Object":  # polars exports the address of objects
        return False
    return hasattr(value, "__arrow_c_stream__") or hasattr(getattr(value, "array", value), "__arrow_array__")


def _exported(name: str, value: Any) -> pa.Array | pa.ChunkedArray:
    try:
        return pa.chunked_array(value) if hasattr(value, "__arrow_c_stream__") else pa.array(value)
    except NO_VALUE as error:
        raise DataError(f"column {name!r} has the type {value.dtype}, which Arrow lacks: {WAYS}") from error


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


def _of_array(name: str, array: Array, like: pa.Field | None) -> Returned:
    if array.dtype.kind in "OUT":
        return _of_list(name, array.tolist(), like)
    if array.dtype.kind in "mM":
        flat = pa.array(_times(name, array.reshape(-1)))
        return _of_fixed_lists(flat, array.shape[1:], len(array))
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(f"column {name!r} is an array of {array.dtype}: {WAYS}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _of_list(name: str, values: Sequence[Any], like: pa.Field | None, varying: Sequence[int] = ()) -> Returned:
    values = _with_empty([_numpy(name, value) if isinstance(value, torch.Tensor) else value for value in values])
    arrays = [value for value in values if value is not None]
    for kind in (np.datetime64, np.timedelta64):
        if arrays and all(isinstance(value, kind) for value in arrays):
            return _of_array(name, np.array([kind("NaT") if value is None else value for value in values]), like)
    if not arrays or not all(isinstance(value, np.ndarray) for value in arrays):
        return _of_values(name, values, like)
    if any(isinstance(value, np.ma.MaskedArray) for value in arrays):
        raise DataError(f"column {name!r} has masked arrays: fill them, such as by .filled(np.nan)")
    if len(found := {value.dtype for value in arrays}) > 1:
        raise DataError(f"column {name!r} has arrays of {' and '.join(sorted(map(str, found)))}: return one dtype")
    most = max(value.ndim for value in arrays)
    if not most:
        return _of_list(name, [None if value is None else value[()] for value in values], like)
    if most == 1 or arrays[0].dtype.kind in "mM":
        return _of_values(name, [None if value is None else _vectors(name, value) for value in values], like)
    if arrays[0].dtype.kind not in "biuf" or arrays[0].dtype.itemsize > 8:
        if arrays[0].dtype.kind in "OUT":
            return _of_values(name, [None if value is None else value.tolist() for value in values], like)
        raise DataError(f"column {name!r} has arrays of {arrays[0].dtype}: {WAYS}")
    native = arrays[0].dtype.newbyteorder("=")
    return Tensors.of(name, [None if value is None else value.astype(native, copy=False) for value in values], varying)


def _vectors(name: str, array: Array) -> Any:
    """Return an array of one dimension as Arrow takes it, or lists of such arrays."""
    if array.ndim > 1:
        return [_vectors(name, row) for row in array]
    if array.dtype.kind in "mM":
        times = _times(name, array)
        return times.tolist() if times.dtype == "datetime64[D]" else times
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _with_empty(values: Sequence[Any]) -> Sequence[Any]:
    """Return values with a list, or an array as the others, in place of `np.array([])`, which tells neither."""
    if not any(map(_is_empty, values)):
        return values
    known = [value for value in values if value is not None and not _is_empty(value)]
    if not known:
        return values
    empty: Any = []
    if all(isinstance(value, np.ndarray) and value.ndim for value in known):
        empty = np.empty((0, *known[0].shape[1:]), known[0].dtype)
    return [empty if _is_empty(value) else value for value in values]


def _is_empty(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.shape == (0,) and value.dtype.kind == "f"


def _without_type(array: pa.Array) -> pa.Array:
    """Return lists of floats that are all empty as lists of no type."""
    is_floats = is_list(array.type) and pa.types.is_floating(array.type.value_type)
    return pa.array(array.to_pylist()) if is_floats and not len(array.flatten()) else array


def _of_values(name: str, values: Sequence[Any], like: pa.Field | None) -> pa.Array:
    """Return values of Python as an Arrow array.

    Raises:
        DataError: They have no type in common.
    """
    kind = None if like is None else portable(like.type)
    if kind is not None and pa.types.is_nested(kind) and (array := _as_before(values, kind)) is not None:
        return array
    try:
        return _retyped(_inferred(values), values)
    except MemoryError:  # Arrow's is also an ArrowException.
        raise
    except OverflowError as error:
        raise DataError(
            f"column {name!r} has an integer that int64 cannot hold: return an array, such as np.array(…, np.uint64)"
        ) from error
    except NO_VALUE as error:
        raise DataError(f"column {name!r} has values that no type holds together ({_reason(error)}): {WAYS}") from error


def _inferred(values: Sequence[Any]) -> pa.Array:
    try:
        array = pa.array(values)
    except NO_VALUE:
        values = [_plain(value) for value in values]  # There may be tensors inside of dicts and lists.
        array = pa.array(values)
    array = _whole(array)
    if (text := _text_in(values, pa.list_(array.type))) is not None:  # Arrow makes bytes of it.
        raise TypeError(f"{text!r} beside bytes")
    return array


def _whole(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _as_before(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    """Return values as a type that has them all. None: it has not, or they would lose a part, such as a member."""
    try:
        array = _whole(pa.array(values, kind))
        return array if _equal(array.to_pylist(), values) else None
    except MemoryError:
        raise
    except NO_VALUE:
        return None


def _equal(found: Any, value: Any) -> bool:
    """Return whether Arrow kept a value, at any depth. NaN equals NaN; 1.0 and True are not 1."""
    if isinstance(found, list) or isinstance(value, (list, tuple)):
        is_alike = isinstance(found, (list, tuple)) and isinstance(value, (list, tuple)) and len(found) == len(value)
        return is_alike and all(map(_equal, found, value))
    if isinstance(found, dict):
        is_alike = isinstance(value, Mapping) and value.keys() <= found.keys()
        return is_alike and all(_equal(each, value.get(key)) for key, each in found.items())
    if isinstance(found, (bool, int, float)):
        return type(found) is type(value) and (found == value or found != found)  # noqa: PLR0124 (NaN)
    return not isinstance(value, (np.ndarray, torch.Tensor)) and bool(found == value)


def _retyped(array: pa.Array, values: Sequence[Any]) -> pa.Array:
    """Return the array with types that hold all digits of the values.

    Decimals become what batches have: floats, or decimals of any digits inside of other values. Times of pandas have
    nanoseconds, which Arrow does not infer.
    """
    kind, is_decimal = array.type, pa.types.is_decimal
    if is_decimal(kind):
        return pa.array([None if value is None else float(value) for value in values])
    if is_list(kind) and is_decimal(kind.value_type):
        floats = [None if row is None else [None if v is None else float(v) for v in row] for row in values]
        return pa.array(floats, pa.list_(pa.float64()))
    if has_part(kind, is_decimal):
        kind = _with_leaves(kind, lambda leaf: _ANY_DECIMAL if is_decimal(leaf) else leaf)
    if has_part(kind, _is_in_us) and _has_times_of_pandas(values):
        with suppress(*NO_VALUE):  # of years that nanoseconds do not reach
            return _whole(pa.array(values, _with_leaves(kind, lambda leaf: _in_ns(leaf) if _is_in_us(leaf) else leaf)))
    return array if kind == array.type else _whole(pa.array(values, kind))


def _with_leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with other types of the values that have no parts."""
    fields = [child.with_type(_with_leaves(child.type, leaf)) for child in children(kind)]
    return with_members(kind, fields) if fields else leaf(kind)


def _is_in_us(kind: pa.DataType) -> bool:
    return bool((pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "us")


def _in_ns(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp("ns", kind.tz) if pa.types.is_timestamp(kind) else pa.duration("ns")


def _has_times_of_pandas(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_times_of_pandas, value))
    if isinstance(value, Mapping):
        return any(map(_has_times_of_pandas, value.values()))
    return hasattr(value, "nanosecond") or hasattr(value, "nanoseconds")  # Timestamp, Timedelta


def _plain(value: Any) -> Any:
    """Return a value with lists and numbers in place of tensors and arrays that Arrow does not take, at any depth."""
    if isinstance(value, torch.Tensor):
        value = _numpy("", value)
    if isinstance(value, np.ndarray):
        if not value.ndim:
            return value[()]
        return value if value.ndim == 1 and value.dtype.kind != "O" else _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _text_in(value: Any, kind: pa.DataType) -> str | None:
    """Return a text in a value whose type has bytes there, at any depth."""
    if is_bytes(kind):
        return value if isinstance(value, str) and not is_text(kind) else None
    if value is None or not has_part(kind, lambda part: is_bytes(part) and not is_text(part)):
        return None
    if pa.types.is_struct(kind):
        inner = [(value.get(field.name), field.type) for field in kind]
    else:
        inner = [(each, kind.value_type) for each in value]
    return next((text for each, part in inner if (text := _text_in(each, part)) is not None), None)


def _numpy(name: str, tensor: torch.Tensor) -> Array:
    try:
        array: Array = tensor.detach().to("cpu", _EXACT.get(tensor.dtype, tensor.dtype)).numpy()
    except (TypeError, RuntimeError) as error:  # quantized and sparse tensors
        raise DataError(f"column {name!r} has a tensor that numpy cannot hold ({error}): convert it") from error
    return array


def _times(name: str, array: Array) -> Array:
    """Return a copy of times, in a unit that Arrow has."""
    unit, count = np.datetime_data(array.dtype)
    family = "datetime64" if array.dtype.kind == "M" else "timedelta64"
    known = ("s", "ms", "us", "ns", *(["D"] if family == "datetime64" else []))
    unit = _TIMES[family].get(unit, unit)
    if unit not in known:
        raise DataError(
            f"column {name!r} has times in {array.dtype}, which Arrow lacks: return them in s, ms, us or ns"
        )
    return np.array(array, np.dtype(f"{family}[{unit}]") if count == 1 else f"{family}[{unit}]")


def _dense(field: Field, value: Array | Tensors) -> Dense | None:
    """Return arrays of one shape as a column; None if they have another shape, or another type, or nulls."""
    if field.kind != "dense" or not _has_numbers(field, value):
        return None
    if isinstance(value, Tensors):
        arrays = [_exact(field, each) for each in value.values if each is not None]
        is_whole = len(arrays) == len(value) and all(_has_shape(each, field.shape) for each in arrays)
        return Dense(np.stack(arrays)) if is_whole else None
    if value.shape[1:] != field.shape:
        return None
    exact = _exact(field, value)
    # A copy: the function may write its next result to the same memory.
    return Dense(exact.copy() if exact is value else exact)


def _has_numbers(field: Field, value: Array | Tensors) -> bool:
    """Return whether a column can hold the numbers of arrays."""
    return not field.unit and _fits(_number(field.dtype), _number(value.dtype))


def _exact(field: Field, array: Array) -> Array:
    """Return numbers as those of the column.

    Raises:
        DataError: Its dtype cannot hold one.
    """
    dtype = np.dtype(field.dtype)
    if dtype != array.dtype and array.dtype.kind in "iu" and array.size:
        # A cast back proves nothing: int64 and uint64 hold each other's bits.
        most = 2 << np.finfo(dtype).nmant if dtype.kind == "f" else int(np.iinfo(dtype).max)
        least = -most if dtype.kind == "f" else int(np.iinfo(dtype).min)
        if int(array.min()) < least or int(array.max()) > most:
            fix = "floats" if dtype.kind == "f" else f"{array.dtype} for all rows"
            raise DataError(f"column {field.name!r} has an integer that {dtype} cannot hold: return {fix}")
    return array.astype(dtype, copy=False)


def _number(dtype: Any) -> pa.Field:
    return pa.field("", pa.from_numpy_dtype(np.dtype(dtype)))


def _fits(want: pa.Field, found: pa.Field) -> bool:
    """Return whether a column can hold the values of another one: their types promote to that of the column."""
    found = filled(found, want)
    if is_like(want, found):
        return True
    common = promoted(want, found)
    return common is not None and is_like(common, want)


def _common(name: str) -> Any:
    """Return a function that promotes two columns to one."""

    def common(here: pa.Field, there: pa.Field) -> pa.Field:
        here, there = filled(here, there), filled(there, here)
        found = here if is_like(here, there) else promoted(here, there)
        if found is None:
            raise DataError(
                f"column {name!r} is {_text(here)} in one batch and {_text(there)} in another: return one type, as an "
                "array or pa.array(values, type); or leave the column out"
            )
        return found

    return common


def _common_shape(here: tuple[int, ...], there: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one if one == other else -1 for one, other in zip(here, there, strict=True))


def _has_shape(array: Array, shape: Sequence[int]) -> bool:
    """Return whether an array has a shape, in which -1 is any length."""
    return array.ndim == len(shape) and all(want in (-1, size) for want, size in zip(shape, array.shape, strict=True))


def _fixed_lists(kind: pa.DataType, shape: Sequence[int]) -> pa.DataType:
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def _of_fixed_lists(numbers: pa.Array, shape: Sequence[int], count: int) -> pa.Array:
    """Return `count` arrays of a shape as lists of fixed sizes."""
    for size in reversed(shape):
        numbers = (
            pa.FixedSizeListArray.from_arrays(numbers, size)
            if size
            else pa.array([[]] * count, pa.list_(numbers.type, 0))
        )
    return numbers


def _flat(arrays: Iterable[Array]) -> Array:
    flat = [array.reshape(-1) for array in arrays]
    return np.concatenate(flat) if flat else np.empty(0)


def _dimensions(shapes: Iterable[Sequence[int]]) -> str:
    return " and ".join(map(str, sorted({len(shape) for shape in shapes})))


def _text(field: pa.Field) -> str:
    [own] = fields_of(pa.schema([field]))
    if own.kind == "dense" and not own.unit:
        return f"{np.dtype(own.dtype)} [{', '.join(['B', *map(str, own.shape)])}]"
    if min(own.shape, default=0) < 0:
        return f"tensors of {np.dtype(own.dtype)} of {len(own.shape)} dimensions"
    return str(field.type)


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _type(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"one {name}" if np.isscalar(value) or value is None else f"a {name}"

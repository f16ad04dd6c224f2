"""The columns that a function of `map` makes: their types by a sample, and later values of these types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.catalog.common_schema import is_like, promoted
from dataload.errors import DataError
from dataload.formats.arrow_types import is_list, storage, tensors_of_varying_shape
from dataload.formats.null_types import filled, has_null_type
from dataload.formats.schema import Field, fields_of, flatten_table, mask_name, structs_of
from dataload.formats.text import TextErrors
from dataload.mapping.values import Returned, Tensors, common_shape, of_fixed_lists
from dataload.rows.arrow_decode import decode
from dataload.rows.columns import Array, Column, Dense
from dataload.runtime.cached_property import cached_property


@dataclass(frozen=True)
class Form:
    """What a sample tells of a column.

    Args:
        type: The type of the values; of `Tensors`, that of a number.
        shape: The shape of `Tensors`, or None.
    """

    type: pa.DataType
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, value: Returned) -> Form:
        """Return the form of a column."""
        if isinstance(value, pa.Array):
            return cls(value.type)
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
    known = [form for form in forms if not _is_open(form.type)]
    if known and all(form.shape is not None for form in known) and len({len(form.shape or ()) for form in known}) == 1:
        number = reduce(_common(name), (pa.field(name, form.type) for form in known)).type
        shape = reduce(common_shape, (form.shape or () for form in known))
        return Form(number, shape if len(known) == len(forms) else (-1, *shape[1:])).field(name)
    field = reduce(_common(name), (form.field(name) for form in forms))
    has_one = source.get_field_index(name) >= 0
    before = source.field(name) if has_one else field
    field = filled(field, before)
    if _is_open(field.type) and not (has_one and field.type == before.type):
        raise DataError(
            f"column {name!r} has only None or empty lists in the sample: return an array of a dtype, or "
            "pa.array(values, type); or leave the column out"
        )
    return field


def _is_open(kind: pa.DataType) -> bool:
    """Return whether a column has only None or empty lists."""
    kind = storage(kind)
    return bool(pa.types.is_null(kind) or (is_list(kind) and pa.types.is_null(kind.value_type)))


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
                arrays[name] = pa.field(name, value.type), value
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
        to_mark = [Field(mask, "mask", np.bool_) for mask in self.masks if masks.get(mask) in fields]
        plain = [field for name, field in fields.items() if name not in masks]
        columns: dict[str, Column] = decode(
            table, [*plain, *to_mark], self.fill_null, "its", self.schema, errors=self.errors
        )
        if returned := [field for name, field in fields.items() if name in masks]:
            # Masks that the function returned are columns here. Beside theirs, they would be taken for masks to make.
            columns |= decode(table, returned, self.fill_null, "its", self.schema, errors=self.errors)
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
            inner = of_fixed_lists(number, field.shape, sum(lengths))
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
        both, why, hint = [self.fields[name], *fields_of(pa.schema([found]))], "", ""
        if has_null_type(want.type) and _fits(filled(want, found), found):
            why = ", because the sample has only None or empty lists there"
        elif (part := _differing(want, found, name)) != name:
            why = f": they differ in {part}"
        elif both[0].dtype == both[1].dtype and all(
            each.kind == "list" or (each.kind == "dense" and each.shape) for each in both
        ):
            hint = "; if the shapes of its rows differ, return torch.nested.nested_tensor(arrays)"
        raise DataError(
            f"column {name!r} is {_text(found)} here, and {_text(want)} in the rows before{why}: return one type, as "
            f"an array or pa.array(values, type){hint}; or leave the column out"
        )


def _differing(want: pa.Field, found: pa.Field, path: str) -> str:
    """Return the path of the first part of a column that does not fit."""
    here, there = storage(want.type), storage(found.type)
    if is_list(here) and is_list(there):
        return _differing(here.value_field, there.value_field, f"{path}[]")
    if pa.types.is_struct(here) and pa.types.is_struct(there):
        mine, others = ({each.name: each for each in kind} for kind in (here, there))
        for name in {**mine, **others}:
            if name not in mine or name not in others:
                return f"{path}.{name}"
            if not _fits(mine[name], others[name]):
                return _differing(mine[name], others[name], f"{path}.{name}")
    return path


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


def _has_shape(array: Array, shape: Sequence[int]) -> bool:
    """Return whether an array has a shape, in which -1 is any length."""
    return array.ndim == len(shape) and all(want in (-1, size) for want, size in zip(shape, array.shape, strict=True))


def _fixed_lists(kind: pa.DataType, shape: Sequence[int]) -> pa.DataType:
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def _flat(arrays: Iterable[Array]) -> Array:
    flat = [array.reshape(-1) for array in arrays]
    return np.concatenate(flat) if flat else np.empty(0)


def _text(field: pa.Field) -> str:
    [own] = fields_of(pa.schema([field]))
    if own.kind == "dense" and not own.unit:
        return f"{np.dtype(own.dtype)} [{', '.join(['B', *map(str, own.shape)])}]"
    if min(own.shape, default=0) < 0:
        return f"tensors of {np.dtype(own.dtype)} of {len(own.shape)} dimensions"
    return str(field.type)

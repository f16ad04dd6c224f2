"""Questions about Arrow types: what their values are, and of which parts they consist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

NO_VALUE = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What pyarrow raises if a type cannot hold a value."""
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # other names are the same in numpy
UNKNOWN_INTERVALS = (21, 22)  # of months, and of days and milliseconds, in Arrow's Type; pyarrow 18 has no names
VARYING_NAME = b"arrow.variable_shape_tensor"
_TENSOR_OF_DATASETS = re.compile(r"datasets\..*Array[2-5]DExtensionType")


def storage(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of an extension type, a dictionary or runs, or else the type itself."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = pa.bool_() if kind.extension_name == "arrow.bool8" else kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def children(kind: pa.DataType) -> list[pa.Field]:
    """Return the members of a struct, the elements of a list, or the keys and values of a map."""
    return [kind.field(number) for number in range(kind.num_fields)]


def leaf_count(kind: pa.DataType) -> int:
    """Return the number of columns in which Parquet stores values of a type: none for a struct without members."""
    parts = children(storage(kind))
    is_leaf = not parts and not pa.types.is_struct(storage(kind))
    return int(is_leaf) + sum(leaf_count(part.type) for part in parts)


def has_part(kind: pa.DataType, is_it: Callable[[pa.DataType], bool]) -> bool:
    """Return whether `is_it` holds for a type or for a part of it, at any depth."""
    return is_it(kind) or any(has_part(child.type, is_it) for child in children(storage(kind)))


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are text."""
    return kind in {pa.string(), pa.large_string(), pa.string_view()}


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values are bytes or text."""
    is_binary = kind in {pa.binary(), pa.large_binary(), pa.binary_view()}
    return bool(is_binary or pa.types.is_fixed_size_binary(kind) or is_text(kind))


def has_elements(kind: pa.DataType) -> bool:
    """Return whether values are lists of any kind, or maps."""
    return is_list(kind) or bool(pa.types.is_fixed_size_list(kind) or pa.types.is_map(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether values are lists of varying length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or is_list_view(kind))


def is_list_view(kind: pa.DataType) -> bool:
    """Return whether values are lists of varying length, in any order, as list views of 32 or 64 bits have them."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def has_members(kind: pa.DataType) -> bool:
    """Return whether values are structs whose members are columns. A struct without members is a column itself."""
    return bool(pa.types.is_struct(storage(kind)) and storage(kind).num_fields)


def with_members(kind: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType:
    """Return a struct, map or list type with other members or elements."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct(fields)
    if types.is_map(kind):
        key, item = fields[0].type
        return pa.map_(key.with_nullable(False), item, keys_sorted=kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    views = {True: pa.large_list_view, False: pa.list_view}
    lists = {True: pa.large_list, False: pa.list_}
    is_large = types.is_large_list(kind) or types.is_large_list_view(kind)
    return (views if is_list_view(kind) else lists)[is_large](fields[0])


def bare(kind: pa.DataType) -> pa.DataType:
    """Return a type of the same buffers without extension types, and with bytes in place of text, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return bare(kind.storage_type)
    if is_text(kind):
        return {pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}.get(kind, pa.binary())
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, bare(kind.value_type), kind.ordered)
    if pa.types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, bare(kind.value_type))
    fields = [child.with_type(bare(child.type)) for child in children(kind)]
    if pa.types.is_union(kind):
        return pa.union(fields, kind.mode, kind.type_codes)
    return with_members(kind, fields) if fields else kind


def number(kind: pa.DataType) -> np.dtype[Any] | None:
    """Return the dtype in batches of a numeric type, or None for other types.

    Decimals become float64; dates and times become int64.
    """
    types = pa.types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        name = str(kind)  # `to_pandas_dtype` imports pandas in older releases of pyarrow.
        return np.dtype(_FLOATS.get(name, name))
    if types.is_decimal(kind):
        return np.dtype(np.float64)
    if types.is_temporal(kind) and not is_interval(kind):
        return np.dtype(np.int64)
    return None


def is_interval(kind: pa.DataType) -> bool:
    """Return whether values are intervals of a calendar."""
    return bool(pa.types.is_interval(kind)) or _is_unknown_interval(kind)


def _is_unknown_interval(kind: pa.DataType) -> bool:
    """Return whether values are intervals that pyarrow has no class for: of months, or of days and milliseconds."""
    return kind.id in UNKNOWN_INTERVALS


def unit(kind: pa.DataType) -> str:
    """Return the type of a date, time, duration or timestamp in words, or "" for other types.

    All timestamps with a time zone count from 1970 in UTC, so their zones make no difference.
    """
    kind = storage(kind)
    if not pa.types.is_temporal(kind) or is_interval(kind):
        return ""
    return f"timestamp[{kind.unit}, UTC]" if getattr(kind, "tz", None) else str(kind)


def fixed_shape(field: pa.Field) -> tuple[tuple[int, ...], pa.DataType]:
    """Return the shape of a column's values in batches, and the type of one element.

    Fixed-size lists, `arrow.fixed_shape_tensor` and the Array2D to Array5D features of Hugging Face datasets have a
    shape.
    """
    kind = field.type
    if isinstance(kind, pa.FixedShapeTensorType):
        shape = tuple(kind.shape)
        return tuple(shape[axis] for axis in kind.permutation or range(len(shape))), storage(kind.value_type)
    shape, kind = _shape_of_datasets(field), storage(kind)
    if shape:
        for _ in shape:
            kind = storage(kind.value_type)
        return shape, kind
    while pa.types.is_fixed_size_list(kind):
        shape = (*shape, kind.list_size)
        kind = storage(kind.value_type)
    return shape, kind


def list_elements(kind: pa.DataType) -> tuple[tuple[int, ...], pa.DataType] | None:
    """Return the shape of the elements of a list, and the type of one number in them; None if they are no numbers."""
    field = kind.field(0)
    if is_list(storage(field.type)):  # also the Array2D of Hugging Face datasets, which is lists of lists
        return None
    shape, element = fixed_shape(field)
    return None if number(element) is None else (shape, element)


def varying_shape(field: pa.Field) -> tuple[int, pa.DataType] | None:
    """Return the dimensions of tensors whose shapes vary, and the type of a number in them; None for other columns.

    A column has them if `tensors_of_varying_shape` made it, or as `arrow.variable_shape_tensor`. For those with a
    permutation, the answer is None: data and shape are columns then.
    """
    kind = storage(field.type)
    if not pa.types.is_struct(kind) or VARYING_NAME not in (_extension(field)[0], *(field.metadata or {})):
        return None
    members = {member.name: storage(member.type) for member in kind}
    if members.keys() != {"data", "shape"} or not is_list(members["data"]):
        return None
    shape, element = members["shape"], storage(members["data"].value_type)
    is_permuted = "permutation" in (_extension(field)[1] or str(field.type))
    is_shape = pa.types.is_fixed_size_list(shape) and shape.value_type == pa.int32() and shape.list_size > 0
    return None if is_permuted or not is_shape or number(element) is None else (shape.list_size, element)


def tensors_of_varying_shape(name: str, kind: pa.DataType, dimensions: int) -> pa.Field:
    """Return a column of tensors in numbers of a type whose shapes vary, in the storage of arrow.variable_shape_tensor.

    Metadata of its own mark it: pyarrow has no class for that type, so processes could not send it to each other.
    """
    members = pa.struct([("data", pa.list_(kind)), ("shape", pa.list_(pa.int32(), dimensions))])
    return pa.field(name, members, metadata={VARYING_NAME: ""})


def _extension(field: pa.Field) -> tuple[bytes, str]:
    """Return the name of an extension type, registered or not, and its metadata if they are known; else empty ones."""
    kind, metadata = field.type, field.metadata or {}
    if isinstance(kind, pa.BaseExtensionType):
        serialized = kind.__arrow_ext_serialize__() if isinstance(kind, pa.ExtensionType) else b""
        return kind.extension_name.encode(), serialized.decode()
    return metadata.get(b"ARROW:extension:name", b""), metadata.get(b"ARROW:extension:metadata", b"").decode()


def _shape_of_datasets(field: pa.Field) -> tuple[int, ...]:
    """Return the shape of an Array2D to Array5D feature of Hugging Face datasets; () for others and for varying ones.

    With `datasets` imported, the type is an extension. Otherwise the metadata of the field describe it.
    """
    name, content = _extension(field)
    if not _TENSOR_OF_DATASETS.fullmatch(name.decode()):
        return ()
    shape, _ = json.loads(content)
    return () if None in shape else tuple(shape)


def canonical(kind: pa.DataType) -> pa.DataType:
    """Return the type that all types with equal Python values have in common, at any depth.

    Offsets of 32 or 64 bits, views, dictionaries, runs and time zones make no difference.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith("arrow."):
        return kind
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return canonical(kind.value_type)
    if types.is_map(kind):
        return pa.map_(canonical(kind.key_type), canonical(kind.item_type))
    if types.is_nested(kind) and not types.is_union(kind):
        fields = [pa.field(child.name, canonical(child.type)) for child in children(kind)]
        return pa.list_(fields[0]) if is_list(kind) else with_members(kind, fields)
    if types.is_timestamp(kind):
        return pa.timestamp(kind.unit, kind.tz and "UTC")
    is_variable = is_bytes(kind) and not types.is_fixed_size_binary(kind)
    return (pa.string() if is_text(kind) else pa.binary()) if is_variable else kind


def portable(kind: pa.DataType) -> pa.DataType:
    """Return a type without list views and extension types that only some processes know, at any depth.

    All its parts may be null: only some files may say that a part never is.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return kind if kind.extension_name.startswith("arrow.") else portable(kind.storage_type)
    if pa.types.is_map(kind):
        parts = portable(kind.key_type), portable(kind.item_type)
        is_same = parts == (kind.key_type, kind.item_type) and kind.item_field.nullable
        return kind if is_same else pa.map_(*parts)
    fields = [child.with_type(portable(child.type)).with_nullable(True) for child in children(kind)]
    if is_list_view(kind):  # Arrow cannot cast to list views, and casts from them to wrong values.
        return pa.large_list(fields[0])
    return kind if fields == children(kind) or pa.types.is_run_end_encoded(kind) else with_members(kind, fields)


def comparable(kind: pa.DataType) -> pa.DataType:
    """Return the type to which a column is cast before it is compared: Arrow cannot compare values of some types."""
    kind = storage(kind)
    if pa.types.is_struct(kind):
        return pa.struct(comparable_fields(kind))
    if pa.types.is_fixed_size_binary(kind):  # Other files may have another size, or none.
        return pa.binary()
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        return pa.decimal128(kind.precision, kind.scale)
    replaced = {pa.float16(): pa.float32(), pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return replaced.get(kind, portable(kind) if has_part(kind, is_list_view) else kind)


def comparable_fields(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Return columns with `comparable` types, and without unsupported ones, also of members of structs."""
    kept = (field for field in fields if has_members(field.type) or unsupported(field.type) is None)
    return [pa.field(field.name, comparable(field.type)) for field in kept]


def unsupported(kind: pa.DataType) -> str | None:
    """Return the part of a type that Python values cannot hold."""
    kind = storage(kind)
    if pa.types.is_union(kind):
        return "a union"
    if _is_unknown_interval(kind):
        return "intervals that pyarrow cannot convert"
    members = children(kind)
    if pa.types.is_struct(kind) and len({member.name for member in members}) < len(members):
        return "two members of one name"
    return next(filter(None, (unsupported(member.type) for member in members)), None)

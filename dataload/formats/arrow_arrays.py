"""Arrow arrays: views of their memory, and their values without extension types, dictionaries and runs.

Arrow's own `to_numpy`, and `array` of numpy's arrays, would import pandas first, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataload.formats.arrow_types import (
    canonical,
    children,
    has_members,
    has_part,
    is_bytes,
    is_list,
    is_list_view,
    is_text,
    number,
    portable,
    storage,
    with_members,
)
from dataload.formats.null_types import has_null_type

Array = npt.NDArray[Any]
EXACT_INTEGER, EXACT_POWER = 2**53, 22  # the largest integer and power of ten that a float64 holds exactly
TYPES_KEPT = 1024  # pairs


def numbers(column: pa.Array) -> Array:
    """Return the numbers as the dtype of batches. The number of a null is undefined."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return _floats(column)
    if pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return stored(column).astype(number(kind), copy=False)


def _floats(column: pa.Array) -> Array:
    """Return decimals as the nearest float64, as far as both parts of the division are exact; Arrow's are often not."""
    kind, first, count = column.type, column.offset, len(column)
    if not 0 <= kind.scale <= EXACT_POWER or not count:
        return stored(column.cast(pa.float64()))
    width = max(1, kind.bit_width // 64)  # in words
    words = np.frombuffer(column.buffers()[1], f"<i{min(8, kind.bit_width // 8)}", width * (first + count))
    low = words[width * first :: width].astype(np.int64, copy=False)
    floats: Array = low / 10.0**kind.scale
    is_exact = (low >= -EXACT_INTEGER) & (low <= EXACT_INTEGER)
    for word in range(1, width):
        is_exact &= words[width * first + word :: width] == low >> 63
    return floats if is_exact.all() else np.where(is_exact, floats, stored(column.cast(pa.float64())))


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


def indices(numbers: npt.NDArray[np.int64]) -> pa.Array:
    """Return row numbers as an Arrow array, for `take`. It is a view of them."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


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


def unwrapped(column: Any) -> Any:
    """Return an array or chunked array with values of the type `storage`, and with bytes and text of 64-bit offsets.

    Values of 32-bit offsets could not be joined: a column may have more than 2 GiB.
    """
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([unwrapped(chunk) for chunk in column.chunks or [pa.nulls(0, column.type)]])
    inner = _inner(column, unwrapped)
    return _with_long_offsets(column) if inner is None else inner


def plain(array: pa.Array) -> pa.Array:
    """Return the array with types that Arrow can gather and cast: no views, runs, dictionaries, and foreign extensions.

    Extension types of others are replaced by their storage: not every process of a job knows them.
    """
    kind, types = array.type, pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return _with_long_offsets(array)
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith("arrow."):
        return array
    if (inner := _inner(array, plain)) is not None:
        return inner
    if is_list_view(kind):
        array = _with_offsets(array)
    parts = [] if types.is_union(kind) else children(array.type)
    return with_parts(array, plain) if any(plain_type(part.type) != part.type for part in parts) else array


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that `plain` gives to arrays of a type."""
    return plain(pa.nulls(0, kind)).type


def as_in_dataset(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a file's column with the type that it has in the dataset: that to which it was promoted.

    Raises:
        pa.ArrowInvalid: The type cannot hold a value.
    """
    if column.type == kind or not _needs_cast(column.type, kind):
        return column
    if pa.types.is_null(column.type):
        return pa.chunked_array([pa.nulls(len(column), kind)])
    common = plain_type(portable(kind))
    return pa.chunked_array([_as_promoted(plain(chunk), common) for chunk in column.chunks], common)


@lru_cache(TYPES_KEPT)
def _needs_cast(own: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether a column of a file has other values than the type of the dataset: no values, or promoted ones."""
    if is_bytes(storage(own)) and is_bytes(storage(kind)):
        return False
    return has_null_type(own) or canonical(own) != canonical(kind)


def _as_promoted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return an array without the types that `plain` replaces as a type to which its own was promoted.

    Structs may gain members, also in lists and maps, which older releases of Arrow cannot cast.

    Raises:
        pa.ArrowInvalid: The type cannot hold a value.
    """
    own, types = array.type, pa.types
    if types.is_struct(own) and types.is_struct(kind):
        positions = {field.name: position for position, field in enumerate(own)}
        members = [
            _as_promoted(array.field(positions[field.name]), field.type)
            if field.name in positions
            else pa.nulls(len(array), field.type)
            for field in kind
        ]
        return pa.StructArray.from_arrays(members, fields=list(kind), mask=array.is_null())
    if (is_list(own) and is_list(kind)) or (types.is_map(own) and types.is_map(kind)):
        array = pa.concat_arrays([array, array[:0]])  # without the values of rows that are cut off
        values = _as_promoted(array.values, kind.field(0).type)
        inner = with_members(own, [kind.field(0)])
        array = pa.Array.from_buffers(inner, len(array), array.buffers()[: own.num_buffers], children=[values])
    return array if array.type == kind else array.cast(kind)


def _inner(array: pa.Array, unwrap: Callable[[pa.Array], pa.Array]) -> pa.Array | None:
    """Return the unwrapped values of an extension type, a dictionary or runs; None for other types."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return unwrap(array.storage.cast(pa.bool_()) if kind.extension_name == "arrow.bool8" else array.storage)
    if pa.types.is_dictionary(kind):
        values = unwrap(array.dictionary)  # A gather would join the dictionaries of all row groups.
        # Arrow's own arrays have index 0 in a null struct, also if the dictionary is empty.
        return values.take(array.indices) if len(values) else pa.nulls(len(array), values.type)
    return unwrap(pc.run_end_decode(array)) if pa.types.is_run_end_encoded(kind) else None


def _with_long_offsets(array: pa.Array) -> pa.Array:
    kind = array.type
    return array.cast(pa.large_string() if is_text(kind) else pa.large_binary()) if is_bytes(kind) else array


def with_parts(array: pa.Array, change: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return structs, lists or maps with their members or elements changed, which may get other types."""
    kind = array.type
    if pa.types.is_struct(kind):
        members = [change(array.field(number)) for number in range(kind.num_fields)]
        fields = [field.with_type(member.type) for field, member in zip(kind, members, strict=True)]
        return pa.StructArray.from_arrays(members, fields=fields, mask=array.is_null())
    array = pa.concat_arrays([array, array[:0]])  # without the values of rows that are cut off
    values, own = change(array.values), array.buffers()[: kind.num_buffers]
    kind = with_members(kind, [kind.field(0).with_type(values.type)])
    return pa.Array.from_buffers(kind, len(array), own, offset=array.offset, children=[values])


def _with_offsets(views: pa.Array) -> pa.Array:
    """Return list views as lists. Arrow's own cast ignores their sizes, so it returns other values."""
    lengths, values = elements(views)
    offsets = indices(np.concatenate(([0], np.cumsum(lengths))))
    kind = pa.large_list(views.type.field(0))
    return pa.LargeListArray.from_arrays(offsets, values, type=kind, mask=views.is_null())


def member(struct: pa.StructArray, number: int) -> pa.Array:
    """Return a member of a struct, null where the struct is null. Runs are decoded."""
    kind = struct.type[number].type
    if not pa.types.is_union(storage(kind)) and not pa.types.is_run_end_encoded(kind):
        return pc.struct_field(struct, number)
    values = unwrapped(struct.field(number))  # Unions and runs have no bitmap, and Arrow would add one.
    return pc.if_else(struct.is_valid(), values, pa.nulls(len(struct), values.type))


def as_comparable(column: Any, kind: pa.DataType) -> Any:
    """Return an array or chunked array as a type that `comparable` gives. Structs have the members of that type."""
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([as_comparable(chunk, kind) for chunk in column.chunks], kind)
    if pa.types.is_run_end_encoded(column.type) or pa.types.is_dictionary(column.type):
        column = plain(column)  # Arrow cannot cast runs, nor dictionaries of views.
    if not has_members(column.type):
        return (plain(column) if has_part(column.type, is_list_view) else column).cast(kind)
    struct = unwrapped(column)
    positions = {field.name: position for position, field in enumerate(struct.type)}
    members = [as_comparable(member(struct, positions[field.name]), field.type) for field in kind]
    return pa.StructArray.from_arrays(members, fields=list(kind), mask=struct.is_null())


def parts_of_tensors(tensors: pa.StructArray) -> tuple[Array, pa.Array, Array]:
    """Return the parts of tensors of `arrow.variable_shape_tensor`.

    Returns:
        The number of values of each, int64 [n]; the values of all, one after the other; and the shapes, int32 [n,
        dimensions], which are 0 for a null, and -1 where a dimension is null.
    """
    members = dict(zip([field.name for field in tensors.type], tensors.flatten(), strict=True))
    lengths, values = elements(members["data"])
    column = members["shape"]
    size, count = column.type.list_size, len(column)
    inner = column.values.slice(column.offset * size, count * size)
    shapes = stored(inner).reshape(count, size).copy()
    if inner.null_count:
        shapes[~valid(inner).reshape(count, size)] = -1
    if column.null_count:
        shapes[~valid(column)] = 0
    return lengths, unwrapped(values), shapes


def elements(array: pa.Array) -> tuple[Array, pa.Array]:
    """Return the lengths of lists or maps, int64 [n], and their elements one after the other. A null has length 0."""
    if pa.types.is_map(array.type):
        array = array.cast(pa.list_(array.type.field(0)))
    lengths = pc.list_value_length(array)
    return stored(pc.fill_null(lengths, 0) if lengths.null_count else lengths).astype(np.int64), array.flatten()

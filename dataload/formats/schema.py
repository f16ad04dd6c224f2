"""The memory layout of rows: the columns that batches can hold, and the record of one row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.errors import DataError
from dataload.runtime.cached_property import cached_property

RECORD_ALIGN = 8
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # other names are the same in numpy
MOST_VALUE_BYTES = 1 << 30  # numpy counts a record's bytes in 31 bits
SPAN = np.dtype((np.uint32, (2,)))
"""The position of a value of varying length in its column's heap: (first element, number of elements)."""


@dataclass(frozen=True)
class Field:
    """One column of a batch.

    Args:
        name: Name of the column, dotted for a member of a struct.
        kind: "dense" for one value or array of a fixed shape per row; "list" (of numbers), "binary" or "string" for
            values of varying length.
        dtype: Type of one element.
        shape: Shape of a dense value.
    """

    name: str
    kind: str
    dtype: npt.DTypeLike
    shape: tuple[int, ...] = ()

    @property
    def ragged(self) -> bool:
        """Whether the values vary in length."""
        return self.kind != "dense"


class Layout:
    """The layout of a record: columns sorted by element size, the largest first; equal sizes keep their order."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Structured numpy dtype with the columns' names, a multiple of 8 bytes. A ragged column is a `SPAN`."""
        formats = {field.name: SPAN if field.ragged else np.dtype((field.dtype, field.shape)) for field in self.fields}
        names = sorted(formats, key=lambda name: -formats[name].base.itemsize)
        ends = np.cumsum([formats[name].itemsize for name in names]).tolist()
        size = max(RECORD_ALIGN, -(-ends[-1] // RECORD_ALIGN) * RECORD_ALIGN)
        return np.dtype(
            {"names": names, "formats": [formats[name] for name in names], "offsets": [0, *ends[:-1]], "itemsize": size}
        )

    @cached_property
    def ragged(self) -> tuple[Field, ...]:
        """The columns whose values vary in length."""
        return tuple(field for field in self.fields if field.ragged)

    def offset(self, field: Field) -> int:
        """Return the byte offset of this column in a record."""
        fields = self.dtype.fields
        assert fields is not None
        return int(fields[field.name][1])

    def describe(self) -> list[Any]:
        """Return a JSON-able description for cache keys; different layouts have different ones."""
        return [[field.name, field.kind, np.dtype(field.dtype).str, field.shape] for field in self.fields]


def flatten(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the members of structs as dotted columns. Raise DataError if two have the same name."""
    fields = [leaf for field in schema for leaf in _leaves(field)]
    counts = Counter(field.name for field in fields)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise DataError(f"two columns come to be called {min(duplicates)!r}: rename one of them")
    return pa.schema(fields)


def fields_of(schema: pa.Schema) -> tuple[Field, ...]:
    """Return the columns of a flat schema. Raise DataError, naming the column, if batches cannot hold its type."""
    return tuple(_field(field) for field in schema)


def storage(kind: pa.DataType) -> pa.DataType:
    """Return the storage type of an extension type, the value type of a dictionary, or else the type itself."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are text."""
    return kind in {pa.string(), pa.large_string(), pa.string_view()}


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values are bytes or text."""
    is_binary = kind in {pa.binary(), pa.large_binary(), pa.binary_view()}
    return bool(is_binary or pa.types.is_fixed_size_binary(kind) or is_text(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether values are lists of varying length."""
    types = pa.types
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(types.is_list(kind) or types.is_large_list(kind) or views)


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
    if types.is_temporal(kind) and not types.is_interval(kind):
        return np.dtype(np.int64)
    return None


def _leaves(field: pa.Field) -> Iterable[pa.Field]:
    kind = storage(field.type)
    if not pa.types.is_struct(kind):
        return [field]
    return [leaf.with_name(f"{field.name}.{leaf.name}") for member in kind for leaf in _leaves(member)]


def _field(field: pa.Field) -> Field:
    kind = storage(field.type)
    shape: tuple[int, ...] = ()
    if is_bytes(kind):
        return Field(field.name, "string" if is_text(kind) else "binary", np.uint8)
    if is_list(kind):
        dtype = number(storage(kind.value_type))
        if dtype is not None:
            return Field(field.name, "list", dtype)
    while pa.types.is_fixed_size_list(kind):
        shape = (*shape, kind.list_size)
        kind = storage(kind.value_type)
    dtype = number(kind)
    if dtype is None:
        raise DataError(
            f"column {field.name!r} has type {field.type}, which batches cannot hold: leave it out with columns="
        )
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(shape) > MOST_VALUE_BYTES:
        raise DataError(f"column {field.name!r} has arrays of {shape} in its rows: leave it out with columns=")
    return Field(field.name, "dense", dtype, shape)

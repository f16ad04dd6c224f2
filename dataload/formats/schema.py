"""How a row is laid out in memory: the columns that batches can hold, and the record that one row of them makes."""

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
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # Arrow's names; it shares the others
MOST_VALUE_BYTES = 1 << 30  # numpy counts a record's bytes in 31 bits
SPAN = np.dtype((np.uint32, (2,)))
"""Where a value of varying length lies in its column's heap: (first element, number of elements)."""


@dataclass(frozen=True)
class Field:
    """One column of a batch.

    name: dotted, for a member of a struct. kind: "dense", one value or array of a fixed shape a row; or, of varying
    length, "list" of numbers, "binary" or "string". dtype: of one element; shape: of a dense value.
    """

    name: str
    kind: str
    dtype: npt.DTypeLike
    shape: tuple[int, ...] = ()

    @property
    def ragged(self) -> bool:
        return self.kind != "dense"


class Layout:
    """A record of some columns: those of the largest elements first, neighbours of one size as they were given.

    dtype: numpy's, structured, with the columns' names; of a multiple of 8 bytes. A ragged column is there as a `SPAN`.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        formats = {field.name: SPAN if field.ragged else np.dtype((field.dtype, field.shape)) for field in self.fields}
        names = sorted(formats, key=lambda name: -formats[name].base.itemsize)
        ends = np.cumsum([formats[name].itemsize for name in names]).tolist()
        size = max(RECORD_ALIGN, -(-ends[-1] // RECORD_ALIGN) * RECORD_ALIGN)
        return np.dtype(
            {"names": names, "formats": [formats[name] for name in names], "offsets": [0, *ends[:-1]], "itemsize": size}
        )

    @cached_property
    def ragged(self) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.ragged)

    def offset(self, field: Field) -> int:
        """Bytes of a record before this column."""
        known = self.dtype.fields
        assert known is not None
        return int(known[field.name][1])

    def describe(self) -> list[Any]:
        """What tells it from others, for keys."""
        return [[field.name, field.kind, np.dtype(field.dtype).str, field.shape] for field in self.fields]


def flatten(schema: pa.Schema) -> pa.Schema:
    """The schema with the members of structs as dotted columns. Raises DataError when two come to bear one name."""
    fields = [leaf for field in schema for leaf in _leaves(field)]
    times = Counter(field.name for field in fields)
    if twice := [name for name, count in times.items() if count > 1]:
        raise DataError(f"two columns come to be called {min(twice)!r}: rename one of them")
    return pa.schema(fields)


def fields_of(schema: pa.Schema) -> tuple[Field, ...]:
    """The columns of a flat schema. Raises DataError naming the first of a type that batches cannot hold."""
    return tuple(_field(field) for field in schema)


def storage(kind: pa.DataType) -> pa.DataType:
    """What values of this type are made of: extension types without their names, dictionaries as their values."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are bytes or text."""
    types = pa.types
    binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(binary or types.is_fixed_size_binary(kind) or is_text(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists of varying length."""
    types = pa.types
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(types.is_list(kind) or types.is_large_list(kind) or views)


def number(kind: pa.DataType) -> np.dtype[Any] | None:
    """The dtype that numbers of this type have in batches: decimals are float64, dates and times int64; else None."""
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

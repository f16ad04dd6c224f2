"""The memory layout of rows: the columns that batches can hold, and the record of one row."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.errors import DataError
from dataload.formats.arrow_arrays import member, unwrapped
from dataload.formats.arrow_types import (
    fixed_shape,
    has_members,
    is_bytes,
    is_list,
    is_text,
    list_elements,
    number,
    portable,
    storage,
    tensors_of_varying_shape,
    unit,
    unsupported,
    varying_shape,
)
from dataload.runtime.cached_property import cached_property

RECORD_ALIGN = 8  # bytes, of records that are so long that the padding costs little
SHORT_RECORD = 128  # bytes
MOST_VALUE_BYTES = 1 << 30  # numpy counts a record's bytes in 31 bits
SPAN = np.dtype((np.uint32, (2,)))
"""The position of a value of varying length in its column's heap: (first element, number of elements)."""
NULL = 2**32 - 1
"""The number of elements of a null."""
CODE = np.dtype(np.uint16)
"""The number of a value in its blob: of the span of a string or of bytes, or of a nested value. A blob has at most
65,536 rows."""


@dataclass(frozen=True)
class Field:
    """One column of a batch.

    Args:
        name: Name of the column, dotted for a member of a struct.
        kind: "dense" for one value or array of a fixed shape per row; "mask" for the rows of another column that have
            nulls; "list" (of numbers, or of arrays of one shape), "binary" or "string" for values of varying length;
            "nested" for all others, which become Python values; "error" for the texts of `ERRORS`.
        dtype: Type of one number.
        shape: Shape of a dense value, or of an element of a list. Of a nested value, (-1, …) if they are tensors with
            as many dimensions, whose shapes differ.
        type: Arrow type of a nested value.
        unit: Arrow type of a time, whose numbers depend on its unit; "" for other values.
    """

    name: str
    kind: str
    dtype: npt.DTypeLike
    shape: tuple[int, ...] = ()
    type: pa.DataType | None = None
    unit: str = ""

    @property
    def ragged(self) -> bool:
        """Whether the values vary in length."""
        return self.kind not in ("dense", "mask")

    @property
    def is_bytes(self) -> bool:
        """Whether the values are strings or bytes, which records refer to by their number in a table of spans."""
        return self.kind in ("string", "binary", "error")

    @property
    def element_bytes(self) -> int:
        """The bytes of a dense value, or of one element of a list."""
        return int(np.dtype((self.dtype, self.shape)).itemsize)

    @property
    def in_record(self) -> np.dtype[Any]:
        """The dtype of the column in a record."""
        if self.is_bytes or self.kind == "nested":
            return CODE
        return SPAN if self.ragged else np.dtype((self.dtype, self.shape))


ERRORS = pa.field("\0errors", pa.string())
"""The column of why `map` has no row, null where it has one. Batches do not have it."""


class Layout:
    """The layout of a record: columns sorted by element size, the largest first; equal sizes keep their order."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Structured numpy dtype with the columns' names.

        Its size is a multiple of the largest element, so that views of the columns are aligned. Records of 128 bytes
        and more are a multiple of 8 bytes, because `MmapArena` may need a common multiple of the size and of a page.
        """
        formats = {field.name: field.in_record for field in self.fields}
        names = sorted(formats, key=lambda name: -formats[name].base.itemsize)
        ends = np.cumsum([formats[name].itemsize for name in names]).tolist()
        align = formats[names[0]].base.itemsize if ends[-1] < SHORT_RECORD else RECORD_ALIGN
        size = max(align, -(-ends[-1] // align) * align)
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
        return [
            [field.name, field.kind, np.dtype(field.dtype).str, field.shape]
            + [str(field.type)] * (field.type is not None)
            + [field.unit] * bool(field.unit)
            for field in self.fields
        ]


def flatten(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the members of structs as dotted columns. Of columns with one name it has the first."""
    fields: dict[str, pa.Field] = {}
    for field in flat_fields(schema):
        fields.setdefault(field.name, field)
    return pa.schema(fields.values())


def flat_fields(schema: pa.Schema) -> list[pa.Field]:
    """Return all columns of a schema, the members of structs as dotted columns. Several may have one name."""
    return [leaf for field in schema for leaf in _leaves(field)]


def ambiguous(schema: pa.Schema) -> dict[str, str]:
    """Return a text for each name that several columns of the flat schema have."""
    counts = Counter(field.name for field in flat_fields(schema))
    return {name: f"{count} columns would be called {name!r}" for name, count in counts.items() if count > 1}


def flatten_table(table: pa.Table) -> pa.Table:
    """Return the table with the members of structs as dotted columns, see `flatten`."""
    while any(map(_has_columns, table.schema)):
        columns: list[tuple[pa.Field, pa.ChunkedArray]] = []
        for field, column in zip(table.schema, table.columns, strict=True):
            if _has_columns(field):
                chunks = unwrapped(column).chunks
                for number, inner in enumerate(chunks[0].type):
                    values = pa.chunked_array([member(chunk, number) for chunk in chunks])
                    columns.append((inner.with_name(f"{field.name}.{inner.name}").with_type(values.type), values))
            else:
                columns.append((field, column))
        schema = pa.schema([field.with_nullable(True) for field, _ in columns])
        table = pa.Table.from_arrays([column for _, column in columns], schema=schema)
    for number, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType) and varying_shape(field) is not None:
            table = table.set_column(number, field.name, unwrapped(table.column(number)))
    return table


def fields_of(schema: pa.Schema, *, null_masks: bool = False) -> tuple[Field, ...]:
    """Return the columns of a flat schema.

    Args:
        schema: The schema.
        null_masks: Add a column "<name>.is_null" for each column whose batches cannot represent a null.

    Raises:
        DataError: Batches cannot hold the type of a column, or a mask has the name of a column. It names the column.
    """
    fields = [_field(field) for field in schema]
    if null_masks:
        masks = [Field(mask_name(field), "mask", np.bool_) for field in fields if needs_mask(field)]
        if taken := {mask.name for mask in masks} & set(schema.names):
            raise DataError(f"null_masks=True adds a column {min(taken)!r}, which the dataset has: rename it")
        fields += masks
    return tuple(fields)


def structs_of(name: str) -> list[str]:
    """Return the names of the structs that hold a column."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def field_or_none(field: pa.Field) -> Field | None:
    """Return a column as batches hold it; None: no batch can."""
    try:
        return _field(field)
    except DataError:
        return None


def is_ragged(field: pa.Field) -> bool:
    """Return whether the values of a column vary in length. Of one that no batch can hold, the size does not matter."""
    own = field_or_none(field)
    return own is None or own.ragged


def holds_nulls(field: pa.Field) -> bool:
    """Return whether batches can represent each null of a column, or its nulls cannot be told from empty lists."""
    own = field_or_none(field)
    return own is None or own.ragged or not needs_mask(own) or is_list(storage(field.type))


def hides_nulls(field: pa.Field) -> bool:
    """Return whether the lists of a column may have nulls inside that batches cannot represent."""
    own = field_or_none(field)
    if own is None or own.kind != "list" or own.shape or not needs_mask(own):
        return False
    return is_list(field.type) and bool(field.type.field(0).nullable)


def mask_name(field: Field) -> str:
    """Return the name of the column that tells which rows of a column have nulls."""
    return f"{field.name}.is_null"


def needs_mask(field: Field) -> bool:
    """Return whether batches cannot represent a null of this column: integers, booleans and times have none."""
    return field.kind in ("dense", "list") and np.dtype(field.dtype).kind != "f"


def _has_columns(field: pa.Field) -> bool:
    """Return whether the members of a struct are columns."""
    return has_members(field.type) and varying_shape(field) is None


def _leaves(field: pa.Field) -> Iterable[pa.Field]:
    if (tensors := varying_shape(field)) is not None:
        dimensions, element = tensors
        return [tensors_of_varying_shape(field.name, element, dimensions)]
    if not _has_columns(field):
        return [field]
    members = storage(field.type)
    return [leaf.with_name(f"{field.name}.{leaf.name}") for member in members for leaf in _leaves(member)]


def _field(field: pa.Field) -> Field:
    if field.name == ERRORS.name:
        return Field(field.name, "error", np.uint8)
    kind = storage(field.type)
    if (tensors := varying_shape(field)) is not None:
        dimensions, element = tensors
        return Field(field.name, "nested", _checked(field, number(element), ()), (-1,) * dimensions, portable(kind))
    shape, element = fixed_shape(field)
    dtype = number(element)
    is_uuid = isinstance(field.type, pa.BaseExtensionType) and field.type.extension_name == "arrow.uuid"
    if is_bytes(kind) and not is_uuid:
        return Field(field.name, "string" if is_text(kind) else "binary", np.uint8)
    if is_list(kind) and not shape and (elements := list_elements(kind)) is not None:
        inner, of_list = elements
        return Field(field.name, "list", _checked(field, number(of_list), inner), inner, unit=unit(of_list))
    if dtype is None or is_uuid:
        if reason := unsupported(kind):
            raise DataError(f"column {field.name!r} has type {field.type} with {reason}: leave it out with columns=")
        return Field(field.name, "nested", np.uint8, type=portable(field.type))
    return Field(field.name, "dense", _checked(field, dtype, shape), shape, unit=unit(element))


def _checked(field: pa.Field, dtype: np.dtype[Any] | None, shape: tuple[int, ...]) -> np.dtype[Any]:
    """Return the dtype of arrays of a shape. Raise DataError if no record can hold one."""
    assert dtype is not None
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(shape) > MOST_VALUE_BYTES:
        raise DataError(f"column {field.name!r} has arrays of {shape} in its rows: leave it out with columns=")
    return dtype

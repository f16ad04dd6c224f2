"""The column chunks of a Parquet file, read from the Thrift of its footer.

pyarrow tells them too, but a chunk that is encrypted, or whose statistics don't fit its column, makes it abort the
process: its C++ raises where Python can't catch. So nothing here asks pyarrow for a chunk.

Notes: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md define what is read here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import pyarrow.parquet as pq

BYTE, I32, I64, BINARY, LIST, STRUCT = 3, 5, 6, 8, 9, 12  # types
BOOLEANS, INTEGERS, LISTS = {1, 2}, {4, I32, I64}, {LIST, 10}
FIXED_BYTES = {1: 0, 2: 0, BYTE: 1, 7: 8}  # A boolean's type is its value.
PHYSICAL_TYPES = ["BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"]
WIDTHS = [1, 4, 8, 12, 4, 8, 0]  # in bytes, of values of these types
BYTE_ARRAY, FIXED_LENGTH = 6, 7
DELTA_BINARY_PACKED, DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY = 5, 6, 7  # encodings

Wanted: TypeAlias = Mapping[int, tuple[int, Any]]
"""The fields of a struct that are read, by number: the type of each, and what is read of its parts."""

NOTHING: tuple[int, Wanted] = 0, {}
BOUNDS = (1, 2, 5, 6)  # fields of Statistics
TEXT_BYTES, REPETITION_LEVELS, DEFINITION_LEVELS = 1, 2, 3  # fields of SizeStatistics
LEVELS: tuple[int, Any] = LIST, (I64, {})
CHUNKS: Wanted = {
    2: (LIST, (I32, {})),
    **dict.fromkeys((5, 6, 7, 9, 11), (I64, {})),
    12: (STRUCT, {3: (I64, {})}),
}
ALL_STATISTICS: Wanted = {
    1: (I32, {}),
    12: (STRUCT, dict.fromkeys(BOUNDS, (BINARY, {}))),
    16: (STRUCT, {TEXT_BYTES: (I64, {}), REPETITION_LEVELS: LEVELS, DEFINITION_LEVELS: LEVELS}),
}


class Chunk(NamedTuple):
    """A column chunk: the values of a leaf column in a row group.

    Attributes:
        is_encrypted: Whether it is encrypted. The others may be unknown then.
        encodings: The numbers of its encodings.
        num_values: Values, nulls and empty lists included.
        total_uncompressed_size: Bytes of its pages before compression.
        total_compressed_size: Bytes in the file.
        data_page_offset: Where its first data page begins in the file.
        dictionary_page_offset: Where its dictionary begins; None: it has none, or its writer doesn't say.
        null_count: Nulls; None: unknown.
    """

    is_encrypted: bool
    encodings: Collection[int]
    num_values: int
    total_uncompressed_size: int
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int | None
    null_count: int | None

    @property
    def has_dictionary_page(self) -> bool:
        return self.dictionary_page_offset is not None


def row_groups_of(footer: bytes) -> list[list[Chunk]]:
    """Return the chunks of each row group of a file, by leaf column.

    Raises:
        ValueError: The bytes are no footer.
        IndexError: They are cut short.
    """
    return [[_chunk(fields) for fields in group] for group in _column_chunks(footer, CHUNKS)]


def _chunk(fields: Mapping[int, Any]) -> Chunk:
    get = fields.get(3, {}).get
    nulls = get(12, {}).get(3)
    return Chunk(8 in fields, get(2, ()), get(5, 0), get(6, 0), get(7, 0), get(9, 0), get(11), nulls)


def has_sound_statistics(footer: bytes, schema: pq.ParquetSchema) -> bool:
    """Return whether the statistics of all chunks fit their columns, so that Arrow can read them."""
    columns = [schema.column(leaf) for leaf in range(len(schema))]
    groups = _column_chunks(footer, ALL_STATISTICS)
    return all(
        _fits(chunk.get(3, {}), column) for group in groups for chunk, column in zip(group, columns, strict=True)
    )


def _fits(metadata: Mapping[int, Any], column: pq.ColumnSchema) -> bool:
    kind, bounds, sizes = PHYSICAL_TYPES.index(column.physical_type), metadata.get(12, {}), metadata.get(16, {})
    width = column.length if kind == FIXED_LENGTH else WIDTHS[kind]
    levels = (REPETITION_LEVELS, column.max_repetition_level), (DEFINITION_LEVELS, column.max_definition_level)
    return (
        metadata.get(1) == kind
        and all(bounds.get(bound, width) >= width for bound in BOUNDS)
        and all(len(sizes.get(which) or range(most + 1)) == most + 1 for which, most in levels)
        and (TEXT_BYTES not in sizes or kind == BYTE_ARRAY)
    )


def _column_chunks(footer: bytes, metadata: Wanted) -> list[list[dict[int, Any]]]:
    """Return the fields of each column chunk of each row group. metadata: those of its metadata that are read."""
    chunk = {3: (STRUCT, metadata), 8: (STRUCT, {})}
    fields, _ = _struct(footer, 0, {4: (LIST, (STRUCT, {1: (LIST, (STRUCT, chunk))}))})
    return [group.get(1, []) for group in fields.get(4, [])]


def _struct(data: bytes, at: int, wanted: Wanted) -> tuple[dict[int, Any], int]:
    """Return the wanted fields of a struct by number, and where it ends. The value of bytes is their size."""
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            number, at = _varint(data, at)
            number = _signed(number) & 0xFFFF  # Arrow's numbers have 16 bits.
        kind = head & 15
        form, parts = wanted.get(number, NOTHING)
        if kind != form:  # A field of another type is none for Thrift's readers too.
            at = _skip(data, at, kind)
        elif kind in INTEGERS:
            value = data[at]
            at += 1
            if value > 127:
                value, at = _varint(data, at - 1)
            found[number] = (value >> 1) ^ -(value & 1)
        elif number in found:
            raise ValueError(f"a struct with two fields {number}")
        elif kind == STRUCT:
            found[number], at = _struct(data, at, parts)
        elif kind == LIST:
            found[number], at = _list(data, at, *parts)
        else:
            size, at = _varint(data, at)
            found[number], at = size, at + size
    return found, at + 1


def _list(data: bytes, at: int, kind: int, parts: Wanted) -> tuple[list[Any], int]:
    """Return the integers or structs of a list, and where it ends."""
    size, element, at = _list_head(data, at)
    if size and element != kind:
        raise ValueError(f"a list of Thrift's type {element}")
    values: list[Any] = []
    for _ in range(size):
        value: Any
        value, at = _struct(data, at, parts) if kind == STRUCT else _varint(data, at)
        values.append(value if kind == STRUCT else _signed(value))
    return values, at


def _skip(data: bytes, at: int, kind: int) -> int:
    """Return where a value ends."""
    if kind in INTEGERS:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind == STRUCT:
        while head := data[at]:
            at += 1
            if head < 16:
                at = _skip(data, at, I32)
            at = _skip(data, at, head & 15)
        return at + 1
    if kind in LISTS:
        size, element, at = _list_head(data, at)
        for _ in range(size):
            at = _skip(data, at, BYTE if element in BOOLEANS else element)
        return at
    if kind in FIXED_BYTES:
        return at + FIXED_BYTES[kind]
    raise ValueError(f"a field of Thrift's type {kind}")  # No part of a footer has a map.


def _list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the size of a list, the type of its elements, and where they begin."""
    head = data[at]
    size, at = (head >> 4, at + 1) if head < 0xF0 else _varint(data, at + 1)
    return size, head & 15, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) > 127:
        value |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 1


def _signed(value: int) -> int:
    return (value >> 1) ^ -(value & 1)

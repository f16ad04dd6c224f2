"""The column chunks of a Parquet file, read from the Thrift of its footer.

pyarrow tells them too, but a chunk that is encrypted, or whose statistics don't fit its column, makes it abort the
process: its C++ raises where Python can't catch. So nothing here asks pyarrow for a chunk.

A regular expression recognises chunks as writers write them, in about a microsecond. Others are read field by field.

Notes: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md define what is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice, takewhile
from operator import attrgetter
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

DAMAGE = ValueError, IndexError, RecursionError
"""What the functions of this module raise for damaged bytes."""

Wanted: TypeAlias = Mapping[int, tuple[int, Any]]
"""The fields of a struct that are read, by number: the type of each, and what is read of its parts."""

Found: TypeAlias = re.Match[bytes] | dict[str, Any]

NOTHING: tuple[int, Wanted] = 0, {}
BOUNDS = (1, 2, 5, 6)  # fields of Statistics
TEXT_BYTES, REPETITION_LEVELS, DEFINITION_LEVELS = 1, 2, 3  # fields of SizeStatistics
LEVELS: tuple[int, Any] = LIST, (I64, {})
STRUCTS: tuple[int, Any] = LIST, (STRUCT, {})
TEXTS: tuple[int, Any] = LIST, (BINARY, {})
REPETITION, NAME, CHILDREN, FIELD_ID = 3, 4, 5, 9  # fields of SchemaElement
REPEATED = 2
METADATA, CRYPTO_METADATA, STATISTICS, NULL_COUNT = 3, 8, 12, 3
WITH_COLUMN_KEY = 2  # field of ColumnCryptoMetaData
COLUMNS, WHOLE, ROWS, SORTING, TOTAL_STORED = 1, 2, 3, 4, 6  # fields of RowGroup
SCHEMA, ROW_GROUPS, KEY_VALUES, ORDERS = 2, 4, 5, 7  # fields of FileMetaData
REQUIRED = {COLUMNS, WHOLE, ROWS}
PATH, CHUNK_KEY_VALUES, ENCODING_STATISTICS, SIZE_STATISTICS = 3, 8, 13, 16  # fields of ColumnMetaData
FIELDS = {"codes": 2, "values": 5, "whole": 6, "stored": 7, "data": 9, "dictionary": 11}  # of ColumnMetaData
# Lists are wanted for their element's type alone: Arrow reads the type that it expects, whatever a list says.
CHUNK: Wanted = {
    METADATA: (
        STRUCT,
        {
            **dict.fromkeys(FIELDS.values(), (I64, {})),
            FIELDS["codes"]: (LIST, (I32, {})),
            PATH: TEXTS,
            CHUNK_KEY_VALUES: STRUCTS,
            ENCODING_STATISTICS: STRUCTS,
            STATISTICS: (STRUCT, {NULL_COUNT: (I64, {})}),
        },
    ),
    CRYPTO_METADATA: (STRUCT, {WITH_COLUMN_KEY: (STRUCT, {1: TEXTS})}),
}
ALL_STATISTICS: Wanted = {
    METADATA: (
        STRUCT,
        {
            1: (I32, {}),
            STATISTICS: (STRUCT, dict.fromkeys(BOUNDS, (BINARY, {}))),
            SIZE_STATISTICS: (STRUCT, {TEXT_BYTES: (I64, {}), REPETITION_LEVELS: LEVELS, DEFINITION_LEVELS: LEVELS}),
        },
    )
}
GROUP: Wanted = {
    COLUMNS: (LIST, (STRUCT, CHUNK)),
    SORTING: STRUCTS,
    **dict.fromkeys((WHOLE, ROWS, TOTAL_STORED), (I64, {})),
}
# The heads of the first fields of a footer, whose numbers follow each other
VERSION_HEAD, SCHEMA_HEAD, ROWS_HEAD, ROW_GROUPS_HEAD = (0x10 | kind for kind in (I32, LIST, I64, LIST))
SCHEMAS_KEPT = 8
NO_ROWS = bytes([0x10 | I64, 0, 0x10 | LIST, STRUCT])
LEVEL_COUNTS: Wanted = {METADATA: (STRUCT, {SIZE_STATISTICS: (STRUCT, {DEFINITION_LEVELS: LEVELS})})}
PAGE_INDEX: Wanted = {4: (I64, {}), 5: (I32, {})}  # where the OffsetIndex is, and its size
OFFSET_INDEX: Wanted = {1: (LIST, (STRUCT, {1: (I64, {}), 2: (I32, {}), 3: (I64, {})}))}
MOST_TEXT = 64  # bytes of a text in a usual chunk: a name, or a bound
MOST_FIELDS = 255  # of a usual struct: their numbers, of 16 bits, cannot begin again
MOST_NUMBER = 10  # bytes of a number
FIELD_NUMBERS = 0xFFFF  # Arrow's numbers of fields have 16 bits.


class Chunk:
    """A column chunk: the values of a leaf column in a row group. Of an encrypted one, nothing is known.

    Args:
        found: Its fields in Thrift, by their names in `FIELDS`. Each is decoded when it is asked for.
    """

    __slots__ = ("_found",)

    def __init__(self, found: Found) -> None:
        self._found = found

    @property
    def encodings(self) -> list[int]:
        """The numbers of its encodings."""
        codes = self._found["codes"]
        return [_integer(code) for code in (codes if isinstance(codes, list) else _list(codes, 0, I32, {})[0])]

    @property
    def num_values(self) -> int:
        """Values, nulls and empty lists included."""
        return _integer(self._found["values"])

    @property
    def total_uncompressed_size(self) -> int:
        """Bytes of its pages before compression."""
        return _integer(self._found["whole"])

    @property
    def total_compressed_size(self) -> int:
        """Bytes in the file."""
        return _integer(self._found["stored"])

    @property
    def data_page_offset(self) -> int:
        """Where its first data page begins in the file."""
        return _integer(self._found["data"])

    @property
    def dictionary_page_offset(self) -> int | None:
        """Where its dictionary begins; None: it has none, or its writer doesn't say."""
        found = self._found["dictionary"]
        return None if found is None else _integer(found)

    @property
    def page_index(self) -> tuple[int, int] | None:
        """The bytes of the file that tell where its pages are; None: its writer did not tell."""
        fields = self._fields(PAGE_INDEX)
        if fields.keys() != PAGE_INDEX.keys():
            return None
        start, size = (_integer(fields[number]) for number in PAGE_INDEX)
        return start, start + size

    @property
    def definition_levels(self) -> list[int]:
        """How many values have each definition level; nothing if its writer did not tell."""
        sizes = self._fields(LEVEL_COUNTS).get(METADATA, {}).get(SIZE_STATISTICS, {})
        return list(map(_integer, sizes.get(DEFINITION_LEVELS, ())))

    def has_sound_statistics(self, column: pq.ColumnSchema) -> bool:
        """Return whether its statistics fit its column, so that Arrow can read them."""
        return _fits(self._fields(ALL_STATISTICS).get(METADATA, {}), column)

    def _fields(self, wanted: Wanted) -> dict[int, Any]:
        found = self._found
        data, at = found["place"] if isinstance(found, dict) else (found.string, found.start())
        return _struct(data, at, wanted)[0]


class Chunks:
    """The chunks of a row group, by leaf column.

    Attributes:
        rows: Rows of the row group.
        whole_bytes: Their bytes before compression.
        stored_bytes: Their bytes in the file.
        encrypted: The leaf columns whose chunks are encrypted.

    Raises:
        ValueError: The row group lacks a field that it must have.
    """

    def __init__(self, group: Mapping[int, Any]) -> None:
        if not group.keys() >= REQUIRED:
            raise ValueError("a row group without columns, bytes or rows")
        self._found: list[Found] = group[COLUMNS]
        self._rows = group[ROWS]
        self.rows, self.whole_bytes = _integer(group[ROWS]), _integer(group[WHOLE])
        self.encrypted = {leaf for leaf, found in enumerate(self._found) if type(found) is dict and found["encrypted"]}
        self.stored_bytes = _integer(group.get(TOTAL_STORED, b"\0"))  # Old writers don't tell.
        if not self.stored_bytes:
            self.stored_bytes = sum(_integer(found["stored"]) for found in self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, leaf: int) -> Chunk:
        return Chunk(self._found[leaf])

    def misfit(self, flat: Sequence[bool]) -> int | None:
        """Return the first leaf column whose number of values is not that of the rows; None: all are.

        Args:
            flat: By leaf column, whether it has one value in each row. Others have at least one.
        """
        other = [leaf for leaf, found in enumerate(self._found) if found["values"] != self._rows]
        for leaf in other:
            values = _integer(self._found[leaf]["values"])
            if leaf not in self.encrypted and (values < self.rows or (flat[leaf] and values > self.rows)):
                return leaf
        return None

    def null_count(self, leaf: int) -> int | None:
        """Return the nulls of a chunk; None: unknown."""
        count = self._found[leaf]["nulls"]
        return None if count is None else _integer(count)


class Element(NamedTuple):
    """A node of a file's schema: a column, or a group of them.

    Attributes:
        name: Where its name is in the footer: the length of the name, and the name.
        text: Its name.
        children: How many nodes it has below it.
        repeated: Whether it may come several times.
        field_id: The number by which tables know it, if the writer gave it one.
    """

    name: slice
    text: str
    children: int
    repeated: bool
    field_id: int | None


def schema_of(footer: bytes) -> tuple[list[Element], int]:
    """Return the nodes of a file's schema, each before those below it, and the place where the schema ends.

    Raises:
        ValueError: The bytes are no footer.
        IndexError: They are cut short.
        RecursionError: They have structs or lists in more levels than any footer.
    """
    at, number, elements = 0, 0, list[Element]()
    while head := footer[at]:
        number, at = _field_number(footer, at + 1, head, number)
        if number == SCHEMA and head & 15 == LIST:
            size, kind, at = _list_head(footer, at)
            for _ in range(size if kind == STRUCT else 0):
                element, at = _element(footer, at)
                elements.append(element)
            return elements, at
        at = _skip(footer, at, head & 15)
    raise ValueError("a footer without a schema")


def _element(data: bytes, at: int) -> tuple[Element, int]:
    number, found, name, text = 0, dict[int, int](), slice(0, 0), b""
    while head := data[at]:
        number, at = _field_number(data, at + 1, head, number)
        start, at = at, _skip(data, at, head & 15)
        if number == NAME and head & 15 == BINARY:
            name, text = slice(start, at), data[_varint(data, start)[1] : at]
        elif head & 15 == I32:
            found[number] = _integer(data[start:at])
    repeated = found.get(REPETITION) == REPEATED
    return Element(name, text.decode(), found.get(CHILDREN, 0), repeated, found.get(FIELD_ID)), at + 1


def text_of(name: str) -> bytes:
    """Return a name as Thrift has it: its length in bytes, and the bytes."""
    data, size = name.encode(), bytearray()
    left = len(data)
    while left > 127:
        size.append(left & 127 | 128)
        left >>= 7
    return bytes([*size, left]) + data


def row_groups_of(footer: bytes) -> tuple[list[Chunks], bytes]:
    """Return the chunks of each row group of a file, and its footer without row groups: that of a file without rows.

    Raises:
        ValueError: The bytes are no footer.
        IndexError: They are cut short.
        RecursionError: They have structs or lists in more levels than any footer.
    """
    if (beginning := _beginning(footer)) is None:
        fields, _ = _struct(footer, 0, {ROW_GROUPS: (LIST, (STRUCT, GROUP))})
        return list(map(Chunks, fields.get(ROW_GROUPS, []))), footer
    schema, start = beginning
    groups, end = _list(footer, start, STRUCT, GROUP)
    return list(map(Chunks, groups)), footer[:schema] + NO_ROWS + footer[end:]


def check_fields(footer: bytes) -> None:
    """Raise one of `DAMAGE` for what follows the row groups of a footer, unless it is the rest of a footer."""
    _struct(footer, 0, dict.fromkeys((SCHEMA, ROW_GROUPS, KEY_VALUES, ORDERS), STRUCTS))


def _beginning(footer: bytes) -> tuple[int, int] | None:
    """Return where a footer's schema ends and its row groups begin; None: its fields are in an unusual order."""
    schema = next((len(known) for known in _schemas if footer.startswith(known)), 0)
    if not schema:
        if footer[0] != VERSION_HEAD or footer[at := _skip(footer, 1, I32)] != SCHEMA_HEAD:
            return None
        schema = _skip(footer, at + 1, LIST)
        _schemas[:] = [footer[:schema], *_schemas[: SCHEMAS_KEPT - 1]]
    if footer[schema] != ROWS_HEAD or footer[at := _skip(footer, schema + 1, I64)] != ROW_GROUPS_HEAD:
        return None
    return schema, at + 1


_schemas: list[bytes] = []  # the latest footers up to the end of their schema, which most files of a dataset share


class Page(NamedTuple):
    """A page of a column chunk.

    Attributes:
        offset: Where it begins in the file.
        size: Its bytes, with its header.
        first_row: Its first row in the row group.
    """

    offset: int
    size: int
    first_row: int


def pages_of(index: bytes) -> list[Page]:
    """Return the pages of a column chunk but for its dictionary, given the bytes of its `page_index`.

    Raises:
        ValueError, LookupError, RecursionError: They are damaged.
    """
    fields, _ = _struct(index, 0, OFFSET_INDEX)
    return [Page(*(_integer(page[number]) for number in (1, 2, 3))) for page in fields[1]]


def _fits(metadata: Mapping[int, Any], column: pq.ColumnSchema) -> bool:
    kind, bounds = PHYSICAL_TYPES.index(column.physical_type), metadata.get(STATISTICS, {})
    sizes = metadata.get(SIZE_STATISTICS, {})
    width = column.length if kind == FIXED_LENGTH else WIDTHS[kind]
    levels = (REPETITION_LEVELS, column.max_repetition_level), (DEFINITION_LEVELS, column.max_definition_level)
    return (
        1 in metadata
        and _integer(metadata[1]) == kind
        and all(bounds.get(bound, width) >= width for bound in BOUNDS)
        and all(len(sizes.get(which) or range(most + 1)) == most + 1 for which, most in levels)
        and (TEXT_BYTES not in sizes or kind == BYTE_ARRAY)
    )


@cache
def _usual_chunk() -> re.Pattern[bytes]:
    """Return what matches a chunk as writers write it, or one byte of another one.

    The head of a field tells how far its number is from that of the field before it, and its type. So the head of one
    that follows an optional field depends on whether that is there. Numbers grow, so what follows the last field that
    is read may be anything.
    """
    number = _heads(INTEGERS) + NUMBER
    numbers = b"(?:%b){,%d}+\x00" % (number, MOST_FIELDS)
    levels, structs = _items(I64, NUMBER, range(8)), _items(STRUCT, numbers, range(1, 8))
    sizes = b"(?:%b|%b%b){,%d}+\x00" % (number, _heads({LIST}), levels, MOST_FIELDS)
    part = {b"n": NUMBER, b"t": _TEXT, b"numbers": numbers, b"levels": levels, b"structs": structs}
    part[b"codes"], part[b"path"] = _items(I32, NUMBER, range(8)), _items(BINARY, _TEXT, range(1, 6))
    # What Arrow writes comes first: it is faster to match than any fields.
    part[b"bounds"] = rb"\x28%(t)b\x18%(t)b(?:[\x11\x12]{2})?\x00" % part
    part[b"bounds"] += b"|(?:%b|%b|%b%b){,%d}+\x00" % (
        number,
        _heads(BOOLEANS),
        _heads({BINARY}),
        _TEXT,
        MOST_FIELDS,
    )
    part[b"rest"] = rb"\x19%(structs)b(?:\x3c(?:\x16%(n)b\x19|\x29)%(levels)b\x19%(levels)b\x00)?\x00" % part
    part[b"rest"] += b"|(?:%b|%b%b|%b%b){,%d}+\x00" % (
        number,
        _heads({LIST}),
        structs,
        _heads({STRUCT}),
        sizes,
        MOST_FIELDS,
    )
    return re.compile(
        rb"\x26%(n)b\x1c"  # an offset, and the metadata
        rb"\x15%(n)b\x19(?P<codes>%(codes)b)\x19%(path)b\x15%(n)b"  # type, encodings, path, and codec
        rb"\x16(?P<values>%(n)b)\x16(?P<whole>%(n)b)\x16(?P<stored>%(n)b)"
        rb"\x26(?P<data>%(n)b)(?:\x26(?P<dictionary>%(n)b))?"
        rb"(?P<statistics>(?(dictionary)\x1c|\x3c)"
        rb"(?:(?:\x18%(t)b\x18%(t)b\x16|\x36)(?P<nulls>%(n)b)|(?![\x10-\x3f]))(?:%(bounds)b))?"
        rb"(?(statistics)|(?(dictionary)(?![\x10-\x1f])|(?![\x10-\x3f])))"  # no field before or at the statistics
        rb"(?:%(rest)b)(?:\x00|%(numbers)b)|." % part,  # and where the indexes of pages are
        re.DOTALL,
    )


def _items(kind: int, item: bytes, sizes: Iterable[int]) -> bytes:
    """Return the expression of a list of items. The sizes are below 15."""
    lists = (_byte(size << 4 | kind) + b"(?:%b){%d}" % (item, size) for size in sizes)
    return b"(?:%b)" % b"|".join(lists)


def _heads(kinds: Iterable[int]) -> bytes:
    return b"[%b]" % b"".join(_byte(step << 4 | kind) for step in range(1, 16) for kind in kinds)


def _byte(value: int) -> bytes:
    return rb"\x%02x" % value


NUMBER = rb"[\x80-\xff]{,%d}+[\x00-\x7f]" % (MOST_NUMBER - 1)  # All its bytes but the last have the highest bit.
_TEXT = b"(?:%b)" % b"|".join(_byte(size) + b".{%d}" % size for size in range(MOST_TEXT))


def _chunks(data: bytes, at: int, size: int) -> tuple[list[Found], int]:
    """Return the chunks of a row group, and where they end."""
    chunks: list[Found] = []
    while True:
        usual = takewhile(attrgetter("lastindex"), _usual_chunk().finditer(data, at))
        if found := list(islice(usual, size - len(chunks))):
            at = found[-1].end()
        chunks += found
        if len(chunks) == size:
            return chunks, at
        place = data, at
        fields, at = _struct(data, at, CHUNK)
        chunks.append({**_named(fields), "place": place})


def _named(fields: Mapping[int, Any]) -> dict[str, Any]:
    metadata = fields.get(METADATA, {})
    found = {name: metadata.get(number, b"\0") for name, number in FIELDS.items()}
    found |= {"codes": metadata.get(FIELDS["codes"], []), "dictionary": metadata.get(FIELDS["dictionary"])}
    return {**found, "nulls": metadata.get(STATISTICS, {}).get(NULL_COUNT), "encrypted": CRYPTO_METADATA in fields}


def _struct(data: bytes, at: int, wanted: Wanted) -> tuple[dict[int, Any], int]:
    """Return the wanted fields of a struct by number, and where it ends.

    The value of a number are its bytes, and that of bytes is their size.
    """
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        number, at = _field_number(data, at + 1, head, number)
        kind = head & 15
        form, parts = wanted.get(number, NOTHING)
        if kind != form:  # A field of another type is none for Thrift's readers too.
            at = _skip(data, at, kind)
        elif kind in INTEGERS:
            start, at = at, _skip(data, at, kind)
            found[number] = data[start:at]
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
    if parts is CHUNK:
        return _chunks(data, at, size)
    if not parts and kind not in INTEGERS:
        return [], _skip_items(data, at, size, kind)
    values: list[Any] = []
    for _ in range(size):
        start = at
        if kind == STRUCT:
            value, at = _struct(data, at, parts)
            values.append(value)
        else:
            at = _skip(data, at, kind)
            values.append(data[start:at])
    return values, at


def _skip(data: bytes, at: int, kind: int) -> int:
    """Return where a value ends."""
    if kind in INTEGERS:
        end = at
        while data[end] > 127:
            end += 1
        if end - at >= MOST_NUMBER:
            raise ValueError(f"a number of {end + 1 - at} bytes")
        return end + 1
    if kind == BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind == STRUCT:
        while head := data[at]:
            at = _skip(data, at + 1, I32) if head < 16 else at + 1
            at = _skip(data, at, head & 15)
        return at + 1
    if kind in LISTS:
        size, element, at = _list_head(data, at)
        return _skip_items(data, at, size, BYTE if element in BOOLEANS else element)
    if kind in FIXED_BYTES:
        return at + FIXED_BYTES[kind]
    raise ValueError(f"a field of Thrift's type {kind}")  # No part of a footer has a map.


def _skip_items(data: bytes, at: int, size: int, kind: int) -> int:
    """Return where the items of a list end."""
    if kind in FIXED_BYTES:  # A list that says it has 2**60 of them ends at once.
        return at + size * FIXED_BYTES[kind]
    for _ in range(size):
        at = _skip(data, at, kind)
    return at


def _field_number(data: bytes, at: int, head: int, before: int) -> tuple[int, int]:
    """Return the number of a field, and where its value begins. before: the number of the field before it."""
    if head > 15:
        return (before + (head >> 4)) & FIELD_NUMBERS, at
    end = _skip(data, at, I32)
    return _integer(data[at:end]) & FIELD_NUMBERS, end


def _list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the size of a list, the type of its elements, and where they begin."""
    head = data[at]
    size, at = (head >> 4, at + 1) if head < 0xF0 else _varint(data, at + 1)
    return size, head & 15, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a size, and where it ends."""
    value, end = 0, _skip(data, at, I32)
    for byte in reversed(data[at:end]):
        value = value << 7 | byte & 127
    return value, end


def _integer(data: bytes) -> int:
    """Return the signed integer in these bytes."""
    if len(data) == 1:
        return _OF_ONE_BYTE[data[0]]
    value, _ = _varint(data, 0)
    return (value >> 1) ^ -(value & 1)


_OF_ONE_BYTE = [(value >> 1) ^ -(value & 1) for value in range(128)]

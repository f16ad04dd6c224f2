"""The messages of Arrow IPC: their metadata, read from flatbuffers, and the index of a file's messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from flatbuffers import number_types
from flatbuffers.table import Table

from dataload.cache.blocks.reader import Blocks, Object
from dataload.errors import DamagedError
from dataload.formats.base import SHARED_BYTES, as_data_error
from dataload.runtime.cached_property import cached_property

MAGIC, FEATHER_1 = b"ARROW1", b"FEA1"
CONTINUATION = b"\xff\xff\xff\xff"
PREFIX_BYTES = 8  # of a message, before its metadata: continuation, length (i32, little-endian)
OLD_PREFIX_BYTES = 4  # before Arrow 0.15: without the continuation
GUESSED_BYTES = 16 << 10  # read of a message whose metadata length is unknown
END_OF_STREAM = CONTINUATION + bytes(4)
HEAD_BYTES = 8  # of a file, before its first message: magic, padding
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3  # of Message.fbs: MessageHeader
DAMAGE = ValueError, LookupError, TypeError, OverflowError, struct.error  # what damaged flatbuffers raise
MOST_OLD_SCHEMA = 16 << 20  # bytes of a stream's schema, before Arrow 0.15
V4, V5 = 3, 4  # of Schema.fbs: MetadataVersion


@dataclass(frozen=True)
class Message:
    """One message of a file: its prefix and metadata in [start, body), then its body in [body, stop).

    Args:
        start: Byte of the file at which the message begins.
        metadata: The prefix and the metadata.
    """

    start: int
    metadata: memoryview

    @property
    def body(self) -> int:
        """Byte of the file at which the body begins."""
        return self.start + len(self.metadata)

    @property
    def stop(self) -> int:
        """Byte of the file at which the body ends."""
        return self.body + int(_scalar(self._root, 3, number_types.Int64Flags))

    @property
    def prefix(self) -> int:
        """Number of bytes before the metadata's flatbuffer."""
        return PREFIX_BYTES if self.metadata[:4] == CONTINUATION else OLD_PREFIX_BYTES

    @property
    def kind(self) -> int:
        """The type of the header, such as `DICTIONARY` or `RECORDS`."""
        return int(_scalar(self._root, 1, number_types.Uint8Flags))

    @property
    def version(self) -> int:
        """The version of the metadata."""
        return int(_scalar(self._root, 0, number_types.Int16Flags))

    @property
    def rows(self) -> int:
        """Rows of a record batch."""
        return int(_scalar(self._batch, 0, number_types.Int64Flags))

    @property
    def null_counts(self) -> list[int]:
        """Nulls of each node of a record batch: of its columns, each before its members."""
        return [nulls for _, nulls in _structs(self._batch, 1, "<qq")]

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """(offset in the body, bytes) of each buffer of a record batch."""
        return _structs(self._batch, 2, "<qq")

    @property
    def is_compressed(self) -> bool:
        """Whether a record batch or dictionary has compressed buffers."""
        return _position(self._batch, 3) is not None

    @property
    def views(self) -> tuple[int, ...]:
        """Number of character buffers of each view column."""
        return tuple(count for (count,) in _structs(self._batch, 4, "<q"))

    @cached_property
    def dictionary(self) -> int:
        """The id of a dictionary, as the schema has it."""
        return int(_scalar(self._header, 0, number_types.Int64Flags))

    @property
    def is_delta(self) -> bool:
        """Whether a dictionary extends the previous one of the same id instead of replacing it."""
        return bool(_scalar(self._header, 2, number_types.BoolFlags))

    @property
    def dictionaries_of_columns(self) -> dict[str, set[int]]:
        """The ids of the dictionaries that each column of a schema uses."""
        fields = _tables(self._header, 1)
        return {bytes(field.String(_position(field, 0))).decode(): _dictionaries(field) for field in fields}

    def check(self, size: int) -> None:
        """Raise ValueError if the message is inconsistent or does not fit a file of `size` bytes."""
        if not self.start < self.body <= self.stop <= size:
            raise ValueError(f"message at bytes {self.start} to {self.stop} of {size}")
        if self.kind != RECORDS:
            return
        body, columns = self.stop - self.body, _structs(self._batch, 1, "<qq")
        if self.rows < 0 or any(min(offset, length) < 0 or offset + length > body for offset, length in self.buffers):
            raise ValueError(f"message at byte {self.start} with buffers outside of its body")
        if columns and columns[0][0] != self.rows:
            raise ValueError(f"message at byte {self.start} of {self.rows} rows, the first column of {columns[0][0]}")

    @cached_property
    def _root(self) -> Table:
        return root_table(self.metadata[self.prefix :])

    @cached_property
    def _header(self) -> Table:
        return _table(self._root, 2)

    @cached_property
    def _batch(self) -> Table:
        """The record batch in the header: a dictionary's values are one, too."""
        return _table(self._header, 1) if self.kind == DICTIONARY else self._header


def index_of_file(obj: Object, blocks: Blocks, end: bytes) -> bytes:
    """Return the packed metadata of an Arrow file's messages.

    Args:
        obj: The file.
        blocks: Reads the file through the cache.
        end: The last bytes of the file, from its footer on.

    Raises:
        DataError: The file is damaged.
        OriginError: The origin failed.
    """
    with map_errors(obj):
        footer = root_table(memoryview(end))
        schema = Message(HEAD_BYTES, schema_message(end))
        spans = [(start, start + length) for slot in (2, 3) for start, length, _ in _structs(footer, slot, "<qi4xq")]
    if obj.size < SHARED_BYTES * len(spans):
        return pack([schema, *(Message(start, blocks.read(obj, start, stop)) for start, stop in spans)])
    pending = [blocks.submit(blocks.fetch, obj, start, stop) for start, stop in spans]
    found = (Message(start, fetched.result()) for (start, _), fetched in zip(spans, pending, strict=True))
    return pack([schema, *found])


def schema_message(footer: bytes) -> memoryview:
    """Return a message of the schema in a file's footer. Not every writer begins a file with one, as polars 2.1.

    Footers of Arrow 0.14 have no version, which means the first one, before messages of the fourth.
    """
    root = root_table(memoryview(footer))
    schema, version = root.Indirect(_position(root, 1)), max(V4, _scalar(root, 0, number_types.Int16Flags))
    # The offset of the root, its vtable, and the root: a table of Message.fbs. The footer follows, with the schema.
    head = struct.pack("<I5H2xihBxI4x", 16, 10, 12, 4, 6, 8, 12, version, SCHEMA, 8 + schema)
    metadata = head + footer + bytes(-len(footer) % 8)
    return memoryview(CONTINUATION + struct.pack("<i", len(metadata)) + metadata)


def is_old_stream(obj: Object, blocks: Blocks) -> bool:
    """Return whether a file begins with the schema of an Arrow stream of a version before 0.15."""
    size = OLD_PREFIX_BYTES + int.from_bytes(blocks.read(obj, 0, min(obj.size, OLD_PREFIX_BYTES)), "little")
    if not OLD_PREFIX_BYTES < size <= min(obj.size, MOST_OLD_SCHEMA):
        return False
    message = Message(0, blocks.read(obj, 0, size))
    with suppress(*DAMAGE):
        message.check(obj.size)
        return message.kind == SCHEMA and message.stop == message.body
    return False


def index_of_stream(obj: Object, blocks: Blocks) -> bytes:
    """Return the packed metadata of an Arrow stream's messages.

    The messages are read in sequence: each one gives the position of the next.

    Raises:
        DataError: The stream is damaged.
        OriginError: The origin failed.
    """
    found: list[Message] = []
    position, read = 0, blocks.read
    while position + OLD_PREFIX_BYTES <= obj.size:
        head = read(obj, position, min(obj.size, position + GUESSED_BYTES))
        prefix = PREFIX_BYTES if head[:4] == CONTINUATION else OLD_PREFIX_BYTES
        size = int.from_bytes(head[prefix - 4 : prefix], "little")
        length = prefix + size
        if position + length > obj.size or (found and prefix != found[0].prefix):
            raise DamagedError(f"{obj.name} has no Arrow message at byte {position}: is it cut short?")
        if not size:
            break
        metadata = head[:length] if length <= len(head) else read(obj, position, position + length)
        found.append(Message(position, metadata))
        with map_errors(obj):
            found[-1].check(obj.size)
        stop = found[-1].stop
        # The next message is probably as large as this one. A block holds many small messages.
        read = blocks.read if stop - position < SHARED_BYTES else blocks.fetch
        position = stop
    return pack(found)


def requests(obj: Object, index: memoryview, _tail: int) -> list[int]:
    """Return the bytes of each request for the messages of an index.

    Messages that were read through blocks do not count: the blocks hold rows, too. Nor does the schema of a file, which
    is in its footer.
    """
    lengths = [len(message.metadata) for message in unpack(index) if message.kind != SCHEMA or message.start == 0]
    return [] if obj.size < SHARED_BYTES * len(lengths) else lengths


def pack(messages: Sequence[Message]) -> bytes:
    """Return the index of these messages as bytes.

    The format: the number of messages; (start, metadata length) of each; the metadata of all; the magic.
    """
    index = struct.pack("<q", len(messages))
    index += b"".join(struct.pack("<qq", message.start, len(message.metadata)) for message in messages)
    return b"".join([index, *(message.metadata for message in messages), MAGIC])


def unpack(index: memoryview) -> list[Message]:
    """Return the messages of a packed index. Their metadata shares its memory."""
    (count,) = struct.unpack_from("<q", index)
    entries = [struct.unpack_from("<qq", index, 8 + 16 * number) for number in range(count)]
    stops = accumulate((length for _, length in entries), initial=8 + 16 * count)
    return [
        Message(start, index[first:last]) for (start, _), (first, last) in zip(entries, pairwise(stops), strict=True)
    ]


def map_errors(obj: Object) -> AbstractContextManager[None]:
    """Raise DataError, naming the file, for the exceptions that damaged messages cause in the block."""
    return as_data_error(f"{obj.name} has Arrow messages that cannot be read", *DAMAGE)


def root_table(data: memoryview) -> Table:
    """Return the root table of a flatbuffer."""
    return Table(data, struct.unpack_from("<I", data)[0])


# `slot` below is the number of a field in its table's flatbuffers schema.


def _position(table: Table, slot: int) -> int | None:
    """Return the position of a field's value in the flatbuffer, or None if the field is absent."""
    offset = int(table.Offset(4 + 2 * slot))
    return int(table.Pos) + offset if offset else None


def _table(table: Table, slot: int) -> Table:
    return Table(table.Bytes, table.Indirect(_position(table, slot)))


def _tables(table: Table, slot: int) -> list[Table]:
    """Return a vector of tables."""
    offset = table.Offset(4 + 2 * slot)
    positions = range(table.Vector(offset), table.Vector(offset) + 4 * table.VectorLen(offset), 4) if offset else ()
    return [Table(table.Bytes, table.Indirect(position)) for position in positions]


def _dictionaries(field: Table) -> set[int]:
    """Return the dictionary ids of a Field of Schema.fbs and of its children."""
    own = [_scalar(_table(field, 4), 0, number_types.Int64Flags)] if _position(field, 4) is not None else []
    return set(own).union(*map(_dictionaries, _tables(field, 5)))


def _scalar(table: Table, slot: int, kind: Any) -> Any:
    position = _position(table, slot)
    return 0 if position is None else table.Get(kind, position)


def _structs(table: Table, slot: int, form: str) -> list[Any]:
    """Return a vector of structs or numbers, each as a tuple."""
    offset = table.Offset(4 + 2 * slot)
    if not offset:
        return []
    start, size = table.Vector(offset), struct.calcsize(form) * table.VectorLen(offset)
    return list(struct.iter_unpack(form, table.Bytes[start : start + size]))

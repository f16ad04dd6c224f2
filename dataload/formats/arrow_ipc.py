"""Arrow IPC through the cache, files (Feather too) and streams: a record batch is a row group.

Notes: formats are those of https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
and of its Message.fbs and File.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pyarrow as pa
from flatbuffers import number_types
from flatbuffers.table import Table

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import Span
from dataload.errors import DataError, DataloadError
from dataload.formats.base import SHARED_BYTES, Bounds, RowGroupReader, joined
from dataload.formats.range_stream import pieces
from dataload.runtime.cached_property import cached_property
from dataload.telemetry.wait_timeline import doing

MAGIC, FEATHER_1 = b"ARROW1", b"FEA1"
CONTINUATION = b"\xff\xff\xff\xff"
PREFIX_BYTES = 8  # of a message, before its metadata: continuation, length (i32, little-endian)
TRAILER_BYTES = 4 + len(MAGIC)  # after a file's footer: its length (i32, little-endian), magic
HEAD_BYTES = 8  # before a file's first message: magic, padding
GUESSED_BYTES = 16 << 10  # of a message's metadata, where it is not known
END_OF_STREAM = CONTINUATION + bytes(4)
DICTIONARY, RECORDS = 2, 3  # of Message.fbs: MessageHeader
Read = Callable[[Object, int, int], memoryview]

COMPRESSION_RATIO = 4  # of buffers that are compressed; how large they were stands in them alone


@dataclass(frozen=True)
class Message:
    """One message of a file: its metadata, with the prefix, from `start` to `body`; then its body, to `stop`."""

    start: int
    metadata: memoryview

    @property
    def body(self) -> int:
        return self.start + len(self.metadata)

    @property
    def stop(self) -> int:
        return self.body + int(_scalar(self._root, 3, number_types.Int64Flags))

    @property
    def kind(self) -> int:
        return int(_scalar(self._root, 1, number_types.Uint8Flags))

    @property
    def rows(self) -> int:
        return int(_scalar(self._header, 0, number_types.Int64Flags))

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """Where in the body each buffer starts, and how many bytes it has."""
        return _structs(self._header, 2, "<qq")

    @property
    def is_compressed(self) -> bool:
        return _place(self._header, 3) is not None

    @property
    def views(self) -> tuple[int, ...]:
        """How many buffers of characters each column of views has."""
        return tuple(count for (count,) in _structs(self._header, 4, "<q"))

    @property
    def dictionary(self) -> int:
        """Which one a dictionary is."""
        return int(_scalar(self._header, 0, number_types.Int64Flags))

    @property
    def is_delta(self) -> bool:
        """Whether a dictionary adds to what was there, and does not take its place."""
        return bool(_scalar(self._header, 2, number_types.BoolFlags))

    @property
    def is_compressed_dictionary(self) -> bool:
        return _place(_table(self._header, 1), 3) is not None

    @property
    def dictionaries_of_columns(self) -> dict[str, set[int]]:
        """Of a schema: which dictionaries each column's values are in."""
        fields = _tables(self._header, 1)
        return {bytes(field.String(_place(field, 0))).decode(): _dictionaries(field) for field in fields}

    def check(self, size: int) -> None:
        """Raises ValueError when it cannot be one of a file of `size` bytes."""
        if not self.start < self.body <= self.stop <= size:
            raise ValueError(f"message at bytes {self.start} to {self.stop} of {size}")
        if self.kind != RECORDS:
            return
        body, columns = self.stop - self.body, _structs(self._header, 1, "<qq")
        if any(min(at, length) < 0 or at + length > body for at, length in self.buffers):
            raise ValueError(f"message at byte {self.start} with buffers outside of its body")
        if columns and columns[0][0] != self.rows:
            raise ValueError(f"message at byte {self.start} of {self.rows} rows, the first column of {columns[0][0]}")

    @cached_property
    def _root(self) -> Table:
        return _root(self.metadata[PREFIX_BYTES if self.metadata[:4] == CONTINUATION else PREFIX_BYTES - 4 :])

    @cached_property
    def _header(self) -> Table:
        return _table(self._root, 2)


class Dictionary(NamedTuple):
    """A message that is a dictionary. number: which one, as the schema has it."""

    number: int
    is_compressed: bool
    message: Message


def index_of_file(obj: Object, blocks: Blocks, last: Callable[[int], bytes]) -> bytes:
    """The metadata of an Arrow file's messages. last: has so many of its last bytes fetched."""
    size = int.from_bytes(last(TRAILER_BYTES)[:4], "little") + TRAILER_BYTES
    with _damage_of(obj):
        footer = _root(memoryview(last(size)))
        dictionaries, batches = (_structs(footer, slot, "<qi4xq") for slot in (2, 3))
        first = min((start for start, _, _ in dictionaries + batches), default=obj.size - size)
    spans = [(HEAD_BYTES, first), *((start, start + length) for start, length, _ in dictionaries + batches)]
    if obj.size < SHARED_BYTES * len(spans):
        return _to_bytes([Message(start, blocks.read(obj, start, stop)) for start, stop in spans])
    pending = [blocks.submit(blocks.fetch, obj, start, stop) for start, stop in spans]
    return _to_bytes([Message(start, one.result()) for (start, _), one in zip(spans, pending, strict=True)])


def index_of_stream(obj: Object, blocks: Blocks) -> bytes:
    """The metadata of an Arrow stream's messages, one after the other, for each says where the next one is."""
    found: list[Message] = []
    at, read = 0, blocks.read
    while at + PREFIX_BYTES <= obj.size:
        head = read(obj, at, min(obj.size, at + GUESSED_BYTES))
        length = PREFIX_BYTES + int.from_bytes(head[4:PREFIX_BYTES], "little")
        if head[:4] != CONTINUATION or at + length > obj.size:
            raise DataError(f"{obj.path} has no Arrow message at byte {at}: is it cut short?")
        if length == PREFIX_BYTES:
            break
        found.append(Message(at, head[:length] if length <= len(head) else read(obj, at, at + length)))
        with _damage_of(obj):
            found[-1].check(obj.size)
        stop = found[-1].stop
        # The next is like this one. Of small ones a block holds many.
        read = blocks.read if stop - at < SHARED_BYTES else blocks.fetch
        at = stop
    return _to_bytes(found)


class ArrowFooter:
    """What an Arrow file, or stream, is known by: its messages without their bodies; see `Footer`.

    messages: the schema's, and each record batch's behind the dictionaries that it needs.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._head = messages[0]
        self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(self._head.metadata)).remove_metadata()
        self._read_by = self._head.dictionaries_of_columns
        self._batches: list[Message] = []
        self._dictionaries: list[tuple[Dictionary, ...]] = []  # that each batch needs
        needed: tuple[Dictionary, ...] = ()
        for message in messages:
            if message.kind == DICTIONARY:
                new = Dictionary(message.dictionary, message.is_compressed_dictionary, message)
                needed = (*(one for one in needed if message.is_delta or one.number != new.number), new)
            elif message.kind == RECORDS:
                self._batches.append(message)
                self._dictionaries.append(needed)
        self.lengths = [batch.rows for batch in self._batches]
        self._places: dict[tuple[int, ...], dict[str, slice]] = {}
        for number, batch in enumerate(self._batches):
            if len(batch.buffers) != self._places_of(batch)[""].stop:
                raise ValueError(f"record batch {number} has {len(batch.buffers)} buffers, which do not fit the schema")

    @classmethod
    def from_bytes(cls, data: memoryview, obj: Object) -> ArrowFooter:
        """Raises DataError when it cannot be read."""
        with _damage_of(obj):
            messages = _from_bytes(data)
            for message in messages:
                message.check(obj.size)
            return cls(messages)

    def stored_bytes(self, number: int) -> int:
        return self._batches[number].stop - self._batches[number].start

    def decoded_bytes(self, number: int, columns: Collection[str]) -> list[int]:
        batch = self._batches[number]
        buffers, ratio = batch.buffers, COMPRESSION_RATIO if batch.is_compressed else 1
        return [ratio * sum(size for _, size in buffers[self._place(batch, name)]) for name in columns]

    def coded(self, number: int, columns: Collection[str]) -> list[str]:  # noqa: ARG002 (the schema says it of all)
        return [name for name in columns if any(self._read_by[own] for own in self._chosen([name]))]

    def held_bytes(self, number: int, columns: Sequence[str]) -> int:
        return sum(stop - start for spans in self.fetched(number, columns) for start, stop in spans)

    def fetched(self, number: int, columns: Sequence[str]) -> tuple[list[Span], list[Span]]:
        *before, (_, spans) = self._needed(number, self._chosen(columns))
        dictionaries = [span for _, needed in before for span in needed]
        if self.stored_bytes(number) < SHARED_BYTES:
            return [*dictionaries, *spans], []
        return dictionaries, pieces(spans, self.stored_bytes(number))

    def bounds(self, number: int, column: str, kind: pa.DataType) -> Bounds:  # noqa: ARG002 (there are none)
        return Bounds(None, None, None)

    @contextmanager
    def open_row_group(
        self, obj: Object, number: int, columns: Sequence[str], blocks: Blocks
    ) -> Iterator[RowGroupReader]:
        """All that is read of the record batch is held at a time; see `Footer`."""
        chosen = self._chosen(columns)
        options = pa.ipc.IpcReadOptions(
            included_fields=[self.schema.get_field_index(name) for name in chosen], use_threads=False
        )
        try:
            stream = pa.BufferReader(self._stream(obj, number, chosen, blocks))
            with pa.ipc.open_stream(stream, options=options) as reader:
                table = reader.read_all()
            table.validate(full=True)  # Arrow trusts what it reads; offsets that are damaged would end the program.
            if table.num_rows != self.lengths[number]:
                raise pa.ArrowInvalid(f"{table.num_rows} rows where {self.lengths[number]} are said to be")
            yield _Reader(table)
        except DataloadError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{obj.path} record batch {number} cannot be decoded: {str(error).strip()}") from error

    def _stream(self, obj: Object, number: int, columns: Sequence[str], blocks: Blocks) -> pa.Buffer:
        """A stream of one record batch, whose body is there as far as these columns have part in it."""
        needed = self._needed(number, columns)
        starts = list(accumulate((message.stop - message.start for message, _ in needed), initial=0))
        whole = pa.allocate_buffer(starts[-1] + len(END_OF_STREAM))
        target = memoryview(whole).cast("B")

        def copy(read: Read, start: int, stop: int, to: int) -> None:
            target[to : to + stop - start] = read(obj, start, stop)

        pending = []
        for (message, spans), at in zip(needed, starts, strict=False):
            target[at : at + len(message.metadata)] = message.metadata
            for start, stop in spans:
                if blocks.retains_blocks and (message.kind == DICTIONARY or self.stored_bytes(number) < SHARED_BYTES):
                    copy(blocks.read, start, stop, at + start - message.start)
                    continue
                pending += [
                    blocks.submit(copy, blocks.fetch, first, last, at + first - message.start)
                    for first, last in pieces([(start, stop)], stop - start)
                ]
        target[starts[-1] :] = END_OF_STREAM
        with doing("origin"):
            wait(pending)
        for one in pending:
            one.result()
        return whole

    def _chosen(self, columns: Sequence[str]) -> list[str]:
        """The file's own columns that these, dotted where they are members of structs, are of."""
        return [name for name in self.schema.names if any(f"{column}.".startswith(f"{name}.") for column in columns)]

    def _spans(self, batch: Message, columns: Sequence[str]) -> list[Span]:
        """Where the buffers of some of the schema's columns are, in the file."""
        buffers = batch.buffers
        chosen = [buffers[at] for name in columns for at in range(*self._place(batch, name).indices(len(buffers)))]
        return joined(sorted((batch.body + start, batch.body + start + size) for start, size in chosen if size))

    def _needed(self, number: int, columns: Sequence[str]) -> list[tuple[Message, list[Span]]]:
        """The messages of a stream of one record batch, and what must be there of the body of each."""
        read = {one for name in columns for one in self._read_by[name]}
        needed: list[tuple[Message, list[Span]]] = [(self._head, [])]
        for one in self._dictionaries[number]:  # Arrow wants all of them, but looks into the compressed ones only.
            whole = (one.number in read or one.is_compressed) and one.message.body < one.message.stop
            needed.append((one.message, [(one.message.body, one.message.stop)] if whole else []))
        return [*needed, (self._batches[number], self._spans(self._batches[number], columns))]

    def _place(self, batch: Message, column: str) -> slice:
        """Which of a record batch's buffers are those of a column; of a dictionary's members, all of the codes."""
        places = self._places_of(batch)
        while column not in places:
            column = column.rpartition(".")[0]
        return places[column]

    def _places_of(self, batch: Message) -> dict[str, slice]:
        views = batch.views
        if views not in self._places:
            self._places[views] = _places(self.schema, views)
        return self._places[views]


class _Reader:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def tables(self, rows: int) -> Iterator[pa.Table]:
        for first in range(0, max(1, self._table.num_rows), rows):
            yield self._table.slice(first, rows)


def _places(schema: pa.Schema, views: Sequence[int]) -> dict[str, slice]:
    """By a column's dotted name, which of a record batch's buffers are its own; by "", those of all columns.

    views: how many buffers of characters each column of views has.
    """
    places, more = {}, iter(views)

    def place(name: str, kind: pa.DataType, start: int) -> int:
        if isinstance(kind, pa.BaseExtensionType):
            return place(name, kind.storage_type, start)
        types = pa.types
        stop = start + int(kind.num_buffers)
        if types.is_null(kind) or types.is_union(kind) or types.is_run_end_encoded(kind):
            stop -= 1  # Arrow counts one for the nulls, which these do not have.
        if types.is_string_view(kind) or types.is_binary_view(kind):
            stop += next(more, 0)
        if not types.is_dictionary(kind):
            for inner in (kind.field(number) for number in range(kind.num_fields)):
                stop = place(f"{name}.{inner.name}" if types.is_struct(kind) else "", inner.type, stop)
        places[name] = slice(start, stop)
        return stop

    end = 0
    for field in schema:
        end = place(field.name, field.type, end)
    places[""] = slice(0, end)
    return places


def message_bytes(data: memoryview) -> list[int]:
    """Bytes of the metadata of each message of a file, from what is kept of them."""
    return [len(message.metadata) for message in _from_bytes(data)]


def _to_bytes(messages: Sequence[Message]) -> bytes:
    """Their number; where each starts and how long its metadata is; the metadata of all; the magic."""
    index = struct.pack("<q", len(messages))
    index += b"".join(struct.pack("<qq", message.start, len(message.metadata)) for message in messages)
    return b"".join([index, *(message.metadata for message in messages), MAGIC])


def _from_bytes(data: memoryview) -> list[Message]:
    (count,) = struct.unpack_from("<q", data)
    index = [struct.unpack_from("<qq", data, 8 + 16 * number) for number in range(count)]
    stops = accumulate((length for _, length in index), initial=8 + 16 * count)
    return [Message(start, data[first:last]) for (start, _), (first, last) in zip(index, pairwise(stops), strict=True)]


@contextmanager
def _damage_of(obj: Object) -> Iterator[None]:
    """Raises DataError for what reading damaged messages raises."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, struct.error) as error:
        if isinstance(error, DataloadError):
            raise
        raise DataError(f"{obj.path} has Arrow messages that cannot be read: {str(error).strip()}") from error


def _root(data: memoryview) -> Table:
    """The table that a flatbuffer is of."""
    return Table(data, struct.unpack_from("<I", data)[0])


def _place(table: Table, slot: int) -> int | None:
    """Where the value of a table's field is, by the field's number in its schema; None: it has none."""
    offset = int(table.Offset(4 + 2 * slot))
    return int(table.Pos) + offset if offset else None


def _table(table: Table, slot: int) -> Table:
    return Table(table.Bytes, table.Indirect(_place(table, slot)))


def _tables(table: Table, slot: int) -> list[Table]:
    """A vector of tables."""
    offset = table.Offset(4 + 2 * slot)
    places = range(table.Vector(offset), table.Vector(offset) + 4 * table.VectorLen(offset), 4) if offset else ()
    return [Table(table.Bytes, table.Indirect(place)) for place in places]


def _dictionaries(field: Table) -> set[int]:
    """Those of Schema.fbs: Field, and of its children."""
    own = [_scalar(_table(field, 4), 0, number_types.Int64Flags)] if _place(field, 4) is not None else []
    return set(own).union(*map(_dictionaries, _tables(field, 5)))


def _scalar(table: Table, slot: int, kind: Any) -> Any:
    place = _place(table, slot)
    return 0 if place is None else table.Get(kind, place)


def _structs(table: Table, slot: int, form: str) -> list[Any]:
    """A vector of structs, or of numbers, each as a tuple."""
    offset = table.Offset(4 + 2 * slot)
    if not offset:
        return []
    start, size = table.Vector(offset), struct.calcsize(form) * table.VectorLen(offset)
    return list(struct.iter_unpack(form, table.Bytes[start : start + size]))

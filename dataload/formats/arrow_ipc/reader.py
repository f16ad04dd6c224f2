"""The row groups of an Arrow file or stream: what each holds, which bytes it needs, and how it is decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate, chain

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object, wait_for_origin
from dataload.cache.tier import Span
from dataload.formats.arrow_ipc.messages import DICTIONARY, END_OF_STREAM, RECORDS, V5, Message, map_errors, unpack
from dataload.formats.arrow_types import bare, children
from dataload.formats.base import SHARED_BYTES, TINY_BYTES, RowGroupReader, as_data_error, joined
from dataload.formats.range_stream import pieces, zeros_around
from dataload.formats.schema import ambiguous, structs_of

COMPRESSION_RATIO = 4  # assumed: only the compressed buffers themselves hold their decompressed sizes
LARGEST_RATIO = 1 << 16  # above that of any buffer that LZ4 or ZSTD can compress


class ArrowFooter:
    """The messages of an Arrow file or stream without their bodies; see `Footer`.

    Args:
        messages: The schema first, then each record batch after the dictionaries that it needs.
        name: Of the file, for errors.
    """

    streams = False

    def __init__(self, messages: Sequence[Message], name: str) -> None:
        self._head = messages[0]
        self.renamed: Mapping[str, str] = {}
        self.mark = ""
        self.file: memoryview | None = None
        schema = pa.ipc.read_schema(pa.py_buffer(self._head.metadata))
        self.key_values: Mapping[bytes, bytes] = schema.metadata or {}
        self.schema: pa.Schema = schema.remove_metadata()
        self.unreadable = {column: f"{name}: {text}" for column, text in ambiguous(self.schema).items()}
        self._dictionaries_of = self._head.dictionaries_of_columns
        self._batches: list[Message] = []
        self._dictionaries: list[tuple[Message, ...]] = []  # needed by each batch
        self._compressed_dictionaries: set[int] = set()
        needed: tuple[Message, ...] = ()
        for message in messages:
            if message.kind == DICTIONARY:
                number = message.dictionary
                needed = (*(old for old in needed if message.is_delta or old.dictionary != number), message)
                if message.is_compressed:
                    self._compressed_dictionaries.add(number)
            elif message.kind == RECORDS:
                self._batches.append(message)
                self._dictionaries.append(needed)
        self.lengths = [batch.rows for batch in self._batches]
        slices_of = cache(partial(_slices, self.schema))
        self._slices: list[dict[str, slice]] = []
        self._nodes: dict[str, range] = {}
        for number, batch in enumerate(self._batches):
            slices, self._nodes, count = slices_of(batch.views, has_union_bitmaps=batch.version < V5)
            self._slices.append(slices)
            if len(batch.buffers) != count:
                raise ValueError(f"record batch {number} has {len(batch.buffers)} buffers, which do not fit the schema")

    @classmethod
    def from_bytes(cls, data: memoryview, obj: Object) -> ArrowFooter:
        """Return the footer of a packed index.

        Raises:
            DataError: The messages cannot be read.
        """
        with map_errors(obj):
            messages = unpack(data)
            for message in messages:
                message.check(obj.size)
            return cls(messages, obj.name)

    def stored_bytes(self, number: int) -> int:
        return self._batches[number].stop - self._batches[number].start

    def decoded_bytes(self, number: int, columns: Collection[str]) -> list[int]:
        ratio = COMPRESSION_RATIO if self._batches[number].is_compressed else 1
        return [ratio * sum(size for _, size in buffers) for buffers in self._buffers(number, columns)]

    def coded(self, number: int, columns: Collection[str]) -> list[str]:  # noqa: ARG002 (the schema holds for all)
        return [name for name in columns if any(map(self._dictionaries_of.get, _holders(name)))]

    def decompresses_whole(self, number: int) -> bool:
        return self._batches[number].is_compressed

    def fetched(self, number: int, columns: Sequence[str], capacity: int) -> tuple[list[Span], list[Span]]:  # noqa: ARG002 (all columns are in memory at once)
        *before, (_, spans) = self._needed(number, self._own_columns(columns))
        dictionaries = [span for _, needed in before for span in needed]
        if self.stored_bytes(number) < SHARED_BYTES:
            return [*dictionaries, *spans], []
        return dictionaries, pieces(spans, self.stored_bytes(number))

    def for_statistics(self, guarantee: object, columns: object) -> None:  # noqa: ARG002
        return None

    def null_counts(self, number: int, columns: Collection[str]) -> list[int | None]:
        nulls, coded = self._batches[number].null_counts, self.coded(number, columns)

        def of(column: str) -> int | None:
            if column in coded or column not in self._nodes:
                return None  # A dictionary may have nulls of its own.
            structs = [self._nodes[name].start for name in structs_of(column) if name in self._nodes]
            own, *others = (nulls[node] for node in (*self._nodes[column], *structs))
            return None if any(others) else own  # Nulls of two nodes may be of one row.

        return [of(column) if self._has_sound_nulls(number) else None for column in columns]

    def null_elements(self, number: int, columns: Collection[str]) -> list[int]:
        nulls, coded = self._batches[number].null_counts, self.coded(number, columns)
        known = [name for name in columns if name not in coded and self._has_sound_nulls(number)]
        return [nulls[self._nodes[name].stop - 1] if name in known else 0 for name in columns]

    def _has_sound_nulls(self, number: int) -> bool:
        """Return whether a record batch counts the nulls of each node."""
        nulls, count = self._batches[number].null_counts, max((each.stop for each in self._nodes.values()), default=0)
        return len(nulls) >= count and min(nulls, default=0) >= 0

    def num_values(self, number: int, column: str) -> int | None:  # noqa: ARG002 (as for Parquet)
        return None

    def opens_at_once(self, number: int, blocks: Blocks) -> bool:
        dictionaries = sum(message.stop - message.start for message in self._dictionaries[number])
        return blocks.origin.is_local and self.stored_bytes(number) + dictionaries <= TINY_BYTES

    def values_at(self, *_: object) -> None:
        return None

    @contextmanager
    def open_row_group(
        self,
        obj: Object,
        number: int,
        columns: Sequence[str],
        blocks: Blocks,
        capacity: int,  # noqa: ARG002
    ) -> Iterator[RowGroupReader]:
        """Open a record batch. All chosen columns are in memory at once; see `Footer`."""
        own = self._own_columns(columns)
        with as_data_error(f"{obj.name} record batch {number} cannot be decoded"):
            stream = self._stream(obj, number, own, blocks)
            yield _Reader(partial(self._decompressed, stream, number, own))

    def _decompressed(self, stream: pa.Buffer, number: int, columns: Sequence[str]) -> pa.Table:
        """Return the rows of a record batch, given its `_stream`."""
        self._check_sizes(stream, number, columns)
        options = pa.ipc.IpcReadOptions(
            included_fields=[self.schema.get_field_index(name) for name in columns], use_threads=False
        )
        with pa.ipc.open_stream(pa.BufferReader(stream), options=options) as reader:
            table = reader.read_all()
        _check(table)
        if table.num_rows != self.lengths[number]:
            raise pa.ArrowInvalid(f"{table.num_rows} rows, but its metadata says {self.lengths[number]}")
        return table

    def _stream(self, obj: Object, number: int, columns: Sequence[str], blocks: Blocks) -> pa.Buffer:
        """Return a stream of one record batch in which the bytes of other columns are zeros."""
        needed = self._needed(number, columns)
        starts = list(accumulate((message.stop - message.start for message, _ in needed), initial=0))
        filled: list[Span] = []
        for (message, spans), offset in zip(needed, starts, strict=False):
            filled.append((offset, offset + len(message.metadata)))
            filled += [(offset + start - message.start, offset + stop - message.start) for start, stop in spans]
        buffer, target = zeros_around(filled, starts[-1] + len(END_OF_STREAM))

        pending = []
        for (message, spans), offset in zip(needed, starts, strict=False):
            target[offset : offset + len(message.metadata)] = message.metadata
            shift = offset - message.start
            is_shared = message.kind == DICTIONARY or self.stored_bytes(number) < SHARED_BYTES
            if is_shared and blocks.retains_blocks:
                for start, stop in spans:
                    target[start + shift : stop + shift] = blocks.read(obj, start, stop)
            else:
                requests = pieces(spans, message.stop - message.start)
                pending += [
                    blocks.submit(blocks.fetch_into, obj, start, target[start + shift : stop + shift])
                    for start, stop in requests
                ]
        target[starts[-1] :] = END_OF_STREAM
        wait_for_origin(pending)
        return buffer

    def _check_sizes(self, stream: pa.Buffer, number: int, columns: Sequence[str]) -> None:
        """Raise ArrowInvalid for a compressed buffer with an impossible size, which Arrow would try to allocate."""
        batch = self._batches[number]
        if not batch.is_compressed:
            return
        body = len(stream) - len(END_OF_STREAM) - (batch.stop - batch.body)
        for start, size in chain.from_iterable(self._buffers(number, columns)):
            (decompressed,) = struct.unpack_from("<q", stream, body + start)
            if size and decompressed > LARGEST_RATIO * size:
                raise pa.ArrowInvalid(f"{size} compressed bytes say that they hold {decompressed}")

    def _own_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the file's own columns that hold these; a member of a struct has a dotted name."""
        holders = set(chain.from_iterable(map(_holders, columns)))
        return [name for name in self.schema.names if name in holders]

    def _needed(self, number: int, columns: Sequence[str]) -> list[tuple[Message, list[Span]]]:
        """Return the messages that decode one record batch, each with the byte ranges that its body needs."""
        # Arrow needs the messages of all dictionaries. It reads the bodies of compressed ones in any case.
        used = self._compressed_dictionaries.union(*(self._dictionaries_of[name] for name in columns))
        needed: list[tuple[Message, list[Span]]] = [(self._head, [])]
        for message in self._dictionaries[number]:
            has_body = message.dictionary in used and message.body < message.stop
            needed.append((message, [(message.body, message.stop)] if has_body else []))
        batch = self._batches[number]
        buffers = chain.from_iterable(self._buffers(number, columns))
        spans = sorted((batch.body + start, batch.body + start + size) for start, size in buffers if size)
        return [*needed, (batch, joined(spans))]

    def _buffers(self, number: int, columns: Iterable[str]) -> list[list[tuple[int, int]]]:
        """Return the (offset, bytes) of a record batch's buffers for each column."""
        buffers, slices = self._batches[number].buffers, self._slices[number]

        def of(column: str) -> list[tuple[int, int]]:
            # A dictionary's member has no buffers of its own: those of the codes serve all members.
            return buffers[slices[column]] if column in slices else of(column.rpartition(".")[0])

        return [of(column) for column in columns]


class _Reader:
    """See `RowGroupReader`. `decompressed` returns all rows: not before they are read, as they may take much memory."""

    fetches: Sequence[Future[None]] = ()

    def __init__(self, decompressed: Callable[[], pa.Table]) -> None:
        self._decompressed = decompressed

    def wait(self) -> None:
        """Do nothing: the bytes are fetched."""

    def tables(self, rows: int) -> Iterator[pa.Table]:
        table = self._decompressed()
        for first in range(0, max(1, table.num_rows), rows):
            yield table.slice(first, rows)


def _check(table: pa.Table) -> None:
    """Check all offsets: Arrow does not, and damaged ones would crash the process. Text may be invalid in the file.

    Raises:
        pa.ArrowInvalid: The table is damaged.
    """
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        for chunk in (chunk for column in table.columns for chunk in column.chunks):
            chunk.view(bare(chunk.type)).validate(full=True)


def _holders(column: str) -> list[str]:
    """Return the names that a file's own column may have if it holds this one."""
    return [column, *structs_of(column)]


def _slices(
    schema: pa.Schema, views: Sequence[int], *, has_union_bitmaps: bool
) -> tuple[dict[str, slice], dict[str, range], int]:
    """Return the buffers and the nodes of a record batch by dotted column name, and the number of all buffers.

    Args:
        schema: The schema.
        views: Number of character buffers of each view column.
        has_union_bitmaps: Whether unions have validity bitmaps, as they had before Arrow 1.0.
    """
    slices: dict[str, slice] = {}
    nodes: dict[str, range] = {}
    character_buffers, count = iter(views), 0

    def add(name: str | None, kind: pa.DataType, start: int) -> int:  # None: inside a list, where names are no columns
        if isinstance(kind, pa.BaseExtensionType):
            return add(name, kind.storage_type, start)
        nonlocal count
        types, node, count = pa.types, count, count + 1
        stop = start + int(kind.num_buffers)
        is_bare_union = types.is_union(kind) and not has_union_bitmaps
        if types.is_null(kind) or is_bare_union or types.is_run_end_encoded(kind):
            stop -= 1  # pyarrow counts a validity bitmap, which IPC omits for these types.
        if types.is_string_view(kind) or types.is_binary_view(kind):
            stop += next(character_buffers, 0)
        if not types.is_dictionary(kind):
            for child in children(kind):
                is_member = name is not None and types.is_struct(kind)
                stop = add(f"{name}.{child.name}" if is_member else None, child.type, stop)
        if name is not None:
            slices[name] = slice(start, stop)
            nodes[name] = range(node, count)
        return stop

    end = 0
    for field in schema:
        end = add(field.name, field.type, end)
    return slices, nodes, end

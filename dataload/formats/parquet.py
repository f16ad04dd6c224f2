"""Parquet files: footers and row groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import Span
from dataload.errors import DataError, DataloadError
from dataload.formats.arrow_types import has_part
from dataload.formats.base import SHARED_BYTES, TINY_BYTES, Int64, RowGroupReader, as_data_error
from dataload.formats.int96 import counts_microseconds, is_ns
from dataload.formats.parquet_columns import ParquetColumns, columns_of
from dataload.formats.parquet_ranges import ranges_of, uncounted_bytes
from dataload.formats.parquet_reader import LongTimesReader, ParquetReader
from dataload.formats.parquet_thrift import (
    DAMAGE,
    DELTA_BINARY_PACKED,
    DELTA_BYTE_ARRAY,
    DELTA_LENGTH_BYTE_ARRAY,
    Chunk,
    Chunks,
    check_fields,
    row_groups_of,
)
from dataload.formats.range_stream import HeldBeginning, RangeStream, pieces
from dataload.formats.schema import flatten, flatten_table
from dataload.runtime.cached_property import cached_property
from dataload.runtime.resource_limits import MEMORY_DIVISOR, usable_memory

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.dataset as pads

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"
ENCRYPTED = "is encrypted, which dataload cannot read: write it without encryption"
TRAILER = 8  # bytes: the length of the footer and the magic
PARTS_KEPT = 16
BUFFER_BYTES = 1 << 20  # read buffer of a column that is being decoded
DICTIONARY_BYTES = 1 << 20  # dictionary size at which writers fall back to plain encoding
CODE_BYTES = 4  # most bytes of a dictionary index
VALUES_AT_ONCE = 1 << 18  # of a column of lists, that are decoded at a time
MOST_BEGINNING = 1 << 20  # of a file, to be held in one buffer for a small row group
UNLIKE_BYTES = 1 << 10  # values of this size are rarely equal, so the dictionary holds about all of them
SHARED_BITS = 0.75  # of the bits of an index without equal values; indices with fewer bits have far fewer values
UNCODED_ENCODINGS = {DELTA_BYTE_ARRAY, DELTA_LENGTH_BYTE_ARRAY}  # of other writers, once a dictionary is full
MOST_ROWS = 1 << 30  # of a row group; a footer with more is damaged
HUGE_ROW = 64 << 20  # bytes of a row, decompressed, from which on its memory is checked
ROW_COPIES = 3  # of a row that is decoded: in Arrow, joined, and packed
LEAST_MEMORY = 1 << 30  # for a row, also on a small host
PREFIX_ENCODINGS = {DELTA_BYTE_ARRAY, DELTA_BINARY_PACKED}  # the latter of numbers inside nested values


class ParquetFooter:
    """The footer of a Parquet file; see `Footer`."""

    streams = True

    def __init__(self, data: memoryview, obj: Object) -> None:
        self._data = data
        self._obj = obj
        self.renamed: Mapping[str, str] = {}
        self.mark = ""
        self.file: memoryview | None = None
        footer = bytes(data[:-TRAILER])
        self._row_groups, for_arrow = row_groups_of(footer)
        self._parts = _parts_of(for_arrow)
        there = len(self._row_groups) if for_arrow == footer else 0
        if (found := self._parts.metadata.num_row_groups) != there:
            raise ValueError(f"Arrow finds {found} row groups where {there} are")
        self.schema, self._columns, self._unit = self._parts.schema, self._parts.columns, self._parts.unit
        self.lengths = [chunks.rows for chunks in self._row_groups]
        for number, chunks in enumerate(self._row_groups):
            if not 0 <= chunks.rows <= MOST_ROWS or len(chunks) != self._columns.leaf_count:
                raise ValueError(f"row group {number} of {chunks.rows} rows and {len(chunks)} columns")
            if (leaf := chunks.misfit(self._parts.flat)) is not None:
                values = chunks[leaf].num_values
                raise ValueError(f"row group {number} of {chunks.rows} rows, with {values} values in its column {leaf}")

    @classmethod
    def from_bytes(cls, data: memoryview, obj: Object) -> ParquetFooter:
        """Return the footer in these bytes. Raise DataError if they cannot be read."""
        with _reading(obj):
            return cls(data, obj)

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        """The footer for Arrow's readers of rows and statistics."""
        with _reading(self._obj):
            return pq.read_metadata(pa.BufferReader(pa.py_buffer(self._data)))

    @property
    def key_values(self) -> Mapping[bytes, bytes]:
        return self._parts.metadata.metadata or {}

    @cached_property
    def unreadable(self) -> dict[str, str]:
        found = {name: f"{self._obj.name}: {text}" for name, text in self._columns.ambiguous.items()}
        if encrypted := {leaf for chunks in self._row_groups for leaf in chunks.encrypted}:
            for name, leaves in self._columns.leaves.items():
                if not encrypted.isdisjoint(leaves):
                    found[name] = f"{self._obj.name}: column {name!r} is encrypted"
        return found

    def stored_bytes(self, number: int) -> int:
        return self._row_groups[number].stored_bytes

    def decoded_bytes(self, number: int, columns: Collection[str]) -> list[int]:
        return [self._decoded(name, self._chunks(number, [name])) for name in columns]

    def _decoded(self, column: str, chunks: Sequence[Chunk]) -> int:
        dtype = self._columns.numbers.get(column)
        if dtype is not None:  # The encoded size may be small, but the decoded size of numbers is known.
            return int(dtype.itemsize * sum(chunk.num_values for chunk in chunks))
        return sum(chunk.total_uncompressed_size for chunk in chunks)

    def coded(self, number: int, columns: Collection[str]) -> list[str]:
        return [name for name in columns if any(map(_is_larger_decoded, self._chunks(number, [name])))]

    def decompresses_whole(self, number: int) -> bool:  # noqa: ARG002 (Arrow reads page by page)
        return False

    def fetched(self, number: int, columns: Sequence[str], capacity: int) -> tuple[list[Span], list[Span]]:
        if self.file is not None:
            return [], []
        ranges = self._ranges(number, columns, capacity)
        if self._shares_blocks(number):
            return ranges, []
        return [], pieces(ranges, capacity - _buffer_bytes(ranges, capacity) * len(ranges))

    def _ranges(self, number: int, columns: Sequence[str], capacity: int) -> list[Span]:
        chunks = self._chunks(number, self._columns.read_with(columns))
        with as_data_error(f"{self._obj.name} row group {number} cannot be fetched", ValueError):
            return ranges_of(chunks, capacity, self._parts.uncounted, self._obj.size)

    def _is_small(self, number: int) -> bool:
        return self.stored_bytes(number) < SHARED_BYTES

    def _shares_blocks(self, number: int) -> bool:
        """Return whether a row group is read through cached blocks, because it is small and has neighbours."""
        return len(self._row_groups) > 1 and self._is_small(number)

    def for_statistics(self, guarantee: pc.Expression, columns: Iterable[str]) -> pads.ParquetFileFragment | None:
        import pyarrow.dataset as pads  # slow, and only filters need it

        if not all(map(self._has_sound_statistics, self._columns.own(columns))):
            return None  # Arrow would abort the process when it compares them.
        options = pads.ParquetReadOptions(coerce_int96_timestamp_unit=self._unit)
        return pads.ParquetFileFormat(options).make_fragment(pa.py_buffer(self._data), partition_expression=guarantee)

    def _has_sound_statistics(self, column: str) -> bool:
        leaves = [(leaf, self._metadata.schema.column(leaf)) for leaf in self._columns.leaves[column]]
        return all(chunks[leaf].has_sound_statistics(stored) for chunks in self._row_groups for leaf, stored in leaves)

    def null_counts(self, number: int, columns: Collection[str]) -> list[int | None]:
        chunks, leaves = self._row_groups[number], self._columns.leaves
        return [self._nulls(chunks, leaves[name]) for name in self._columns.own(columns)]

    def _nulls(self, chunks: Chunks, leaves: range) -> int | None:
        total = 0
        for leaf in leaves:
            count = chunks.null_count(leaf)
            if count is not None:
                total += count
            elif self._parts.metadata.schema.column(leaf).max_definition_level:  # The schema allows nulls.
                return None
        return total

    def null_elements(self, number: int, columns: Collection[str]) -> list[int]:
        return [self._null_elements(self._row_groups[number], self._columns.leaves[name]) for name in columns]

    def _null_elements(self, chunks: Chunks, leaves: range) -> int:
        [leaf] = leaves
        if chunks.null_count(leaf) == 0:  # That of null and empty lists, too.
            return 0
        counts, level = chunks[leaf].definition_levels, self._parts.metadata.schema.column(leaf).max_definition_level
        return counts[level - 1] if len(counts) == level + 1 else 0

    def num_values(self, number: int, column: str) -> int | None:
        chunks = self._chunks(number, [column])
        return chunks[0].num_values if len(chunks) == 1 else None

    def values_at(self, obj: Object, number: int, column: str, rows: Int64, blocks: Blocks) -> pa.ChunkedArray | None:
        from dataload.formats.parquet_pages import values_at  # which few callers need

        chunks = self._chunks(number, [column])
        if self._columns.read_with([column]) != [column] or len(chunks) != 1 or column in self._long_times:
            return None

        def fetch(spans: Sequence[Span]) -> list[memoryview]:
            if any(not 0 <= start <= stop <= obj.size for start, stop in spans):
                raise ValueError(f"its index names {spans} of {obj.size} bytes")
            if self.file is not None and blocks.uses_cache:
                return [self.file[start:stop] for start, stop in spans]
            return blocks.map(lambda span: blocks.fetch(obj, *span), spans)

        def read(stream: Any) -> pa.ChunkedArray:
            how = {"pre_buffer": False, "page_checksum_verification": blocks.config.page_checksums}
            with pq.ParquetFile(stream, metadata=self._metadata, coerce_int96_timestamp_unit=self._unit, **how) as file:
                return flatten_table(file.read_row_group(number, columns=[column], use_threads=False)).column(0)

        try:
            return values_at(chunks[0], rows, self.lengths[number], obj.size, fetch, read)
        except DataloadError:
            raise
        except (pa.ArrowException, OSError, *DAMAGE, LookupError, TypeError, OverflowError):
            return None  # Who reads all of it says what is damaged.

    @contextmanager
    def open_row_group(
        self, obj: Object, number: int, columns: Sequence[str], blocks: Blocks, capacity: int
    ) -> Iterator[RowGroupReader]:
        """Open a row group. `capacity` bytes are fetched in advance, the rest during decoding; see `Footer`."""
        self._check_memory(number, columns)
        ranges = self._ranges(number, columns, capacity)
        size = self.stored_bytes(number)
        is_small = size < SHARED_BYTES
        if self.file is not None and blocks.uses_cache:
            bytes_of = partial(_from_file, self.file)
        elif blocks.retains_blocks and self._shares_blocks(number):
            bytes_of = partial(_from_blocks, blocks, obj)
        else:
            fetch = _from_origin if size <= TINY_BYTES and blocks.origin.is_local else _from_pool
            bytes_of = partial(fetch, blocks, obj)
        stream: HeldBeginning | RangeStream
        buffer = _buffer_bytes(ranges, capacity)
        if is_small and ranges and ranges[-1][1] <= MOST_BEGINNING:
            stream = HeldBeginning(bytes_of, obj, ranges)
        else:
            ahead = capacity - buffer * len(ranges)
            stream = RangeStream(bytes_of, obj, ranges, ahead, blocks.free_requests)
        with as_data_error(f"{obj.name} row group {number}{self._columns.likely_cause(columns)} cannot be decoded"):
            texts = [name for name in columns if name in self._columns.texts]
            coded = [name for name in texts if _keeps_codes(self._chunks(number, [name]))]
            # pre_buffer would fetch the whole row group before decoding the first row.
            arguments = {"read_dictionary": coded, "buffer_size": buffer, "pre_buffer": False}
            arguments["page_checksum_verification"] = blocks.config.page_checksums
            own = self._columns.read_with(columns)
            every = len(own) == len(self._columns.leaves)
            times = [name for name in own if name in self._long_times]
            opened = partial(pq.ParquetFile, stream.source, metadata=self._metadata, **arguments)
            with stream, opened(coerce_int96_timestamp_unit="us" if times else self._unit) as file:
                at_once = None if coded else self._rows_at_once(number, own)
                reader = ParquetReader(file, number, None if every else own, stream, at_once)
                if not times:
                    yield reader
                    return
                with opened(coerce_int96_timestamp_unit="ns") as in_ns:
                    yield LongTimesReader(reader, ParquetReader(in_ns, number, times, stream))

    def _check_memory(self, number: int, columns: Sequence[str]) -> None:
        """Raise DataError if one row takes more memory than all row groups may. Decoding could end the process."""
        rows = max(1, self.lengths[number])
        if self._row_groups[number].whole_bytes <= HUGE_ROW * rows:
            return
        most = max(LEAST_MEMORY, usable_memory() // MEMORY_DIVISOR)
        for name in columns:
            for chunk in self._chunks(number, [name]):
                whole = chunk.total_uncompressed_size
                # Arrow holds the page of a row, or the dictionary of all rows, and its values.
                held = whole // rows if chunk.dictionary_page_offset is None else whole
                if whole > HUGE_ROW * rows and (need := 2 * held + ROW_COPIES * (whole // rows)) > most:
                    raise DataError(
                        f"{self._obj.name} row group {number} column {name!r}: a row takes about {need >> 20} MiB to "
                        f"decode, and row groups may take {most >> 20} MiB on this host: leave it out with columns=, "
                        "or write shorter values"
                    )

    @cached_property
    def _long_times(self) -> frozenset[str]:
        """The columns with times of 96 bits in ns, and the other members of their structs."""
        stored, found = self._parts.metadata.schema, set[str]()
        if self._unit is not None:
            return frozenset()
        for field in self.schema:
            if has_part(field.type, is_ns):
                names = flatten(pa.schema([field])).names
                leaves = itertools.chain.from_iterable(self._columns.leaves[name] for name in names)
                if any(stored.column(leaf).physical_type == "INT96" for leaf in leaves):
                    found.update(names)
        return frozenset(found)

    def opens_at_once(self, number: int, blocks: Blocks) -> bool:
        return self.file is not None or blocks.origin.is_local or not self._shares_blocks(number)

    def _rows_at_once(self, number: int, columns: Collection[str]) -> int | None:
        """Return how many rows of lists Arrow decodes at a time; None: all of them.

        While it decodes a list of small numbers, it takes up to 16 bytes for each value.
        """
        chunks = self._chunks(number, [name for name in columns if name in self._columns.lists])
        most: int = max((chunk.num_values for chunk in chunks), default=0)
        if most <= VALUES_AT_ONCE:
            return None
        return max(1, VALUES_AT_ONCE * self.lengths[number] // most)

    def _chunks(self, number: int, columns: Iterable[str]) -> list[Chunk]:
        """Return the chunks of these columns, column by column, without encrypted ones."""
        leaves = itertools.chain.from_iterable(self._columns.leaves[name] for name in self._columns.own(columns))
        chunks = self._row_groups[number]
        return [chunks[leaf] for leaf in leaves if leaf not in chunks.encrypted]


@dataclass(frozen=True)
class _Parts:
    """What a footer has beside its row groups. The files of a dataset share it.

    Attributes:
        metadata: That of a file without rows.
        schema: Its schema, without metadata.
        columns: The columns of the schema.
        flat: By leaf column, whether it has one value in each row, and no lists.
        unit: That of times of 96 bits; None: ns.
        uncounted: See `uncounted_bytes`.
    """

    metadata: pq.FileMetaData
    schema: pa.Schema
    columns: ParquetColumns
    flat: Sequence[bool]
    unit: str | None
    uncounted: int


@lru_cache(PARTS_KEPT)
def _parts_of(footer: bytes) -> _Parts:
    """Return what Arrow finds in a footer without row groups, or in an unusual one with them."""
    check_fields(footer)
    data = pa.py_buffer(footer + len(footer).to_bytes(4, "little") + MAGIC)
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        # The schema of the reader of the rows: `metadata.schema` has bytes where newer readers have UUIDs.
        metadata, schema, unit = file.metadata, file.schema_arrow.remove_metadata(), None
    if columns_of(schema).has_ns and counts_microseconds(metadata):
        unit = "us"
        with pq.ParquetFile(pa.BufferReader(data), coerce_int96_timestamp_unit=unit) as again:
            schema = again.schema_arrow.remove_metadata()
    columns = columns_of(stored := columns_of(schema).stored(schema))
    if columns.leaf_count != metadata.num_columns:
        raise ValueError(f"{metadata.num_columns} columns, but its schema has {columns.leaf_count}")
    leaves = range(metadata.num_columns)
    flat = [not metadata.schema.column(leaf).max_repetition_level for leaf in leaves]
    return _Parts(metadata, stored, columns, flat, unit, uncounted_bytes(metadata.created_by))


@contextmanager
def _reading(obj: Object) -> Iterator[None]:
    """Raise DataError for what a damaged footer causes in the block."""
    try:
        yield
    except Exception:
        where = f"{obj.name} has a Parquet footer that cannot be read"
        # pyarrow raises these for names that are no text, and for numbers that are out of range.
        with as_data_error(where, *DAMAGE, LookupError, TypeError, OverflowError):
            raise


def _is_larger_decoded(chunk: Chunk) -> bool:
    """Return whether the values of a chunk may take far more bytes than its uncompressed pages."""
    return _has_codes(chunk) or not PREFIX_ENCODINGS.isdisjoint(chunk.encodings)


def _keeps_codes(chunks: Sequence[Chunk]) -> bool:
    """Return whether to read a column of text with its dictionary. Arrow cannot if it has pages of other encodings."""
    return any(map(_has_codes, chunks)) and all(UNCODED_ENCODINGS.isdisjoint(chunk.encodings) for chunk in chunks)


def _has_codes(chunk: Chunk) -> bool:
    """Return whether the chunk may be mostly dictionary indices, whose bytes do not show the size of the values.

    The footer does not say how many pages are dictionary-encoded, nor how many values the dictionary has. The bytes of
    the data pages decide: indices are short, and those of a dictionary without equal values have log2(values) bits.
    """
    dictionary = chunk.dictionary_page_offset
    if dictionary is None:
        return False
    size, values = chunk.total_uncompressed_size, chunk.num_values
    is_short = size < UNLIKE_BYTES * values
    if is_short and size < 2 * (DICTIONARY_BYTES + CODE_BYTES * values):
        return True
    if not dictionary or not values:
        return False
    data = chunk.total_compressed_size - (chunk.data_page_offset - dictionary)
    limit = CODE_BYTES * values if is_short else SHARED_BITS * values * math.log2(values) / 8
    return bool(data < limit)


def _buffer_bytes(ranges: Sequence[Span], capacity: int) -> int:
    """Return the bytes of Arrow's read buffer of each range, at most half of the capacity in all.

    0 if `capacity` holds the ranges. Without a buffer, Arrow reads whole column chunks.
    """
    if sum(stop - start for start, stop in ranges) <= capacity:
        return 0
    return max(1, min(BUFFER_BYTES, capacity // (2 * len(ranges))))


def _from_pool(blocks: Blocks, obj: Object, start: int, memory: memoryview) -> Future[None]:
    return blocks.submit(blocks.fetch_into, obj, start, memory)


def _from_origin(blocks: Blocks, obj: Object, start: int, memory: memoryview) -> Future[None]:
    """Fetch the range in this thread, because another one would take longer to begin."""
    blocks.fetch_into(obj, start, memory)
    return _DONE


def _from_file(file: memoryview, start: int, memory: memoryview) -> Future[None]:
    memory[:] = file[start : start + len(memory)]
    return _DONE


def _from_blocks(blocks: Blocks, obj: Object, start: int, memory: memoryview) -> Future[None]:
    memory[:] = blocks.read(obj, start, start + len(memory))
    return _DONE


_DONE: Future[None] = Future()
_DONE.set_result(None)

"""Parquet through the cache: footers and row groups."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.cache.blocks import Blocks, Object
from dataload.cache.file import BlockFile
from dataload.cache.tier import Allocate, Span
from dataload.errors import DataError, DataloadError

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
HELD_BYTES = 128 << 20  # of a row group, as it is stored, that are held in memory while it is decoded
STREAMED_BYTES = 1 << 20  # of a column at a time, of larger ones
GAP_BYTES = 256 << 10  # between chunks that are fetched all the same rather than with one more request
_TRAILER_BYTES = 8  # footer length (u32, little-endian), magic


def read_footer(obj: Object, blocks: Blocks) -> pq.FileMetaData:
    """The footer of a Parquet file, fetched once a host. Raises DataError when it is no Parquet file."""

    def fill(allocate: Allocate) -> None:
        footer = _fetch_footer(obj, blocks)
        allocate(len(footer))[:] = footer

    footer = blocks.tier.get_or_fill(blocks.key(obj, "footer"), fill)
    try:
        return pq.read_metadata(pa.BufferReader(pa.py_buffer(footer)))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{obj.path} has a Parquet footer that cannot be read: {str(error).strip()}") from error


def column_of(path: str, names: Collection[str]) -> str | None:
    """Which of these columns, dotted where they are members of structs, a leaf of a Parquet schema belongs to."""
    while path not in names:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return None
    return path


@contextmanager
def open_row_group(
    obj: Object, number: int, columns: Sequence[str], footer: pq.FileMetaData, blocks: Blocks
) -> Iterator[RowGroupReader]:
    """The columns of one row group, fetched with few requests and held in memory as long as the context lasts.

    Notes: what is larger than `HELD_BYTES` goes through the cache instead, in blocks, and so do row groups that are
    smaller than a block, which neighbours share.
    Raises DataError when the data cannot be decoded, OriginError.
    """
    group = footer.row_group(number)
    ranges = _ranges(group, frozenset(columns))
    stored = sum(group.column(leaf).total_compressed_size for leaf in range(group.num_columns))
    try:
        with ExitStack() as stack:
            source: Any
            at_once = 0
            if stored >= blocks.block_bytes and sum(stop - start for start, stop in ranges) <= HELD_BYTES:
                source = _Fetched(obj.size, ranges, stack.enter_context(blocks.fetched(obj, ranges)))
            else:
                source = stack.enter_context(BlockFile(blocks, obj))
                if stored >= blocks.block_bytes:
                    at_once = STREAMED_BYTES
                    for filling in [one for start, stop in ranges for one in blocks.fill(obj, start, stop)]:
                        stack.callback(filling.cancel)
            file = stack.enter_context(pq.ParquetFile(source, metadata=footer, buffer_size=at_once))
            yield RowGroupReader(file, number, list(columns))
    except DataloadError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{obj.path} row group {number} cannot be decoded: {str(error).strip()}") from error


class RowGroupReader:
    """Decodes some columns of one row group."""

    def __init__(self, file: pq.ParquetFile, number: int, columns: list[str]) -> None:
        self._file = file
        self._number = number
        self._columns = columns

    def tables(self, rows: int) -> Iterator[pa.Table]:
        """Its rows in tables of `rows` rows; the last may be smaller."""
        if self._file.metadata.row_group(self._number).num_rows <= rows:
            yield self._file.read_row_group(self._number, columns=self._columns, use_threads=False)
            return
        found: list[pa.RecordBatch] = []
        batches = self._file.iter_batches(
            rows, row_groups=[self._number], columns=self._columns, use_threads=False
        )  # of so many rows at most: values that are too long for one array end a batch before
        for batch in batches:
            found.append(batch)
            beyond = sum(map(len, found)) - rows
            if beyond >= 0:
                yield pa.Table.from_batches(found).slice(0, rows)
                found = [batch.slice(len(batch) - beyond)] if beyond else []
        if found:
            yield pa.Table.from_batches(found)


def _ranges(group: pq.RowGroupMetaData, columns: Collection[str]) -> list[Span]:
    """Where the chunks of these columns lie in their file, neighbours in one."""
    chunks = [group.column(leaf) for leaf in range(group.num_columns)]
    places = []
    for chunk in chunks:
        if column_of(chunk.path_in_schema, columns) is not None:
            first = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                first = min(first, chunk.dictionary_page_offset)
            places.append((first, first + chunk.total_compressed_size))
    joined: list[Span] = []
    for start, stop in sorted(places):
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


class _Fetched(io.RawIOBase):
    """A file of which only some ranges are there: all that pyarrow asks for of those columns."""

    def __init__(self, size: int, ranges: Sequence[Span], contents: Sequence[memoryview]) -> None:
        super().__init__()
        self._size = size
        self._ranges = ranges
        self._contents = contents
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (self._size if whence == io.SEEK_END else 0)
        return self._position

    def read_buffer(self, size: int) -> pa.Buffer:
        """The next `size` bytes, without a copy. Raises OSError when they are not there."""
        for (start, stop), content in zip(self._ranges, self._contents, strict=True):
            if start <= self._position and self._position + size <= stop:
                first = self._position - start
                self._position += size
                return pa.py_buffer(content[first : first + size])
        raise OSError(f"bytes {self._position} to {self._position + size} belong to none of the columns that are read")

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))


def _fetch_footer(obj: Object, blocks: Blocks) -> bytes:
    start = max(0, obj.size - TAIL_BYTES)
    tail = bytes(blocks.origin.read(obj.path, start, obj.size, obj.version)) if obj.size else b""
    if len(tail) < _TRAILER_BYTES or not tail.endswith(MAGIC):
        raise DataError(f"{obj.path} is not a Parquet file: take it out of the dataset, or name the files with a glob")
    size = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
    if size > obj.size:
        raise DataError(f"{obj.path} is cut short: its footer says {size} bytes and the object has {obj.size}")
    if size > len(tail):
        tail = bytes(blocks.origin.read(obj.path, obj.size - size, start, obj.version)) + tail
    return tail[-size:]

"""Parquet through the cache: footers and row groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.cache.blocks import Blocks, Object
from dataload.cache.stream import RangeStream
from dataload.cache.tier import Allocate, Span
from dataload.errors import DataError, DataloadError

MAGIC = b"PAR1"
# What is fetched of a file's end, where its footer is: a 64th of it, so that small files are not fetched for it.
LEAST_TAIL_BYTES, MOST_TAIL_BYTES, TAIL_SHARE = 8 << 10, 64 << 10, 64
SHARED_BYTES = 512 << 10  # of a row group with all its columns; smaller ones are not worth a request each
HELD_BYTES = 40 << 20  # of a row group, as it is stored, that are fetched before they are decoded
BUFFER_BYTES = 1 << 20  # of a column that is being decoded
CHUNK_BYTES = 1 << 20  # of a column; where they are smaller on average, they are fetched together and held
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
    """The columns of one row group; of them, `HELD_BYTES` are fetched now, the others as it is read.

    Notes: row groups of less than `SHARED_BYTES` go through the cache, in blocks, which neighbours share.
    Raises DataError when the data cannot be decoded, OriginError.
    """
    group = footer.row_group(number)
    ranges = _ranges(group, frozenset(columns))
    stored = sum(group.column(leaf).total_compressed_size for leaf in range(group.num_columns))
    fetch = _from_blocks if stored < SHARED_BYTES else _from_origin
    stream = RangeStream(partial(fetch, blocks, obj), obj, ranges, max(HELD_BYTES, len(columns) * CHUNK_BYTES))
    try:
        # Unless it is told otherwise, pyarrow fetches a row group whole before it decodes the first row. What is there
        # whole it need not read in pieces.
        buffer = 0 if stream.stays else BUFFER_BYTES
        with stream, pq.ParquetFile(stream, metadata=footer, buffer_size=buffer, pre_buffer=False) as file:
            stream.wait()
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
    """Where the chunks of these columns lie in their file; neighbours in one, unless they are too large to be held."""
    chunks = [group.column(leaf) for leaf in range(group.num_columns)]
    places = []
    for chunk in chunks:
        if column_of(chunk.path_in_schema, columns) is not None:
            first = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                first = min(first, chunk.dictionary_page_offset)
            places.append((first, first + chunk.total_compressed_size))
    places.sort()
    if sum(stop - start for start, stop in places) > max(HELD_BYTES, len(places) * CHUNK_BYTES):
        return places
    joined: list[Span] = []
    for start, stop in places:
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _from_origin(blocks: Blocks, obj: Object, start: int, stop: int) -> Future[memoryview]:
    return blocks.submit(blocks.fetch, obj, start, stop)


def _from_blocks(blocks: Blocks, obj: Object, start: int, stop: int) -> Future[memoryview]:
    found: Future[memoryview] = Future()
    found.set_result(blocks.read(obj, start, stop))
    return found


def _fetch_footer(obj: Object, blocks: Blocks) -> bytes:
    start = max(0, obj.size - min(MOST_TAIL_BYTES, max(LEAST_TAIL_BYTES, obj.size // TAIL_SHARE)))
    tail = bytes(blocks.origin.read(obj.path, start, obj.size, obj.version)) if obj.size else b""
    if len(tail) < _TRAILER_BYTES or not tail.endswith(MAGIC):
        raise DataError(f"{obj.path} is not a Parquet file: take it out of the dataset, or name the files with a glob")
    size = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
    if size > obj.size:
        raise DataError(f"{obj.path} is cut short: its footer says {size} bytes and the object has {obj.size}")
    if size > len(tail):
        tail = bytes(blocks.origin.read(obj.path, obj.size - size, start, obj.version)) + tail
    return tail[-size:]

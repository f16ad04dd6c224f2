"""Parquet through the cache: footers and row groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import Span
from dataload.errors import DataError, DataloadError
from dataload.formats.base import SHARED_BYTES, Bounds, RowGroupReader, joined
from dataload.formats.range_stream import RangeStream, pieces
from dataload.formats.schema import flatten, is_list, number, storage
from dataload.runtime.cached_property import cached_property

MAGIC = b"PAR1"
HELD_BYTES = 40 << 20  # of a row group, as it is stored, that are fetched before they are decoded
BUFFER_BYTES = 1 << 20  # of a column that is being decoded
CHUNK_BYTES = 1 << 20  # of a column; where they are smaller on average, they are fetched together and held
DICTIONARY_BYTES = 1 << 20  # of values, at which writers give up a chunk's dictionary: what follows is as it is
CODE_BYTES = 4  # of the code of a value, at most
UNLIKE_BYTES = 1 << 10  # of a value, from which on few are alike: a dictionary has them all
TRAILER_BYTES = 8  # footer length (u32, little-endian), magic


def fetch_footer(last: Callable[[int], bytes]) -> bytes:
    """The footer of a Parquet file. last: has so many of its last bytes fetched."""
    return last(int.from_bytes(last(TRAILER_BYTES)[:4], "little") + TRAILER_BYTES)


class ParquetFooter:
    """The footer of a Parquet file; see `Footer`."""

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self._metadata = metadata
        self.schema: pa.Schema = metadata.schema.to_arrow_schema().remove_metadata()

    @classmethod
    def from_bytes(cls, data: memoryview, obj: Object) -> ParquetFooter:
        """Raises DataError when it cannot be read."""
        try:
            return cls(pq.read_metadata(pa.BufferReader(pa.py_buffer(data))))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{obj.path} has a Parquet footer that cannot be read: {str(error).strip()}") from error

    @property
    def lengths(self) -> list[int]:
        return [self._metadata.row_group(number).num_rows for number in range(self._metadata.num_row_groups)]

    def stored_bytes(self, number: int) -> int:
        group = self._metadata.row_group(number)
        return sum(group.column(leaf).total_compressed_size for leaf in range(group.num_columns))

    def decoded_bytes(self, number: int, columns: Collection[str]) -> list[int]:
        return [self._decoded(name, self._chunks(number, [name])) for name in columns]

    def _decoded(self, column: str, chunks: Sequence[pq.ColumnChunkMetaData]) -> int:
        dtype = self._numbers.get(column)
        if dtype is not None:  # Encoded they may be small, but of numbers it is known how large they are.
            return int(dtype.itemsize * sum(chunk.num_values for chunk in chunks))
        return sum(chunk.total_uncompressed_size for chunk in chunks)

    def coded(self, number: int, columns: Collection[str]) -> list[str]:
        return [name for name in columns if any(map(_is_coded, self._chunks(number, [name])))]

    def held_bytes(self, number: int, columns: Sequence[str]) -> int:
        ranges = _ranges(self._chunks(number, columns))
        return min(sum(stop - start for start, stop in ranges), _room(columns))

    def fetched(self, number: int, columns: Sequence[str]) -> tuple[list[Span], list[Span]]:
        ranges = _ranges(self._chunks(number, columns))
        if self.stored_bytes(number) < SHARED_BYTES:
            return ranges, []
        return [], pieces(ranges, _room(columns))

    def bounds(self, number: int, column: str, kind: pa.DataType) -> Bounds:
        known = self._metadata.row_group(number).column(self._leaves[column].start).statistics
        if known is None:
            return Bounds(None, None, None)
        nulls = cast("int", known.null_count) if known.has_null_count else None
        if not known.has_min_max or pa.types.is_float16(kind):
            return Bounds(None, None, nulls)
        # Python's own times have no nanoseconds; the file's numbers count in the unit of the type.
        low, high = (known.min_raw, known.max_raw) if pa.types.is_temporal(kind) else (known.min, known.max)
        # Some writers let NaN into the bounds of floats, against the rule.
        return Bounds(low, high, nulls) if low <= high else Bounds(None, None, nulls)

    @contextmanager
    def open_row_group(
        self, obj: Object, number: int, columns: Sequence[str], blocks: Blocks
    ) -> Iterator[RowGroupReader]:
        """Of the columns, `HELD_BYTES` are fetched now, the others as they are read; see `Footer`."""
        ranges = _ranges(self._chunks(number, columns))
        fetch = _from_blocks if blocks.retains_blocks and self.stored_bytes(number) < SHARED_BYTES else _from_origin
        stream = RangeStream(partial(fetch, blocks, obj), obj, ranges, _room(columns))
        try:
            # Unless it is told otherwise, pyarrow fetches a row group whole before it decodes the first row. What is
            # there whole it need not read in pieces.
            buffer = 0 if stream.stays else BUFFER_BYTES
            with stream, pq.ParquetFile(stream, metadata=self._metadata, buffer_size=buffer, pre_buffer=False) as file:
                stream.wait()
                yield _Reader(file, number, list(columns))
        except DataloadError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{obj.path} row group {number} cannot be decoded: {str(error).strip()}") from error

    def _chunks(self, number: int, columns: Iterable[str]) -> list[pq.ColumnChunkMetaData]:
        """Those of these columns, column by column."""
        group = self._metadata.row_group(number)
        return [group.column(leaf) for name in columns for leaf in self._leaves[name]]

    @cached_property
    def _numbers(self) -> dict[str, np.dtype[Any]]:
        """The columns of lists of numbers, and what these are in batches."""
        lists = ((field.name, storage(field.type)) for field in flatten(self.schema))
        found = ((name, number(storage(kind.value_type))) for name, kind in lists if is_list(kind))
        return {name: dtype for name, dtype in found if dtype is not None}

    @cached_property
    def _leaves(self) -> dict[str, range]:
        """Which of the file's columns, the leaves of its tree of types, hold each of a flat schema's."""
        flat = flatten(self.schema)
        stops = list(itertools.accumulate(_leaf_count(field.type) for field in flat))
        return dict(zip(flat.names, map(range, [0, *stops], stops), strict=True))


class _Reader:
    def __init__(self, file: pq.ParquetFile, number: int, columns: list[str]) -> None:
        self._file = file
        self._number = number
        self._columns = columns

    def tables(self, rows: int) -> Iterator[pa.Table]:
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


def _is_coded(chunk: pq.ColumnChunkMetaData) -> bool:
    """Whether most of it may be codes of values in its dictionary, so that its bytes do not tell those of the values.

    A footer does not tell how many pages have codes; so it is told by how many bytes there are for each value.
    """
    size, values = chunk.total_uncompressed_size, chunk.num_values
    most = 2 * (DICTIONARY_BYTES + CODE_BYTES * values)
    return bool(chunk.has_dictionary_page and size < min(most, UNLIKE_BYTES * values))


def _leaf_count(kind: pa.DataType) -> int:
    kind = storage(kind)
    inner = [kind.field(number) for number in range(kind.num_fields)]
    return sum(_leaf_count(field.type) for field in inner) if inner else 1


def _ranges(chunks: Sequence[pq.ColumnChunkMetaData]) -> list[Span]:
    """Where these chunks lie in their file; neighbours in one, unless they are too large to be held."""
    places = []
    for chunk in chunks:
        first = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            first = min(first, chunk.dictionary_page_offset)
        places.append((first, first + chunk.total_compressed_size))
    places.sort()
    too_large = sum(stop - start for start, stop in places) > max(HELD_BYTES, len(places) * CHUNK_BYTES)
    return places if too_large else joined(places)


def _room(columns: Sequence[str]) -> int:
    """Bytes of these columns of a row group that are held, as they are stored."""
    return max(HELD_BYTES, len(columns) * CHUNK_BYTES)


def _from_origin(blocks: Blocks, obj: Object, start: int, stop: int) -> Future[memoryview]:
    return blocks.submit(blocks.fetch, obj, start, stop)


def _from_blocks(blocks: Blocks, obj: Object, start: int, stop: int) -> Future[memoryview]:
    found: Future[memoryview] = Future()
    found.set_result(blocks.read(obj, start, stop))
    return found

"""Records: decoded rows as bytes of fixed length, which a gather copies without interpreting them.

A blob has three sections, each aligned to 64 bytes: the records, one `Layout.dtype` per row; for each ragged column a
heap, the values of all rows one after the other; and the end: int64 [columns, 3], the offset of each heap, the bytes of
its table and its bytes, and the digest of the blob's key. The heap of strings or bytes begins with a table, the `SPAN`
of each distinct value in the bytes that follow. The heap of a nested column is an Arrow stream of one array.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.tier import BlobKey
from dataload.errors import DataError
from dataload.formats.arrow_arrays import indices, plain, plain_type
from dataload.formats.arrow_types import bare
from dataload.formats.schema import NULL, SPAN, Field, Layout
from dataload.rows.columns import (
    Array,
    Coded,
    Column,
    Dense,
    Nested,
    Ragged,
    arrow_strings,
    bounds_of,
    codes_of,
    concatenate,
    lengths_of,
    spans_of,
    strings_of,
    used_values,
    with_nulls,
)
from dataload.runtime.cached_property import cached_property

VERSION = 6
KEPT_USES = 8  # of a string, from which on it is kept in memory as a Python object
FEW_STRINGS = 32  # rows of each blob on average; with fewer, a loop is faster than Arrow
CACHED_BYTES, LEAST_AT_ONCE = 512 << 10, 1 << 10  # of records that are filled at a time, and how many
_ALIGN = 64
NO_KEY = bytes(32)  # the digest in a blob that is not cached
_HEAP_START = np.dtype((np.int64, (3,)))  # its offset, the bytes of its table, and its bytes
_HEAP_ELEMENTS = NULL  # The offsets and lengths in a record have 32 bits.


def pack(
    columns: Mapping[str, Column],
    rows: int,
    layout: Layout,
    digest: bytes,
    where: str,
    allocate: Callable[[int], memoryview],
) -> None:
    """Write rows as a blob of records.

    Args:
        columns: The columns, by name.
        rows: Number of rows.
        layout: Layout of a record.
        digest: Digest of the blob's key.
        where: File and row group, for errors.
        allocate: Returns writable memory of a given size in bytes.

    Raises:
        DataError: A ragged column has more values than 32 bits can count. It names `where` and the column.
    """
    heaps = [_Heap(columns[field.name], field, f"{where} column {field.name!r}") for field in layout.ragged]
    starts, end = [], _aligned(rows * layout.dtype.itemsize)
    for heap in heaps:
        starts.append((end, heap.table_bytes, heap.nbytes))
        end = _aligned(end + heap.nbytes)
    memory = np.frombuffer(allocate(end + _end_bytes(layout)), np.uint8)
    records = memory[: rows * layout.dtype.itemsize].view(layout.dtype)
    memory[records.nbytes : _aligned(records.nbytes)] = 0  # Equal rows make equal blobs.
    if sum(field.in_record.itemsize for field in layout.fields) < layout.dtype.itemsize:
        records.view(np.uint8)[:] = 0
    dense: list[tuple[Array, Array]] = []
    for field in layout.fields:
        column = columns[field.name]
        if isinstance(column, Dense):
            dense.append((records[field.name], column.values))
        elif isinstance(column, Nested):
            records[field.name] = np.arange(rows)
        elif field.is_bytes:
            records[field.name] = codes_of(column)
        else:
            records[field.name] = spans_of(column)
    step = _rows_at_once(layout, rows)
    for first in range(0, rows, step):
        for target, values in dense:
            target[first : first + step] = values[first : first + step]
    for (start, *_), heap in zip(starts, heaps, strict=True):
        heap.write(memory[start : start + heap.nbytes])
        memory[start + heap.nbytes : _aligned(start + heap.nbytes)] = 0
    memory[end:] = np.frombuffer(np.array(starts, np.int64).tobytes() + digest, np.uint8)


def _rows_at_once(layout: Layout, rows: int) -> int:
    """Return how many records to fill column by column. They stay in the processor's cache, unless they are long."""
    fitting = CACHED_BYTES // layout.dtype.itemsize
    return fitting if fitting >= LEAST_AT_ONCE else max(1, rows)


def packed_bytes(rows: int, heaps: Iterable[int], layout: Layout) -> int:
    """Return the bytes of a blob of `rows` records. heaps: bytes of the values and the table of each ragged column."""
    sizes = [_aligned(size) for size in heaps]
    return _aligned(rows * layout.dtype.itemsize) + sum(sizes) + _end_bytes(layout)


def check(key: BlobKey, blob: memoryview, rows: int, layout: Layout) -> None:
    """Check that a blob is one that `pack` wrote, as far as its structure tells: every offset, and no value.

    `Blob` and the gathers trust what is checked here: a wild offset would end the process.

    Raises:
        ValueError: The blob has another structure.
        pa.ArrowException: So has a nested column.
    """
    end = len(blob) - _end_bytes(layout)
    expected = _aligned(rows * layout.dtype.itemsize)
    _require(expected <= end, "is cut short")
    _require(blob[-len(key.digest) :] == key.digest, "is of another key")
    records = np.frombuffer(blob[: rows * layout.dtype.itemsize], layout.dtype)
    for field in layout.fields:
        if np.dtype(field.dtype) == np.bool_ and not field.ragged:
            _require(records[field.name].view(np.uint8).max(initial=0) <= 1, f"has no booleans in {field.name!r}")
    for field, (start, table_bytes, size) in zip(layout.ragged, _starts(blob, layout), strict=True):
        stop = _aligned(start + size)
        _require(start == expected and 0 <= table_bytes <= size and stop <= end, f"has {field.name!r} out of place")
        _check_heap(blob[start : start + size], table_bytes, records[field.name], field)
        expected = stop
    _require(expected == end, "has bytes of no column")


def _check_heap(heap: memoryview, table_bytes: int, places: Array, field: Field) -> None:
    """Check the heap of a ragged column. places: what the records say of it."""
    wrong, in_order = f"has values of {field.name!r} out of place", np.arange(len(places))
    if field.kind == "nested":
        _require(table_bytes == 0 and np.array_equal(places, in_order), wrong)
        source = pa.BufferReader(pa.py_buffer(heap))
        with pa.ipc.open_stream(source) as stream:
            array = stream.read_next_batch().column(0)
            _require(array.type == plain_type(field.type) and len(array) == len(places), wrong)
            array.view(bare(array.type)).validate(full=True)  # Text may be invalid in the file, too.
        return
    spans = places
    if field.is_bytes:
        _require(table_bytes % SPAN.itemsize == 0, wrong)
        spans = np.frombuffer(heap[:table_bytes], SPAN)
        _require(len(spans) <= len(places) and (not len(places) or places.max() < len(spans)), wrong)
        _require(len(spans) < len(places) or np.array_equal(places, in_order), wrong)
    else:
        _require(table_bytes == 0, wrong)
    lengths, _ = lengths_of(spans)
    ends = np.cumsum(lengths)
    _require(np.array_equal(spans[:, 0], ends - lengths), wrong)
    _require(table_bytes + lengths.sum() * field.element_bytes == len(heap), wrong)


def _require(holds: object, wrong: str) -> None:
    if not holds:
        raise ValueError(f"the blob {wrong}")


def _end_bytes(layout: Layout) -> int:
    """Return the bytes of the end of a blob, which says where its heaps are, and of which key it is."""
    return len(layout.ragged) * _HEAP_START.itemsize + len(NO_KEY)


def _starts(blob: memoryview, layout: Layout) -> list[tuple[int, int, int]]:
    """Return the offset of each heap, the bytes of its table, and its bytes."""
    end = blob[len(blob) - _end_bytes(layout) : len(blob) - len(NO_KEY)]
    return [(start, table, size) for start, table, size in np.frombuffer(end, _HEAP_START).tolist()]


class Blob:
    """A view of a blob of records, which is checked.

    Args:
        blob: Bytes of the blob.
        rows: Number of rows.
        layout: Layout of a record.

    Attributes:
        rows: As above.
        records: Bytes of the records.
    """

    def __init__(self, blob: memoryview, rows: int, layout: Layout) -> None:
        self._layout = layout
        self.rows = rows
        self.records = blob[: rows * layout.dtype.itemsize]
        self._heaps: dict[str, memoryview] = {}
        self._nested: dict[str, pa.Array] = {}
        self._spans: dict[str, Array] = {}
        self._texts: dict[str, tuple[Array, Array]] = {}  # the strings, object [distinct], and which are made
        for field, (start, table_bytes, size) in zip(layout.ragged, _starts(blob, layout), strict=True):
            self._heaps[field.name] = blob[start + table_bytes : start + size]
            if field.is_bytes:
                self._spans[field.name] = np.frombuffer(blob[start : start + table_bytes], SPAN)

    def column(self, field: Field) -> Column:
        """Return all values of a column, as they were packed."""
        if field.kind == "nested":
            return Nested(self.nested(field))
        values = np.frombuffer(self.records, self._layout.dtype)[field.name]
        if not field.ragged:
            return Dense(values)
        if field.is_bytes:
            spans = self.spans(field)
            if len(spans) < self.rows:
                return Coded(np.frombuffer(self._heaps[field.name], np.uint8), spans, values.astype(np.int64))
            values = spans
        lengths, valid = lengths_of(values)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return Ragged(_elements(self._heaps[field.name], field, int(offsets[-1])), offsets, valid)

    def keeps_strings(self, field: Field) -> bool:
        """Return whether `strings` makes each distinct string of a column once, because many rows share it."""
        return len(self.spans(field)) * KEPT_USES <= self.rows

    def strings(self, field: Field, codes: Array) -> Array:
        """Return the strings of some rows, object [n]; None for a null.

        Args:
            field: A string column.
            codes: `CODE` of each row, int64 [n].

        Raises:
            UnicodeDecodeError: A value is not UTF-8.
        """
        spans, heap = self.spans(field), self._heaps[field.name]
        if not self.keeps_strings(field):
            return np.array(strings_of([heap] * len(codes), spans[codes]), np.object_)
        empty = np.empty(len(spans), np.object_), np.zeros(len(spans), np.bool_)
        texts, is_made = self._texts.setdefault(field.name, empty)
        new = np.unique(codes[~is_made[codes]])
        if len(new):
            texts[new] = strings_of([heap] * len(new), spans[new])
            is_made[new] = True  # last: another thread may look strings up
        found: Array = texts[codes]
        return found

    def spans(self, field: Field) -> Array:
        """Return the `SPAN` of each distinct value of a column of strings or bytes, uint32 [distinct, 2]."""
        return self._spans[field.name]

    def heap(self, field: Field) -> memoryview:
        """Return the values of a ragged column: bytes, or numbers of its dtype."""
        return self._heaps[field.name]

    def nested(self, field: Field) -> pa.Array:
        """Return a nested column, which is a view of the blob."""
        array = self._nested.get(field.name)
        if array is None:
            [array] = pa.ipc.open_stream(pa.py_buffer(self._heaps[field.name])).read_next_batch().columns
            self._nested[field.name] = array
        return array


def joined_columns(
    contents: Sequence[memoryview], lengths: Sequence[int], layout: Layout, ratio: int, chosen: Layout
) -> Generator[dict[str, Column], None, None]:
    """Yield some columns of every `ratio` blobs together.

    Args:
        contents: The blobs.
        lengths: Their rows.
        layout: Their columns.
        ratio: Blobs to join.
        chosen: The columns to return.
    """
    blobs = [Blob(content, rows, layout) for content, rows in zip(contents, lengths, strict=True)]
    for first in range(0, len(blobs), ratio):
        run = blobs[first : first + ratio]
        yield {field.name: concatenate([blob.column(field) for blob in run]) for field in chosen.fields}


@dataclass(frozen=True)
class Records:
    """A batch of n gathered rows.

    Attributes:
        layout: Layout of a record.
        rows: The records, `layout.dtype` [n].
        blobs: The blobs that hold the ragged values.
        which: Index in `blobs` of each row's blob, int64 [n].
        place: Names the files that hold the ragged values, see `reading`.
    """

    layout: Layout
    rows: Array
    blobs: Sequence[Blob]
    which: Array
    place: str = ""

    @classmethod
    def none(cls, layout: Layout) -> Records:
        """Return an empty batch."""
        return cls(layout, np.empty(0, layout.dtype), [], np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Records:
        return replace(self, rows=self.rows[part], which=self.which[part])

    def dense(self, field: Field) -> Array:
        """Return a dense column, [n, …], as a strided view."""
        values: Array = self.rows[field.name]
        return values

    def spans(self, field: Field) -> Array:
        """Return the `SPAN` of each value of a ragged column that is not nested, uint32 [n, 2]."""
        if not field.is_bytes:
            spans: Array = self.rows[field.name]
            return spans
        found = self._looked_up(
            field, np.uint64, lambda blob, codes: blob.spans(field).view(np.uint64)[:, 0].take(codes, mode="clip")
        )
        return found.view(SPAN.base).reshape(-1, *SPAN.shape)

    def _looked_up(self, field: Field, dtype: npt.DTypeLike, look_up: Callable[[Blob, Array], Array]) -> Array:
        """Return look_up(blob, codes of its rows) for each blob, in the order of the rows, [n] of `dtype`."""
        order, parts = self._by_blob
        codes, found = self.rows[field.name][order].astype(np.intp), np.empty(len(self), dtype)
        for blob, part in parts:
            found[part] = look_up(blob, codes[part])
        in_order = np.empty(len(self), dtype)
        in_order[order] = found
        return in_order

    @cached_property
    def _by_blob(self) -> tuple[Array, list[tuple[Blob, slice]]]:
        """The rows of the first blob, then those of the second, and so on, int64 [n]; and the part of each blob."""
        order = np.argsort(self.which.astype(np.min_scalar_type(len(self.blobs))), kind="stable")  # a radix sort
        stops = np.cumsum(np.bincount(self.which, minlength=len(self.blobs))).tolist()
        parts = zip(self.blobs, pairwise([0, *stops]), strict=True)
        return order, [(blob, slice(start, stop)) for blob, (start, stop) in parts if start < stop]

    def views(self, field: Field) -> list[memoryview | None]:
        """Return the values of a column of strings, bytes or lists as views of their bytes; None for a null."""
        spans = self.spans(field)
        views = [heap[start:stop] for heap, start, stop in bounds_of(self._heaps(field), spans, field.element_bytes)]
        return with_nulls(views, spans)

    def strings(self, field: Field) -> list[str | None] | pa.LargeStringArray:
        """Return the values of a string column: an Arrow array, or a list if that is faster. A null is None.

        Raises:
            UnicodeDecodeError: A value is not UTF-8.
        """
        order, parts = self._by_blob
        shared = sum(part.stop - part.start for blob, part in parts if blob.keeps_strings(field))
        if len(self) >= FEW_STRINGS * len(parts) and 2 * shared < len(self):
            heaps, rows = [blob.heap(field) for blob, _ in parts], (order[part] for _, part in parts)
            with suppress(pa.ArrowInvalid):  # not UTF-8: the error below says where
                if (array := arrow_strings(heaps, rows, self.spans(field))) is not None:
                    return array
        return self._looked_up(field, np.object_, lambda blob, codes: blob.strings(field, codes)).tolist()

    def nested(self, field: Field) -> pa.Array:
        """Return a nested column as an Arrow array."""
        order, parts = self._by_blob
        if not parts:
            return plain(pa.nulls(0, field.type))
        codes, places = self.rows[field.name][order].astype(np.int64), np.empty(len(self), np.int64)
        places[order] = np.arange(len(self))
        taken = [blob.nested(field).take(indices(codes[part])) for blob, part in parts]
        return pa.concat_arrays(taken).take(indices(places))

    def _heaps(self, field: Field) -> list[memoryview]:
        """Return the heap of each row's value."""
        heaps = [blob.heap(field) for blob in self.blobs]
        return [heaps[blob] for blob in self.which.tolist()]

    def ragged(self, field: Field) -> Ragged:
        """Return copies of the values of a ragged column, one after the other."""
        spans = self.spans(field)
        lengths, valid = lengths_of(spans)
        parts = [heap[start:stop] for heap, start, stop in bounds_of(self._heaps(field), spans, field.element_bytes)]
        joined = bytearray().join(parts)  # writable without another copy
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return Ragged(_elements(joined, field, int(offsets[-1])), offsets, valid)


class _Heap:
    """The values of a ragged column as bytes.

    Args:
        column: The column.
        field: Its name and kind.
        where: File, row group and column, for errors.

    Attributes:
        table_bytes: Bytes of the table of spans at its beginning.
        nbytes: Number of bytes, with the table.
    """

    def __init__(self, column: Column, field: Field, where: str) -> None:
        assert not isinstance(column, Dense)
        self.table_bytes = 0
        self._values: Any
        if isinstance(column, Nested):
            self._values = pa.record_batch([column.values], ["values"])
            sink = pa.MockOutputStream()
            self._write_to(sink)
            self.nbytes = int(sink.size())
            return
        used = used_values(column)
        if len(used) >= _HEAP_ELEMENTS:
            raise DataError(f"{where} has {len(used)} elements, more than a blob can hold: write smaller row groups")
        self._values = [np.ascontiguousarray(used)]
        if field.is_bytes:
            table = spans_of(column)
            self.table_bytes = table.nbytes
            self._values.insert(0, table.reshape(-1))
        self.nbytes = sum(part.nbytes for part in self._values)

    def write(self, memory: Array) -> None:
        """Write the table and the values to memory of `nbytes` bytes."""
        if isinstance(self._values, pa.RecordBatch):
            self._write_to(pa.FixedSizeBufferWriter(pa.py_buffer(memory)))
        else:
            np.concatenate([part.reshape(-1).view(np.uint8) for part in self._values], out=memory)

    def _write_to(self, sink: Any) -> None:
        with sink, pa.ipc.new_stream(sink, self._values.schema) as stream:
            stream.write_batch(self._values)


def _elements(heap: bytearray | memoryview, field: Field, count: int) -> Array:
    """Return a view of the elements of all lists of a column, [count, …]."""
    values: Array = np.frombuffer(heap, field.dtype)
    return values.reshape(count, *field.shape) if field.shape else values


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

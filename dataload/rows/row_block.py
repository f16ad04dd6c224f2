"""Records: decoded rows as bytes of fixed length, which a gather copies without interpreting them.

A blob has three sections, each aligned to 64 bytes: the records, one `Layout.dtype` per row; for each ragged column a
heap, the values of all rows one after the other; and the offset of each heap, as int64. The heap of a nested column is
an Arrow stream of one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.errors import DataError
from dataload.formats.schema import NULL, Field, Layout
from dataload.rows.arrow_arrays import plain
from dataload.rows.columns import Array, Coded, Column, Dense, Nested, Ragged, spans_of

VERSION = 1
KEPT_USES = 8  # of a string, from which on it is kept in memory as a Python object
_ALIGN = 64
_WORD = np.dtype(np.int64)
_HEAP_ELEMENTS = NULL  # The offsets and lengths in a record have 32 bits.


def pack(
    columns: Mapping[str, Column], rows: int, layout: Layout, where: str, allocate: Callable[[int], memoryview]
) -> None:
    """Write rows as a blob of records.

    Args:
        columns: The columns, by name.
        rows: Number of rows.
        layout: Layout of a record.
        where: File and row group, for errors.
        allocate: Returns writable memory of a given size in bytes.

    Raises:
        DataError: A ragged column has more values than 32 bits can count. It names `where` and the column.
    """
    heaps = [_Heap(columns[field.name], f"{where} column {field.name!r}") for field in layout.ragged]
    starts, end = [], _aligned(rows * layout.dtype.itemsize)
    for heap in heaps:
        starts.append(end)
        end = _aligned(end + heap.nbytes)
    memory = np.frombuffer(allocate(end + len(starts) * _WORD.itemsize), np.uint8)
    records = memory[: rows * layout.dtype.itemsize].view(layout.dtype)
    for field in layout.fields:
        column = columns[field.name]
        if isinstance(column, Dense):
            records[field.name] = column.values
        elif isinstance(column, Nested):
            records[field.name] = np.arange(rows)
        else:
            records[field.name] = spans_of(column)
    for start, heap in zip(starts, heaps, strict=True):
        heap.write(memory[start : start + heap.nbytes])
    memory[end:].view(_WORD)[:] = starts


def packed_bytes(rows: int, heaps: Iterable[int], layout: Layout) -> int:
    """Return the size of a blob in bytes.

    Args:
        rows: Number of rows.
        heaps: Bytes of the values of each ragged column.
        layout: Layout of a record.
    """
    sizes = [_aligned(size) for size in heaps]
    return _aligned(rows * layout.dtype.itemsize) + sum(sizes) + len(sizes) * _WORD.itemsize


class _Texts(dict[int, str | None]):
    """The strings of a heap by span, made when they are first looked up. A span is read as one integer.

    Args:
        heap: The UTF-8 bytes of the strings.
    """

    def __init__(self, heap: memoryview) -> None:
        self._heap = heap

    def __missing__(self, span: int) -> str | None:
        start, count = span & NULL, span >> 32
        text = None if count == NULL else str(self._heap[start : start + count], "utf-8")
        self[span] = text
        return text


class Blob:
    """A view of a blob of records.

    Args:
        blob: Bytes of the blob.
        rows: Number of rows.
        layout: Layout of a record.

    Attributes:
        records: Bytes of the records.
    """

    def __init__(self, blob: memoryview, rows: int, layout: Layout) -> None:
        self._layout = layout
        self.records = blob[: rows * layout.dtype.itemsize]
        self._heaps: dict[str, memoryview] = {}
        self._nested: dict[str, pa.Array] = {}
        self._uses: dict[str, float] = {}
        self._texts: dict[str, _Texts] = {}
        if layout.ragged:
            starts = np.frombuffer(blob[-len(layout.ragged) * _WORD.itemsize :], _WORD).tolist()
            ends = [*starts[1:], len(blob) - len(starts) * _WORD.itemsize]
            for field, start, end in zip(layout.ragged, starts, ends, strict=True):
                self._heaps[field.name] = blob[start:end]

    def column(self, field: Field) -> Column:
        """Return all values of a column, as they were packed."""
        if field.kind == "nested":
            return Nested(self.nested(field))
        values = np.frombuffer(self.records, self._layout.dtype)[field.name]
        if not field.ragged:
            return Dense(values)
        if self.shares_values(field):
            return Coded(np.frombuffer(self._heaps[field.name], np.uint8), values)
        lengths, valid = _lengths(values)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        heap = self._heaps[field.name][: offsets[-1] * np.dtype(field.dtype).itemsize]
        return Ragged(np.frombuffer(heap, field.dtype), offsets, valid)

    def shares_values(self, field: Field) -> bool:
        """Return whether rows of a column of strings or bytes share values, see `Coded`."""
        return field.kind != "list" and self._uses_of(field) > 1

    def _uses_of(self, field: Field) -> float:
        """Return how many rows use a byte of a ragged column on average."""
        found = self._uses.get(field.name)
        if found is None:
            lengths, _ = _lengths(np.frombuffer(self.records, self._layout.dtype)[field.name])
            found = int(lengths.sum()) / max(1, len(self._heaps[field.name]))
            self._uses[field.name] = found
        return found

    def texts(self, field: Field) -> _Texts:
        """Return the strings of a column by span. Strings that many rows share are kept, so each is made once."""
        if self._uses_of(field) < KEPT_USES:
            return _Texts(self._heaps[field.name])
        return self._texts.setdefault(field.name, _Texts(self._heaps[field.name]))

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


@dataclass(frozen=True)
class Records:
    """A batch of n gathered rows.

    Attributes:
        layout: Layout of a record.
        rows: The records, `layout.dtype` [n].
        blobs: The blobs that hold the ragged values.
        which: Index in `blobs` of each row's blob, int64 [n].
    """

    layout: Layout
    rows: Array
    blobs: Sequence[Blob]
    which: Array

    @classmethod
    def none(cls, layout: Layout) -> Records:
        """Return an empty batch."""
        return cls(layout, np.empty(0, layout.dtype), [], np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Records:
        return Records(self.layout, self.rows[part], self.blobs, self.which[part])

    def dense(self, field: Field) -> Array:
        """Return a dense column, [n, …], as a strided view."""
        values: Array = self.rows[field.name]
        return values

    def neighbours(self, fields: Sequence[Field]) -> Array | None:
        """Return scalar columns of one dtype as a strided view [n, len(fields)].

        Returns:
            None if the columns are not adjacent in the records.
        """
        dtype = np.dtype(fields[0].dtype)
        first = self.layout.offset(fields[0])
        if [self.layout.offset(field) for field in fields] != [first + dtype.itemsize * n for n in range(len(fields))]:
            return None
        as_bytes = self.rows.view(np.uint8).reshape(len(self), self.layout.dtype.itemsize)
        return as_bytes[:, first : first + dtype.itemsize * len(fields)].view(dtype)

    def views(self, field: Field) -> list[memoryview | None]:
        """Return the values of a ragged column as views of their bytes; None for a null. Nothing is copied."""
        views: list[memoryview | None] = [heap[start:stop] for heap, start, stop in self._spans(field)]
        return self._with_nulls(field, views)

    def strings(self, field: Field) -> list[str | None]:
        """Return the values of a string column; None for a null.

        Raises:
            UnicodeDecodeError: A value is not UTF-8.
        """
        if any(blob.shares_values(field) for blob in self.blobs):
            texts = [blob.texts(field) for blob in self.blobs]
            spans = np.ascontiguousarray(self.rows[field.name]).view("<u8")[:, 0].tolist()
            return [texts[blob][span] for blob, span in zip(self.which.tolist(), spans, strict=True)]
        strings: list[str | None] = [str(heap[start:stop], "utf-8") for heap, start, stop in self._spans(field)]
        return self._with_nulls(field, strings)

    def nested(self, field: Field) -> pa.Array:
        """Return a nested column as an Arrow array."""
        if not self.blobs:
            return plain(pa.nulls(0, field.type))
        order = np.argsort(self.which, kind="stable")
        stops = np.cumsum(np.bincount(self.which, minlength=len(self.blobs)))
        parts = np.split(self.rows[field.name][order], stops[:-1])
        taken = [blob.nested(field).take(pa.array(part)) for blob, part in zip(self.blobs, parts, strict=True)]
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return pa.concat_arrays(taken).take(pa.array(places))

    def nulls(self, field: Field) -> Array:
        """Return which values of a ragged column are null, bool [n]."""
        found: Array = self.rows[field.name][:, 1] == NULL
        return found

    def _with_nulls(self, field: Field, values: list[Any]) -> list[Any]:
        for row in np.flatnonzero(self.nulls(field)).tolist():
            values[row] = None
        return values

    def _spans(self, field: Field) -> Iterable[tuple[memoryview, int, int]]:
        """Return (heap, first byte, end) of each value of a ragged column."""
        rows, size = self.rows[field.name], np.dtype(field.dtype).itemsize
        lengths, _ = _lengths(rows)
        starts = rows[:, 0].astype(np.int64) * size
        heaps = [blob.heap(field) for blob in self.blobs]
        return zip([heaps[blob] for blob in self.which.tolist()], starts.tolist(), (starts + lengths * size).tolist())  # noqa: B905 (of one length)

    def ragged(self, field: Field) -> Ragged:
        """Return copies of the values of a ragged column, one after the other."""
        lengths, valid = _lengths(self.rows[field.name])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        joined = b"".join([heap[start:stop] for heap, start, stop in self._spans(field)])
        return Ragged(np.frombuffer(bytearray(joined), field.dtype), offsets, valid)


class _Heap:
    """The values of a ragged column as bytes.

    Args:
        column: The column.
        where: File, row group and column, for errors.

    Attributes:
        nbytes: Number of bytes.
    """

    def __init__(self, column: Column, where: str) -> None:
        assert not isinstance(column, Dense)
        self._values: Any
        if isinstance(column, Nested):
            self._values = pa.record_batch([column.values], ["values"])
            sink = pa.MockOutputStream()
            self._write_to(sink)
            self.nbytes = int(sink.size())
            return
        used = column.values
        if isinstance(column, Ragged):
            used = used[column.offsets[0] : column.offsets[-1]]
        if len(used) >= _HEAP_ELEMENTS:
            raise DataError(f"{where} has {len(used)} elements in a few thousand rows: write smaller row groups")
        self._values = np.ascontiguousarray(used)
        self.nbytes = self._values.nbytes

    def write(self, memory: Array) -> None:
        """Write the values to memory of `nbytes` bytes."""
        if isinstance(self._values, pa.RecordBatch):
            self._write_to(pa.FixedSizeBufferWriter(pa.py_buffer(memory)))
        else:
            memory[:] = self._values.view(np.uint8)

    def _write_to(self, sink: Any) -> None:
        with sink, pa.ipc.new_stream(sink, self._values.schema) as stream:
            stream.write_batch(self._values)


def _lengths(spans: Array) -> tuple[Array, Array | None]:
    """Return the number of elements of each span, int64 [n], and which are not null; None: all."""
    lengths = spans[:, 1].astype(np.int64)
    nulls = lengths == NULL
    if not nulls.any():
        return lengths, None
    lengths[nulls] = 0
    return lengths, ~nulls


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

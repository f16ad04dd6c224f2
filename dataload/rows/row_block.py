"""Records: decoded rows as bytes of fixed length, which a gather copies without interpreting them.

A blob has three sections, each aligned to 64 bytes: the records, one `Layout.dtype` per row; for each ragged column a
heap, the values of all rows one after the other; and the offset of each heap, as int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataload.errors import DataError
from dataload.formats.schema import Field, Layout
from dataload.rows.arrow_decode import Array, Column, Dense, Ragged

VERSION = 0
_ALIGN = 64
_WORD = np.dtype(np.int64)
_HEAP_ELEMENTS = 2**32  # The offsets and lengths in a record have 32 bits.


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
    heaps = [columns[field.name] for field in layout.ragged]
    values = [_used(heap, field, where) for field, heap in zip(layout.ragged, heaps, strict=True)]
    starts, end = [], _aligned(rows * layout.dtype.itemsize)
    for heap in values:
        starts.append(end)
        end = _aligned(end + heap.nbytes)
    memory = np.frombuffer(allocate(end + len(starts) * _WORD.itemsize), np.uint8)
    records = memory[: rows * layout.dtype.itemsize].view(layout.dtype)
    for field in layout.fields:
        column = columns[field.name]
        if isinstance(column, Dense):
            records[field.name] = column.values
        else:
            records[field.name][:, 0] = column.offsets[:-1] - column.offsets[0]
            records[field.name][:, 1] = np.diff(column.offsets)
    for start, heap in zip(starts, values, strict=True):
        memory[start : start + heap.nbytes] = heap.view(np.uint8)
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
        if layout.ragged:
            starts = np.frombuffer(blob[-len(layout.ragged) * _WORD.itemsize :], _WORD).tolist()
            ends = [*starts[1:], len(blob) - len(starts) * _WORD.itemsize]
            for field, start, end in zip(layout.ragged, starts, ends, strict=True):
                self._heaps[field.name] = blob[start:end]

    def column(self, field: Field) -> Column:
        """Return all values of a column, as they were packed."""
        values = np.frombuffer(self.records, self._layout.dtype)[field.name]
        if not field.ragged:
            return Dense(values)
        offsets = np.concatenate(([0], np.cumsum(values[:, 1], dtype=np.int64)))
        heap = self._heaps[field.name][: offsets[-1] * np.dtype(field.dtype).itemsize]
        return Ragged(np.frombuffer(heap, field.dtype), offsets)

    def heap(self, field: Field) -> memoryview:
        """Return the values of a ragged column: bytes, or numbers of its dtype."""
        return self._heaps[field.name]


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

    def views(self, field: Field) -> list[memoryview]:
        """Return the values of a ragged column as views of their bytes. Nothing is copied."""
        return [heap[start:stop] for heap, start, stop in self._spans(field)]

    def strings(self, field: Field) -> list[str]:
        """Return the values of a string column.

        Raises:
            UnicodeDecodeError: A value is not UTF-8.
        """
        return [str(heap[start:stop], "utf-8") for heap, start, stop in self._spans(field)]

    def _spans(self, field: Field) -> Iterable[tuple[memoryview, int, int]]:
        """Return (heap, first byte, end) of each value of a ragged column."""
        spans = self.rows[field.name].astype(np.int64) * np.dtype(field.dtype).itemsize
        heaps = [blob.heap(field) for blob in self.blobs]
        return zip([heaps[blob] for blob in self.which.tolist()], spans[:, 0].tolist(), spans.sum(axis=1).tolist())  # noqa: B905 (of one length)

    def ragged(self, field: Field) -> Ragged:
        """Return copies of the values of a ragged column, one after the other."""
        lengths = self.rows[field.name][:, 1].astype(np.int64)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        joined = b"".join(self.views(field))
        return Ragged(np.frombuffer(bytearray(joined), field.dtype), offsets)


def _used(heap: Column, field: Field, where: str) -> Array:
    assert isinstance(heap, Ragged)
    used = heap.values[heap.offsets[0] : heap.offsets[-1]]
    if len(used) >= _HEAP_ELEMENTS:
        raise DataError(
            f"{where} column {field.name!r} has {len(used)} elements in a few thousand rows: write smaller row groups"
        )
    return np.ascontiguousarray(used)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

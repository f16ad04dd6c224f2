"""Byte ranges of an object as a stream, with read-ahead."""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

import pyarrow as pa

from dataload.cache.blocks.reader import Object, wait_for_origin
from dataload.cache.buffer_pool import BufferPool
from dataload.cache.tier import Span
from dataload.errors import DamagedError, DataError
from dataload.runtime.executor import result_until_exit
from dataload.telemetry.wait_timeline import doing

SMALLEST_PIECE, LARGEST_PIECE = 256 << 10, 8 << 20  # bytes of one request
LEAST_POOLED = 256 << 10  # bytes: less is not worth a memory map
LEAST_SHARE = 2 << 20  # of a request that shares the bytes of a row group with others: smaller ones gain little time

# Of this process: the bytes of row groups of all datasets. They hardly exceed the memory that these reserve.
fetched_buffers = BufferPool(kept_bytes=None, loose_fit=1.25)


class _Piece(NamedTuple):
    """A part of a range that one request fetches.

    Attributes:
        memory: Where its bytes go.
        fetched: Done once they are there.
    """

    memory: memoryview
    fetched: Future[None]


class RangeStream(io.RawIOBase):
    """A seekable stream over some byte ranges of an object, each to be read forward.

    If all ranges fit into `capacity`, all are fetched at once, into one buffer, and reads copy nothing. Otherwise
    each range has an even share of the capacity for its read-ahead, and pieces are freed once they are read; seeking
    back fetches them again.

    Args:
        fetch: Starts to fill a memoryview with the bytes of the object from a given offset on.
        obj: The object.
        ranges: Byte ranges, in the order of the object. They may overlap if not all fit into `capacity`.
        capacity: Bytes that are in memory at a time.
        requests: Requests among which the ranges are divided if they are held, so that they arrive as early as
            possible. 0: each request is as large as it may be, which takes the least work.
    """

    def __init__(
        self,
        fetch: Callable[[int, memoryview], Future[None]],
        obj: Object,
        ranges: Sequence[Span],
        capacity: int,
        requests: int = 0,
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._object = obj
        self._ranges = ranges = _without_empty(ranges)
        self._position = 0
        size = sum(stop - start for start, stop in ranges)
        self._held = size <= capacity
        self._most = min(LARGEST_PIECE, max(LEAST_SHARE, -(-size // requests))) if requests else LARGEST_PIECE
        self._share = capacity // max(1, len(ranges))
        self._memory: dict[int, memoryview] = {}  # of the held ranges, by first byte
        self._buffer: mmap.mmap | None = None
        self._pieces: dict[tuple[int, int], _Piece] = {}  # by first byte of the range and of the piece
        try:
            _check_end(obj, ranges)
            self._start(size)
        except BaseException:
            self.close()
            raise

    def _start(self, size: int) -> None:
        """Start the first fetches. size: bytes of all ranges."""
        if self._held and size >= LEAST_POOLED:
            self._buffer = fetched_buffers.take(size)
        held = _allocate(size if self._held else 0) if self._buffer is None else memoryview(self._buffer)
        for start, stop in self._ranges:
            if self._held:
                self._memory[start], held = held[: stop - start], held[stop - start :]
            self._read_ahead(start, start, stop)

    @property
    def source(self) -> Any:
        """The stream, as Arrow takes it."""
        return self

    @property
    def fetches(self) -> list[Future[None]]:
        """The requests under way, and those of the bytes in memory."""
        return [piece.fetched for piece in self._pieces.values()]

    def wait(self) -> None:
        """Block until all pending fetches are done. Raise the exception of the first that failed."""
        wait_for_origin(self.fetches)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._object.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        return bytes(self._take(size))

    def read_buffer(self, size: int) -> Any:
        """Return the next `size` bytes as a `pyarrow.Buffer`, without a copy if one piece holds them."""
        return pa.py_buffer(self._take(size))

    def close(self) -> None:
        for piece in self._pieces.values():
            piece.fetched.cancel()
        self._pieces.clear()
        self._memory.clear()
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            fetched_buffers.give_back(buffer)  # It is dropped while a request that goes on, or a table, has a view.
        super().close()

    def _take(self, size: int) -> memoryview | bytes:
        """Return the next `size` bytes. Raise DataError if they are outside of the ranges."""
        first, last = self._position, self._position + max(0, size)
        if first == last:
            return b""
        for start, stop in reversed(self._ranges):  # Where ranges overlap, the bytes are mostly of the later one.
            if start <= first and last <= stop:
                self._position = last
                return self._between(start, stop, first, last)
        raise DamagedError(
            f"{self._object.name}: bytes {first} to {last} belong to no column that is read: is it damaged?"
        )

    def _between(self, start: int, stop: int, first: int, last: int) -> memoryview | bytes:
        """Return the bytes [first, last) of the range [start, stop)."""
        size = self._piece(start, stop)
        begin = start + (first - start) // size * size
        self._read_ahead(begin, start, stop)
        positions = range(begin, last, size)
        for position in positions:
            self._read_ahead(position, start, stop)
            with doing("origin"):
                result_until_exit(self._pieces[start, position].fetched)
        if self._held:
            return self._memory[start][first - start : last - start]
        parts = [
            self._pieces[start, position].memory[max(first - position, 0) : last - position] for position in positions
        ]
        for consumed in [piece for piece in self._pieces if piece[0] == start and piece[1] <= last - size]:
            del self._pieces[consumed]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_ahead(self, begin: int, start: int, stop: int) -> None:
        """Start fetching the piece at `begin` of a range and the next pieces, as far as they fit."""
        size = self._piece(start, stop)
        end = stop if self._held else min(stop, begin + max(2, self._share // size) * size)
        for position in range(begin, end, size):
            if (start, position) not in self._pieces:
                length = min(size, stop - position)
                memory = self._memory[start][position - start :][:length] if self._held else _allocate(length)
                self._pieces[start, position] = _Piece(memory, self._fetch(position, memory))

    def _piece(self, start: int, stop: int) -> int:
        return _piece_bytes(stop - start, self._share, self._most, held=self._held)


class HeldBeginning:
    """The beginning of an object up to the end of a few byte ranges, in one buffer, which Arrow reads without Python.

    Args:
        fetch: As for `RangeStream`.
        obj: The object.
        ranges: Byte ranges, in the order of the object. The bytes between them are zeros, which no decoder accepts.

    Attributes:
        source: The buffer, as Arrow takes it.
        fetches: The requests.
    """

    def __init__(self, fetch: Callable[[int, memoryview], Future[None]], obj: Object, ranges: Sequence[Span]) -> None:
        _check_end(obj, ranges)
        buffer, memory = zeros_around(ranges, ranges[-1][1])
        self.fetches = [fetch(start, memory[start:stop]) for start, stop in ranges if start < stop]
        self.source = pa.BufferReader(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self.fetches:
            future.cancel()

    def wait(self) -> None:
        """Block until the ranges are fetched. Raise the exception of the first that failed."""
        wait_for_origin(self.fetches)


def zeros_around(ranges: Iterable[Span], size: int) -> tuple[pa.Buffer, memoryview]:
    """Return `size` bytes of memory for these sorted ranges, zero outside of them. What is inside is undefined.

    No decoder gets to see bytes that nobody fetched, whatever a damaged file makes it read.
    """
    gaps, position = [], 0
    for start, stop in ranges:
        gaps.append((position, start))
        position = max(position, stop)
    gaps = _without_empty([*gaps, (position, size)])
    if sum(stop - start for start, stop in gaps) >= LEAST_POOLED:
        buffer = pa.py_buffer(mmap.mmap(-1, size))  # The kernel's zeros take no memory until they are read.
        return buffer, memoryview(buffer).cast("B")
    buffer = pa.allocate_buffer(size)
    memory = memoryview(buffer).cast("B")
    for start, stop in gaps:
        memory[start:stop] = bytes(stop - start)
    return buffer, memory


def _check_end(obj: Object, ranges: Sequence[Span]) -> None:
    if (end := max((stop for _, stop in ranges), default=0)) > obj.size:  # They may overlap.
        raise DataError(f"{obj.name}: its footer names bytes up to {end}, it has {obj.size}: is it cut short?")


def _allocate(size: int) -> memoryview:
    """Return uninitialized memory of Arrow, which keeps freed memory for the next piece: fresh memory is slow."""
    return memoryview(pa.allocate_buffer(size)).cast("B")


def pieces(ranges: Sequence[Span], capacity: int) -> list[Span]:
    """Return the byte ranges of the requests that a `RangeStream` of these ranges makes."""
    ranges = _without_empty(ranges)
    held, share = sum(stop - start for start, stop in ranges) <= capacity, capacity // max(1, len(ranges))
    found = []
    for start, stop in ranges:
        size = _piece_bytes(stop - start, share, LARGEST_PIECE, held=held)
        found += [(position, min(position + size, stop)) for position in range(start, stop, size)]
    return found


def _piece_bytes(size: int, share: int, most: int, *, held: bool) -> int:
    """Return the bytes of one request for a range of `size` bytes; all requests are about equally large."""
    if not held:
        return max(SMALLEST_PIECE, min(LARGEST_PIECE, share // 2))
    return -(-size // -(-size // most))


def _without_empty(ranges: Sequence[Span]) -> list[Span]:
    """Return the ranges that have bytes. A column chunk without values may have none."""
    return [(start, stop) for start, stop in ranges if start < stop]

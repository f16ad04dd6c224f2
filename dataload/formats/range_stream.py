"""Some ranges of an object, fetched ahead of those who read them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from dataload.cache.blocks.reader import Object
from dataload.cache.tier import Span
from dataload.errors import DataError
from dataload.telemetry.wait_timeline import doing

SMALLEST_PIECE, LARGEST_PIECE = 256 << 10, 4 << 20  # of a range, in one request


class RangeStream(io.RawIOBase):
    """A file of which only `ranges` are there, in the order of the object, each to be read forward.

    room: bytes that are held at a time. Where all fit in, all are fetched at once, and stay. Otherwise each range has
    its even share of what is fetched ahead, and what has been read is let go of; to go back costs another request.
    fetch: has the bytes [start, stop) of the object fetched.

    stays: whether all is held at a time.
    """

    def __init__(
        self, fetch: Callable[[int, int], Future[memoryview]], obj: Object, ranges: Sequence[Span], room: int
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._object = obj
        self._ranges = ranges
        self._position = 0
        self.stays = sum(stop - start for start, stop in ranges) <= room
        self._share = room // max(1, len(ranges))
        self._pieces: dict[int, Future[memoryview]] = {}  # by their first byte
        for start, stop in ranges:
            self._ask(start, start, stop)

    def wait(self) -> None:
        """Until what was asked for in advance is there. Raises what fetching it raised."""
        with doing("origin"):
            wait(self._pieces.values())
        for piece in self._pieces.values():
            piece.result()

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
        """The next `size` bytes as a `pyarrow.Buffer`, without a copy where one piece holds them."""
        import pyarrow as pa

        return pa.py_buffer(self._take(size))

    def close(self) -> None:
        for piece in self._pieces.values():
            piece.cancel()
        self._pieces.clear()
        super().close()

    def _take(self, size: int) -> memoryview | bytes:
        """Raises DataError for bytes outside of the ranges."""
        first, last = self._position, self._position + max(0, size)
        for start, stop in self._ranges:
            if start <= first and last <= stop:
                self._position = last
                return self._between(start, stop, first, last)
        raise DataError(
            f"{self._object.path}: bytes {first} to {last} belong to no column that is read: is it damaged?"
        )

    def _between(self, start: int, stop: int, first: int, last: int) -> memoryview | bytes:
        """Bytes [first, last) of the range [start, stop)."""
        size = self._piece(start, stop)
        begin = start + (first - start) // size * size
        self._ask(begin, start, stop)
        parts = []
        for at in range(begin, last, size):
            self._ask(at, start, stop)
            with doing("origin"):
                whole = self._pieces[at].result()
            parts.append(whole[max(first, at) - at : last - at])
        if not self.stays:
            for read in [at for at in self._pieces if start <= at <= last - size]:
                del self._pieces[read]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _ask(self, begin: int, start: int, stop: int) -> None:
        """Have the piece at `begin` of a range fetched, and those that come after it, as far as there is room."""
        size = self._piece(start, stop)
        end = stop if self.stays else min(stop, begin + max(2, self._share // size) * size)
        for at in range(begin, end, size):
            if at not in self._pieces:
                self._pieces[at] = self._fetch(at, min(at + size, stop))

    def _piece(self, start: int, stop: int) -> int:
        return _piece_bytes(stop - start, self._share, stays=self.stays)


def pieces(ranges: Sequence[Span], room: int) -> list[Span]:
    """What a stream of these has fetched, in one request each."""
    stays, share = sum(stop - start for start, stop in ranges) <= room, room // max(1, len(ranges))
    found = []
    for start, stop in ranges:
        size = _piece_bytes(stop - start, share, stays=stays)
        found += [(at, min(at + size, stop)) for at in range(start, stop, size)]
    return found


def _piece_bytes(size: int, share: int, *, stays: bool) -> int:
    """Bytes that are fetched together of a range of `size` bytes; all of its pieces are about as large."""
    if not stays:
        return max(SMALLEST_PIECE, min(LARGEST_PIECE, share // 2))
    return -(-size // -(-size // LARGEST_PIECE))

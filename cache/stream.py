"""Some ranges of an object, fetched ahead of those who read them, and kept nowhere."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from dataload.cache.blocks import RUN_BYTES, Blocks, Object
from dataload.cache.tier import Span
from dataload.errors import DataError

SMALLEST_PIECE = 256 << 10


class RangeStream(io.RawIOBase):
    """A file of which only `ranges` are there, in the order of the object, each to be read forward.

    room: bytes that are held at a time. Where all fit in, all are fetched at once, and stay. Otherwise each range has
    its even share of what is fetched ahead, and what has been read is let go of; to go back costs another request.
    """

    def __init__(self, blocks: Blocks, obj: Object, ranges: Sequence[Span], room: int) -> None:
        super().__init__()
        self._blocks = blocks
        self._object = obj
        self._ranges = ranges
        self._position = 0
        self._stays = sum(stop - start for start, stop in ranges) <= room
        share = room // max(1, len(ranges))
        self._piece = RUN_BYTES if self._stays else max(SMALLEST_PIECE, min(RUN_BYTES, share // 2))
        self._ahead = max(1, share // self._piece - 1)
        self._pieces: dict[int, Future[memoryview]] = {}  # by their first byte
        for start, stop in ranges:
            self._ask(start, stop)

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
        begin = start + (first - start) // self._piece * self._piece
        self._ask(begin, stop)
        parts = []
        for at in range(begin, last, self._piece):
            self._ask(at, stop)
            whole = self._pieces[at].result()
            parts.append(whole[max(first, at) - at : last - at])
        if not self._stays:
            for read in [at for at in self._pieces if start <= at <= last - self._piece]:
                del self._pieces[read]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _ask(self, begin: int, stop: int) -> None:
        """Have the piece at `begin` fetched, and those that come after it, as far as there is room."""
        end = stop if self._stays else min(stop, begin + (1 + self._ahead) * self._piece)
        for at in range(begin, end, self._piece):
            if at not in self._pieces:
                piece = self._blocks.submit(self._blocks.fetch, self._object, at, min(at + self._piece, stop))
                self._pieces[at] = piece

"""A read-only file over the blocks of one object."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from dataload.cache.blocks.reader import Blocks, Object
from dataload.errors import ObjectChanged

# Read-ahead of small reads: it starts small and doubles while reads are sequential.
FIRST_WINDOW, LARGEST_WINDOW = 64 << 10, 1 << 20
PEEK_BYTES = 8 << 10
_NOTHING = memoryview(b"")


class BlockFile(io.BufferedIOBase):
    """A read-only file over one version of one object. `read(n)` returns fewer than `n` bytes only at the end.

    Args:
        blocks: Reads the blocks.
        obj: The object to read.
        changed: Called with the object when the origin no longer has this version.

    Notes:
        The file is picklable. A copy keeps the position and the version. One thread at a time may call it.
    """

    mode = "rb"
    _window: tuple[int, int, memoryview]  # bytes [start, stop) of the object, of one block

    def __init__(self, blocks: Blocks, obj: Object, changed: Callable[[Object], object] | None = None) -> None:
        super().__init__()
        self._changed = changed
        self._blocks = blocks
        self._object = obj
        self._position = 0
        self._drop_window()
        self.size = obj.size
        self.path = self.name = obj.path
        self.blocksize = blocks.block_bytes

    def __reduce__(self) -> tuple[Callable[..., BlockFile], tuple[Any, ...]]:
        self._check_open()
        return _reopen, (self._blocks, self._object, self._changed, self._position)

    def __repr__(self) -> str:
        return f"<BlockFile {self._object.name!r} of {self.size} bytes{', closed' if self.closed else ''}>"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check_open()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"{self._object.name}: cannot seek to {offset} from {whence}")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._take(self.size if size is None or size < 0 else size))

    def read1(self, size: int = -1) -> bytes:
        return self.read(self.blocksize if size < 0 else size)

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        data = self._take(len(target))
        target[: len(data)] = data
        return len(data)

    def readuntil(self, char: bytes = b"\n", blocks: int | None = None) -> bytes:
        """Return the bytes up to and with `char`, or to the end. blocks: bytes to read at once."""
        found = bytearray()
        while part := self.read(blocks or self.blocksize):
            searched = max(0, len(found) - len(char) + 1)  # It may be in two parts.
            found += part
            end = found.find(char, searched)
            if end >= 0:
                end += len(char)
                self.seek(end - len(found), io.SEEK_CUR)
                return bytes(found[:end])
        return bytes(found)

    def read_buffer(self, size: int) -> Any:
        """Return the next `size` bytes as a `pyarrow.Buffer`, without a copy if they are in one block."""
        import pyarrow as pa

        return pa.py_buffer(self._take(size))

    def peek(self, size: int = 0) -> bytes:  # noqa: ARG002 (io allows any number of bytes)
        """Return some of the next bytes without advancing. `readline` searches them for line ends."""
        position = self._position
        start, stop, _ = self._window
        if not start <= position < stop:
            stop = position // self.blocksize * self.blocksize + self.blocksize
        data = bytes(self._take(min(PEEK_BYTES, stop - position)))
        self._position = position
        return data

    def close(self) -> None:
        self._drop_window()
        super().close()

    def _take(self, size: int) -> memoryview:
        """Return the next `size` bytes, or fewer at the end of the file."""
        position = self._position
        start, stop, window = self._window
        if not start <= position <= position + size <= stop:
            size = max(0, min(size, self.size - position))
            start, window = self._fetch(position, size)
        self._position = position + size
        return window[position - start : position - start + size]

    def _fetch(self, position: int, size: int) -> tuple[int, memoryview]:
        """Return (start, view) of a view that holds [position, position + size). Small reads move the window."""
        self._check_open()
        if size == 0:
            return position, _NOTHING
        first, last, window = self._window
        length = min(LARGEST_WINDOW, 2 * len(window)) if first <= position <= last else FIRST_WINDOW
        length = max(length, FIRST_WINDOW)
        block = position // self.blocksize * self.blocksize
        border = min(self.size, block + self.blocksize)
        if size > length or position + size > border:
            return position, self._read(position, position + size)
        start = max(block, position // FIRST_WINDOW * FIRST_WINDOW)
        stop = min(border, max(start + length, position + size))
        self._window = (start, stop, self._read(start, stop))
        return start, self._window[2]

    def _read(self, start: int, stop: int) -> memoryview:
        try:
            return self._blocks.read(self._object, start, stop)
        except ObjectChanged:
            if self._changed is not None:
                self._changed(self._object)
            raise

    def _drop_window(self) -> None:
        self._window = (0, -1, _NOTHING)  # empty: no position is in it

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self._object.name}: the file is closed")


def _reopen(blocks: Blocks, obj: Object, changed: Callable[[Object], object] | None, position: int) -> BlockFile:
    file = BlockFile(blocks, obj, changed)
    file.seek(position)
    return file

"""The base of streams that read bytes at any place."""

from __future__ import annotations

import io


class Seekable(io.RawIOBase):
    """A stream for reading. Subclasses define `readinto`, which moves `_position`.

    Args:
        size: Bytes of the stream.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

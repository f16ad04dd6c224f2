"""A read-only file over the blocks of one object."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from dataload.cache.blocks import Blocks, Object
from dataload.errors import ObjectChanged


class BlockFile(io.RawIOBase):
    """One version of one object, opened. Reads whole: `read(n)` is shorter than `n` bytes only at the end.

    changed: told when the origin no longer has this version.
    """

    mode = "rb"

    def __init__(self, blocks: Blocks, obj: Object, changed: Callable[[Object], object] = lambda _: None) -> None:
        super().__init__()
        self._changed = changed
        self._blocks = blocks
        self._object = obj
        self._position = 0
        self.size = obj.size
        self.path = self.name = obj.path
        self.blocksize = blocks.block_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"{self.path}: cannot seek to {offset} from {whence}")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._take(self.size if size is None or size < 0 else size))

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        data = self._take(len(target))
        target[: len(data)] = data
        return len(data)

    def read_buffer(self, size: int) -> Any:
        """The next `size` bytes as a `pyarrow.Buffer`, without a copy where one block holds them."""
        import pyarrow as pa

        return pa.py_buffer(self._take(size))

    def _take(self, size: int) -> memoryview:
        if self.closed:
            raise ValueError(f"{self.path}: read from a closed file")
        try:
            data = self._blocks.read(self._object, self._position, self._position + size)
        except ObjectChanged:
            self._changed(self._object)
            raise
        self._position += len(data)
        return data

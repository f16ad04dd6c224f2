"""A pool of reusable fill buffers: page faults on fresh memory cost more than writing the data to a file."""

from __future__ import annotations

import mmap

KEPT_BYTES = 48 << 20  # of free buffers in a process


class BufferPool:
    """A thread-safe pool of anonymous memory maps."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> mmap.mmap:
        """Return writable memory of at least `size` bytes. The contents are undefined."""
        for buffer in self._free[:]:
            if size <= len(buffer) <= 2 * size:
                try:
                    self._free.remove(buffer)
                except ValueError:  # Another thread took it.
                    continue
                return buffer
        buffer = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        return buffer

    def give_back(self, buffer: mmap.mmap) -> None:
        """Return a buffer to the pool. Drop it if a view of it still exists."""
        try:
            buffer.resize(len(buffer))  # The size is unchanged: the call only fails while views exist.
        except (BufferError, SystemError, OSError):
            return
        if sum(map(len, self._free)) + len(buffer) <= KEPT_BYTES:
            self._free.append(buffer)

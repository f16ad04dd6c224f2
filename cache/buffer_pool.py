"""A pool of reusable buffers: page faults on fresh memory cost more than filling the buffer."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

from dataload.runtime.forks import ForkAware

KEPT_BYTES = 48 << 20  # of the free buffers of a pool, by default
HUGE_PAGE = 2 << 20


class BufferPool(ForkAware):
    """A thread-safe pool of anonymous memory maps.

    Args:
        kept_bytes: Most bytes of free buffers; None: free buffers and those in use together take as many bytes as were
            in use at a time.
    """

    def __init__(self, kept_bytes: int | None = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Leave the buffers to the parent."""
        self._mutex = threading.Lock()
        self._free: list[mmap.mmap] = []  # the oldest first
        self._in_use = self._most_in_use = 0  # bytes

    def take(self, size: int) -> mmap.mmap:
        """Return writable memory of at least `size` bytes. The contents are undefined."""
        with self._mutex:
            fitting = [buffer for buffer in self._free if size <= len(buffer) <= 2 * size]
            buffer = min(fitting, key=len, default=None)
            if buffer is None:
                buffer = _new(size)
            else:
                self._free.remove(buffer)
            self._in_use += len(buffer)
            self._most_in_use = max(self._most_in_use, self._in_use)
            self._drop_excess()
            return buffer

    def give_back(self, buffer: mmap.mmap) -> None:
        """Return a buffer to the pool. Drop it if a view of it still exists."""
        with self._mutex:
            self._in_use -= len(buffer)
            try:
                buffer.resize(len(buffer))  # The size is unchanged: the call only fails while views exist.
            except (BufferError, SystemError, OSError):
                return
            self._free.append(buffer)
            self._drop_excess()

    def clear(self) -> None:
        """Return the memory of the free buffers to the system."""
        with self._mutex:
            self._free.clear()
            self._most_in_use = self._in_use

    def _drop_excess(self) -> None:
        most = self._most_in_use - self._in_use if self._kept_bytes is None else self._kept_bytes
        while sum(map(len, self._free)) > most:
            self._free.pop(0)


def _new(size: int) -> mmap.mmap:
    whole = max(1, size) if size < HUGE_PAGE else -(-size // HUGE_PAGE) * HUGE_PAGE
    buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # other systems, and kernels without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer

"""A pool of reusable buffers: page faults on fresh memory cost more than filling the buffer."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from contextlib import suppress

from dataload.runtime.forks import ForkAware

KEPT_BYTES = 48 << 20  # of the free buffers of a pool, by default
HUGE_PAGE = 2 << 20


class BufferPool(ForkAware):
    """A thread-safe pool of anonymous memory maps.

    Args:
        kept_bytes: Most bytes of free buffers; None: free buffers and those in use together take as many bytes as were
            in use at a time.
        loose_fit: Most size of a buffer in proportion to what is requested.
    """

    def __init__(self, kept_bytes: int | None = KEPT_BYTES, loose_fit: float = 2.0) -> None:
        self._kept_bytes = kept_bytes
        self._loose_fit = loose_fit
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Leave the buffers to the parent."""
        self._mutex = threading.Lock()
        self._free: list[mmap.mmap] = []  # the oldest first
        # Buffers that were given back. It needs no lock: a garbage collection inside `take` may give buffers back.
        self._returned: deque[mmap.mmap] = deque()
        self._in_use = self._most_in_use = 0  # bytes

    def take(self, size: int) -> mmap.mmap:
        """Return writable memory of at least `size` bytes. The contents are undefined."""
        most = max(_rounded(size), self._loose_fit * size)
        with self._mutex:
            self._sort_in()
            fitting = [buffer for buffer in self._free if size <= len(buffer) <= most]
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
        """Return a buffer to the pool, which drops it if a view of it still exists."""
        self._returned.append(buffer)
        if self._mutex.acquire(blocking=False):  # Otherwise the holder's next call does the same.
            try:
                self._sort_in()
                self._drop_excess()
            finally:
                self._mutex.release()

    def clear(self) -> None:
        """Return the memory of the free buffers to the system."""
        with self._mutex:
            self._sort_in()
            self._free.clear()
            self._most_in_use = self._in_use

    def _sort_in(self) -> None:
        """Make the returned buffers free, or drop them."""
        while self._returned:
            buffer = self._returned.popleft()
            self._in_use = max(0, self._in_use - len(buffer))  # A forked child may return one of its parent.
            try:
                buffer.resize(len(buffer))  # The size is unchanged: the call only fails while views exist.
            except (BufferError, SystemError, OSError):
                continue
            if self._kept_bytes is None or len(buffer) <= self._kept_bytes:
                self._free.append(buffer)

    def _drop_excess(self) -> None:
        most = self._most_in_use - self._in_use if self._kept_bytes is None else self._kept_bytes
        while sum(map(len, self._free)) > most:
            self._free.pop(0)


def _rounded(size: int) -> int:
    return max(1, size) if size < HUGE_PAGE else -(-size // HUGE_PAGE) * HUGE_PAGE


def _new(size: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, _rounded(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # other systems, and kernels without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


blob_buffers = BufferPool()  # of this process: the blobs that it makes or sends

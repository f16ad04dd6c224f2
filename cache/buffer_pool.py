"""Memory that blobs are filled into, used again: touching fresh memory takes longer than writing it to a file."""

from __future__ import annotations

import mmap

KEPT_BYTES = 48 << 20  # of a process, for fills to come


class BufferPool:
    """Buffers for fills. Any thread may take one, and give it back when it is done."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> mmap.mmap:
        """Writable memory of at least `size` bytes, with anything in it."""
        for buffer in self._free[:]:
            if size <= len(buffer) <= 2 * size:
                try:
                    self._free.remove(buffer)
                except ValueError:  # Another thread has it.
                    continue
                return buffer
        made = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def give_back(self, buffer: mmap.mmap) -> None:
        """Let a buffer be used again, unless somebody still holds a view of it: then it stays theirs."""
        try:
            buffer.resize(len(buffer))  # To the size that it has: all this does is fail while there are views.
        except (BufferError, SystemError, OSError):
            return
        if sum(map(len, self._free)) + len(buffer) <= KEPT_BYTES:
            self._free.append(buffer)

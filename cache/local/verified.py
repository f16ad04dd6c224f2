"""What this process has checked already, so that each piece of a blob is checked once and not at every read."""

from __future__ import annotations

import os
import threading

MOST_BLOBS = 1 << 17  # about 40 MB; beyond, what was entered first is checked again when it is read again
WHOLE = -1  # every bit set


class VerifiedPieces:
    """Which pieces of which files matched their checksums, as bits: piece 0 is the lowest.

    A file that was replaced or written to since (another inode or time of change) counts as unchecked. Any thread may
    ask and add.
    """

    def __init__(self, most_blobs: int = MOST_BLOBS) -> None:
        self._most_blobs = most_blobs
        self._mutex = threading.Lock()
        self._known: dict[bytes, tuple[int, int, int]] = {}

    def bits(self, digest: bytes, status: os.stat_result) -> int:
        """The pieces of this file that are checked; `WHOLE` when all are."""
        inode, changed_at, bits = self._known.get(digest, (0, 0, 0))
        return bits if (inode, changed_at) == (status.st_ino, status.st_mtime_ns) else 0

    def add(self, digest: bytes, status: os.stat_result, bits: int) -> None:
        with self._mutex:
            bits |= self.bits(digest, status)
            self._known[digest] = (status.st_ino, status.st_mtime_ns, bits)
            if len(self._known) > self._most_blobs:
                del self._known[next(iter(self._known))]

"""The pieces of blobs that this process has verified, so that each piece is verified once."""

from __future__ import annotations

import os
import threading

MOST_BLOBS = 1 << 17  # about 40 MB; beyond it, the oldest entry is dropped and verified again on the next read
WHOLE = -1  # every bit set


class VerifiedPieces:
    """A thread-safe record of the pieces that matched their checksums, one bit per piece; piece 0 is the lowest bit.

    A file whose inode or modification time has changed counts as unverified.

    Args:
        most_blobs: Most blobs in the record.
    """

    def __init__(self, most_blobs: int = MOST_BLOBS) -> None:
        self._most_blobs = most_blobs
        self._mutex = threading.Lock()
        self._known: dict[bytes, tuple[int, int, int]] = {}

    def bits(self, digest: bytes, status: os.stat_result) -> int:
        """Return the verified pieces of a file as bits; `WHOLE` if all are verified."""
        inode, modified_at, bits = self._known.get(digest, (0, 0, 0))
        return bits if (inode, modified_at) == (status.st_ino, status.st_mtime_ns) else 0

    def add(self, digest: bytes, status: os.stat_result, bits: int) -> None:
        """Add verified pieces of a file."""
        with self._mutex:
            bits |= self.bits(digest, status)
            self._known[digest] = (status.st_ino, status.st_mtime_ns, bits)
            if len(self._known) > self._most_blobs:
                del self._known[next(iter(self._known))]

"""The blobs that a process has used lately, until their times of use are in the index."""

from __future__ import annotations

import threading
import time

from dataload.cache.local.index import Index
from dataload.cache.local.lmdb_file import LOCK_SECONDS

# Uses are written in batches: by a use after this time, by an eviction, or as the folder is closed. No thread writes
# them: to start one within a hit may hang at the limit of memory maps.
FLUSH_SECONDS = 1.0


class RecentUses:
    """The digests of used blobs, which `flush` writes to the index together. Any thread may call it.

    Args:
        index: The index of the cache.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._mutex = threading.Lock()
        self._digests: set[bytes] = set()
        self._flush_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether to call `flush` now."""
        return bool(self._digests) and time.monotonic() >= self._flush_at

    def add(self, digest: bytes) -> None:
        """Add a blob that was used now."""
        with self._mutex:
            if not self._digests:
                self._flush_at = time.monotonic() + FLUSH_SECONDS
            self._digests.add(digest)

    def flush(self, timeout: float = LOCK_SECONDS) -> None:
        """Record the uses in the index. With a timeout of 0, leave them to a later flush if another process holds it.

        Raises:
            TimeoutError: Another process has held the index for `timeout` seconds, more than 0.
            OSError: As for `Index`.
            lmdb.Error: As for `Index`.
        """
        with self._mutex:
            digests, self._digests = self._digests, set()
            self._flush_at = time.monotonic() + FLUSH_SECONDS
        try:
            self._index.touch(digests, timeout)
        except TimeoutError:
            with self._mutex:
                self._digests |= digests
            if timeout:
                raise

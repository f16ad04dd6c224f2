"""A blob being filled on the local disk."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dataload.cache.local import blob_file
from dataload.cache.local.directory import CacheFolder
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import LOCK_SECONDS
from dataload.cache.tier import BlobKey, Draft, NoRoomError, Span
from dataload.telemetry.wait_timeline import doing

MAPPED_BYTES = 64 << 20  # From here on a blob is written through a map of its file, slower, but not held in memory.

if TYPE_CHECKING:
    from dataload.cache.local.tier import LocalTier


class BlobWriter(Draft):
    """A blob being filled on disk where that goes, else in memory; gone again unless it is published.

    A draft belongs to the folder it began in: what goes wrong with it says nothing of a folder that another thread has
    opened since.

    Args:
        tier: The tier that the blob is for.
        key: Key of the blob. The caller holds its lock in `folder`.
        folder: Where to write it; None: keep it in memory.
        or_nothing: Raise NoRoomError instead of falling back to memory.
    """

    def __init__(self, tier: LocalTier, key: BlobKey, folder: CacheFolder | None, *, or_nothing: bool = False) -> None:
        super().__init__(key)
        self._tier = tier
        self._folder = folder
        self._or_nothing = or_nothing
        self._owner = os.getpid()
        self._path: Path | None = None
        self._map: mmap.mmap | None = None
        self._size = 0  # bytes of the file
        self._payload_bytes = 0

    def room(self, size: int) -> memoryview:
        self._payload_bytes, self._size = size, blob_file.size_on_disk(size, self.key.name)
        if self._folder is not None:
            with self._tier.trouble("making room for a blob", self._tier.health.writes, self._folder):
                self._map = self._on_disk(self._folder)
        if self._map is None and self._or_nothing:
            raise NoRoomError(self.key.name)
        return super().room(size) if self._map is None else memoryview(self._map)[:size]

    def publish(self, span: Span | None = None) -> memoryview:
        in_memory = super().publish(span)
        tier, folder, digest = self._tier, self._folder, self.key.digest
        if self._map is None or self._path is None or folder is None or folder.closed:
            return in_memory
        with doing("disk"), tier.trouble("keeping a blob", tier.health.writes, folder):
            blob_file.seal(self._map, self._payload_bytes, digest, self.key.name)
            if self._size < MAPPED_BYTES:
                blob_file.write(self._path, self._map, self._size)
            step("fill: sealed")
            target = folder.publish(self._path, digest)
            self._path = None
            step("fill: published")
            tier.health.worked()
            # Mapped again: through the memory it was written to, whoever is given it could write on.
            found = blob_file.open_map(target, digest, tier.proven, span, just_sealed=True)
            self._recycle(in_memory)
            return found
        return in_memory

    def _recycle(self, in_memory: memoryview) -> None:
        if self._map is not None and self.payload is not None and self._size < MAPPED_BYTES:
            with suppress(BufferError):  # Whoever filled it still looks at it: then it stays theirs.
                in_memory.release()
                self.payload.release()
                self._tier.buffers.give_back(self._map)

    def _on_disk(self, folder: CacheFolder) -> mmap.mmap | None:
        digest = self.key.digest
        folder.check_place()
        # The file is there before its row, so that whoever sweeps up after us knows which row to drop.
        self._path = folder.scratch.draft(digest)
        descriptor = blob_file.create(self._path)
        step("fill: drafted")
        try:
            folder.clear(digest, self._path)  # A file that failed its check; what a dead filler left.
            if not self._tier.reserve(folder, self.key, self._size):
                self._tier.refuse(self.key, self._size)
                return None
            step("fill: reserved")
            # A disk without room says so here; written to through a map, it would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, self._size)
            step("fill: allocated")
            mapped = self._size >= MAPPED_BYTES
            return mmap.mmap(descriptor, self._size) if mapped else self._tier.buffers.take(self._size)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        tier, folder, path = self._tier, self._folder, self._path
        if path is None or folder is None or os.getpid() != self._owner:
            return
        if folder.closed:  # Its index is shut, and made anew.
            with suppress(OSError):
                path.unlink()
            return
        with tier.trouble("dropping a draft", tier.health.writes, folder):
            # An index that could not be entered a moment ago is not waited for again: the draft's mark stays.
            folder.discard(self.key.digest, path, timeout=0 if tier.health.writes.tripped else LOCK_SECONDS)

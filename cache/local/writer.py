"""The writers of blobs on the local disk: one blob, or many at a time."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from dataload.cache import blob_file
from dataload.cache.buffer_pool import blob_buffers
from dataload.cache.local.directory import DISK_FULL_ERRNOS, CacheFolder, with_room
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import Row
from dataload.cache.local.lmdb_file import LOCK_SECONDS
from dataload.cache.local.staging import remove
from dataload.cache.tier import BlobKey, CacheFullError, Draft, Span, cut
from dataload.telemetry.wait_timeline import doing

if TYPE_CHECKING:
    from dataload.cache.local.tier import LocalTier

T = TypeVar("T")


class BlobWriter(Draft):
    """A blob that is written to disk if possible, else to memory. It is discarded unless it is published.

    The writer stays with the folder it started in. Its errors do not affect a folder that another thread has reopened
    since.

    Args:
        tier: The tier that caches the blob.
        key: Key of the blob. The caller holds its lock in `folder`.
        folder: The folder to write to. None: fill the blob in memory.
        must_cache: Raise CacheFullError instead of falling back to memory.
    """

    def __init__(self, tier: LocalTier, key: BlobKey, folder: CacheFolder | None, *, must_cache: bool = False) -> None:
        super().__init__(key)
        self._tier = tier
        self._folder = folder
        self._must_cache = must_cache
        self._owner = os.getpid()
        self._path: str | None = None
        self._buffer: mmap.mmap | None = None
        self._size = 0  # of the file, in bytes

    def memory_for(self, size: int) -> memoryview:
        self._size = blob_file.file_bytes(size, self.key.name)
        if self._folder is not None:
            with self._tier.attempt("allocating a blob", self._folder):
                self._buffer = self._on_disk(self._folder)
        if self._buffer is None and self._must_cache:
            raise CacheFullError(self.key.name)
        return super().memory_for(size) if self._buffer is None else memoryview(self._buffer)[:size]

    @property
    def _allocated(self) -> int:
        """Bytes that the disk allocates for the file."""
        return blob_file.allocated(self._size)

    def publish(self, span: Span | None = None) -> memoryview:
        in_memory = super().publish(span)
        tier, folder, digest = self._tier, self._folder, self.key.digest
        payload, buffer = self.payload, self._buffer
        if payload is None or buffer is None or self._path is None or folder is None or folder.closed:
            return in_memory
        with doing("disk"), tier.attempt("writing a blob", folder):
            blob_file.seal(buffer, len(payload), digest, self.key.name)
            with blob_file.opened(self._path) as descriptor:
                blob_file.write(descriptor, buffer, self._size)
                step("fill: sealed")
                folder.publish(self._path, digest)
                self._path = None
                step("fill: published")
                tier.health.worked()
                # A view of the memory that was written to would let its holder modify the blob.
                found = blob_file.map_written(descriptor, self._size, len(payload), digest, tier.verified)
            with suppress(BufferError):  # The fill still has a view of the buffer: leave the buffer to it.
                in_memory.release()
                payload.release()
                blob_buffers.give_back(buffer)
            return cut(found, span)
        return in_memory

    def enter(self, folder: CacheFolder, draft: str) -> bool:
        """Enter the blob in the index. Return whether it fits. If the disk is full, evict as in a full cache.

        Raises:
            OSError: The disk is full, and the policy allows no eviction.
        """
        reserve = partial(self._tier.reserve, folder, self.key, self._allocated, draft)
        try:
            return reserve()
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS or not reserve(folder.index.used_bytes()):
                raise
        return True

    def _on_disk(self, folder: CacheFolder) -> mmap.mmap | None:
        digest = self.key.digest
        folder.index.check_not_replaced()
        # Create the file before its row, so that a sweep after a kill finds the row to drop.
        self._path = draft = folder.staging.draft(digest)
        descriptor = self._create(folder, draft)
        step("fill: drafted")
        try:
            if not self.enter(folder, draft):
                self._tier.health.writes.worked()
                return None
            step("fill: reserved")
            # A full disk raises here. Of blocks, nothing is fetched yet; rows are decoded already.
            self._with_room(folder, descriptor, draft, lambda: os.posix_fallocate(descriptor, 0, self._size))
            step("fill: allocated")
            return blob_buffers.take(self._size)
        finally:
            os.close(descriptor)

    def _create(self, folder: CacheFolder, draft: str) -> int:
        """Create the draft. If the disk has no space for another file, evict as in a full cache, and try again."""

        def make_room(_: OSError) -> bool:
            fits = self._tier.reserve(folder, self.key, self._allocated, draft, folder.index.used_bytes())
            if fits:
                folder.index.drop(self.key.digest)
            return fits

        return with_room(partial(blob_file.create, draft), make_room)

    def _with_room(self, folder: CacheFolder, descriptor: int, draft: str, write: Callable[[], T]) -> T:
        """Write the draft. If the disk is full, evict as in a full cache, and write it again."""

        def make_room(error: OSError) -> bool:
            os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_SET))
            folder.index.drop(self.key.digest)
            free = shutil.disk_usage(folder.path).free if error.errno == errno.ENOSPC else 0
            limit = folder.index.used_bytes() + free
            return self._tier.reserve(folder, self.key, self._allocated, draft, limit)

        return with_room(write, make_room)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        tier, folder, path = self._tier, self._folder, self._path
        if path is None or folder is None or os.getpid() != self._owner:
            return
        if folder.closed:  # The index is closed, too.
            with suppress(OSError):
                remove(path)
            return
        with tier.attempt("discarding a draft", folder):
            # Do not wait twice for a stuck index: the draft's mark stays, and a sweep drops the row.
            folder.discard(self.key.digest, path, timeout=0 if tier.health.writes.tripped else LOCK_SECONDS)


class BunchedBlobWriter(BlobWriter):
    """A blob in memory that is written to disk together with others. It is discarded unless it is published.

    Args:
        tier: The tier that caches the blob.
        key: Key of the blob. The caller holds its lock in `folder`.
        payload: The blob.
        folder: The folder to write to.
    """

    def __init__(self, tier: LocalTier, key: BlobKey, payload: memoryview, folder: CacheFolder) -> None:
        super().__init__(tier, key, folder)
        self._content = payload
        self._target = folder
        self.draft = self._path = folder.staging.draft(key.digest)
        self._size = blob_file.file_bytes(len(payload), key.name)
        self.row = Row(key.digest, key.name, self._allocated)
        self._descriptor = self._create(folder, self.draft)
        self.is_entered = False  # whether the index has the row

    def write(self) -> memoryview:
        """Write the blob, whose row is in the index, and return a read-only map of it. Raises OSError."""
        descriptor, digest = self._descriptor, self.key.digest
        write = partial(blob_file.write_whole, descriptor, self._content, digest, self.key.name)
        size = self._with_room(self._target, descriptor, self.draft, write)
        step("fill: sealed")
        self._target.publish(self.draft, digest)
        self._path = None
        step("fill: published")
        return blob_file.map_written(descriptor, size, len(self._content), digest, self._tier.verified)

    def __exit__(self, *raised: object) -> None:
        os.close(self._descriptor)
        if self.is_entered:
            super().__exit__(*raised)
        elif os.getpid() == self._owner:  # A row of the key, if there is one, belongs to a file that stays.
            with suppress(OSError):
                remove(self.draft)


@dataclass(frozen=True)
class BulkWriter:
    """Caches many blobs at a time in a local tier, with one transaction of the index."""

    tier: LocalTier

    @contextmanager
    def lock_together(self, keys: Sequence[BlobKey]) -> Iterator[Sequence[ExitStack | None]]:
        held, tier = list[ExitStack | None]([None] * len(keys)), self.tier
        with ExitStack() as stack:
            if tier.health.state == "normal" and (folder := tier.opened()) is not None:
                with tier.attempt("locking blobs", folder):
                    held = stack.enter_context(folder.locks.hold_free([key.digest for key in keys]))
                    for key, own in zip(keys, held, strict=True):
                        if own is not None:
                            own.enter_context(folder.locks.beating(key.digest))
            yield held

    def put_together(self, blobs: Sequence[tuple[BlobKey, memoryview]]) -> list[memoryview]:
        """Cache blobs that are missing, as far as they fit. Return a read-only view of each."""
        found, tier = [payload.toreadonly() for _, payload in blobs], self.tier
        step("fill: filled")
        folder = tier.opened() if tier.can_write() else None
        tier.counters.add(misses=len(blobs), unkept=0 if folder else len(blobs))
        if folder is None:
            return found
        with doing("disk"), tier.attempt("writing blobs", folder), ExitStack() as stack:
            folder.index.check_not_replaced()
            held = stack.enter_context(folder.locks.hold_free([key.digest for key, _ in blobs]))
            step("fill: locked")
            writers = {
                number: stack.enter_context(BunchedBlobWriter(tier, *blobs[number], folder))
                for number in range(len(blobs))
                if held[number] is not None
            }
            step("fill: drafted")
            reserved = self._reserved(folder, list(writers.values()))
            step("fill: reserved")
            for (number, writer), fits in zip(writers.items(), reserved, strict=True):
                if fits:
                    found[number] = writer.write()
            if any(reserved):
                tier.health.worked()
            elif writers:
                tier.health.writes.worked()
        return found

    def _reserved(self, folder: CacheFolder, writers: Sequence[BunchedBlobWriter]) -> list[bool]:
        """Enter the blobs of these writers in the index. Return which of them fit."""
        tier = self.tier
        rows, region = [writer.row for writer in writers], tier.division().region
        try:
            all_fit = folder.index.admit_all(rows, limit=tier.limit, region=region)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            all_fit = False
        for writer in writers:
            writer.is_entered = all_fit or writer.enter(folder, writer.draft)
        return [writer.is_entered for writer in writers]

"""The tier on a local disk: immutable files, an index that accounts for them, one filler at a time."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import lmdb

from dataload.cache import blob
from dataload.cache.folder import CacheFolder, open_folder
from dataload.cache.forks import ForkAware
from dataload.cache.index import Row
from dataload.cache.tier import BlobKey, Draft, Fill
from dataload.metrics import Counters

FILL_SECONDS = 120.0
FLUSH_SECONDS = 1.0  # how far behind the record of uses may be: hits are never written one by one

log = logging.getLogger(__name__)


class LocalTier(ForkAware):
    """Blobs on a local disk, shared by all processes of a host that name the same folder.

    limit: most bytes on disk; None: 90 % of what the disk has free, and what is kept already.
    policy: "pin" admits until full and evicts only what no running process has used since it started; "lru" evicts
        what was used longest ago.

    Notes: nothing is opened before the first use. A warm `get` costs a lookup and a map; the first one in a process
    also reads the blob through to check it. Pickles as its settings.

    Raises ConfigError at the first use when the folder cannot be used or holds something else.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int | None = None, policy: str = "pin") -> None:
        self.path = Path(path)
        self.policy = policy
        self.fill_seconds = FILL_SECONDS
        self._given_limit = limit
        self.proven: set[tuple[bytes, int, int]] = set()
        self._touched: set[bytes] = set()
        self._reported: set[str] = set()
        self._flush_at = 0.0
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self._opening = threading.Lock()
        self._folder: CacheFolder | None = None

    def __reduce__(self) -> tuple[type[LocalTier], tuple[Path, int | None, str]]:
        return LocalTier, (self.path, self._given_limit, self.policy)

    def __repr__(self) -> str:
        used = "not opened" if self._folder is None else f"{self._folder.index.used_bytes()} of {self.limit} bytes"
        return f"LocalTier({str(self.path)!r}, {self.policy}, {used})"

    @property
    def folder(self) -> CacheFolder:
        """What this process has open; opened on first use."""
        with self._opening:
            if self._folder is None:
                self._folder = open_folder(self.path)
                self._limit = self._given_limit or self._folder.room()
            return self._folder

    @property
    def limit(self) -> int:
        """Most bytes on disk."""
        _ = self.folder
        return self._limit

    def get(self, key: BlobKey) -> memoryview | None:
        found = self._look_up(key)
        if found is not None:
            self.counters.add(hits=1, bytes=len(found))
        return found

    def get_or_fill(self, key: BlobKey, fill: Fill) -> memoryview:
        found = self.get(key)
        if found is not None:
            return found
        with ExitStack() as stack:
            alone = False  # Past the deadline, or without locks: fetch, and keep nothing. Never a deadlock.
            with self.trouble("locking a blob"):
                alone = stack.enter_context(self.folder.locks.hold(key.digest, self.fill_seconds))
            found = self._look_up(key)
            if found is not None:
                self.counters.add(hits=1, waits=1, bytes=len(found))
                return found
            self.counters.add(misses=1)
            draft = stack.enter_context(_DiskDraft(self, key, keep=alone))
            fill(draft.allocate)
            return draft.publish()

    def stats(self) -> dict[str, float]:
        return self.counters.snapshot()

    def flush(self) -> None:
        """Write down which blobs were used since the last time."""
        touched, self._touched = self._touched, set()
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        if touched:
            self.folder.index.touch(touched)

    def reserve(self, key: BlobKey, size: int) -> bool:
        """Enter a blob of `size` bytes in the index, evicting as the policy allows; False when it does not fit."""
        self.flush()
        folder = self.folder
        return folder.index.reserve(
            Row(key.digest, key.name, size),
            limit=self.limit,
            evict_before=folder.oldest_process if self.policy == "pin" else time.time_ns,
            release=folder.release,
        )

    @contextmanager
    def trouble(self, doing: str) -> Iterator[None]:
        """Swallows the tier's own trouble: counted, and logged once a kind. The bytes come from elsewhere."""
        try:
            yield
        except (OSError, lmdb.Error) as error:
            self.counters.add(errors=1)
            kind = f"{doing} {type(error).__name__} {getattr(error, 'errno', None)}"
            if kind not in self._reported:
                self._reported.add(kind)
                log.warning("cache %s: trouble %s, going on without it: %s", self.path, doing, error)

    def refuse(self, key: BlobKey, size: int) -> None:
        """Count a blob that there is no room for."""
        self.counters.add(refused=1)
        if "full" not in self._reported:
            self._reported.add("full")
            log.warning(
                "cache %s is full (%d bytes): %s (%d bytes) and what follows is read from the origin each time; "
                "raise cache_bytes or evict",
                self.path,
                self.limit,
                key.name,
                size,
            )

    def _look_up(self, key: BlobKey) -> memoryview | None:
        folder = self.folder
        with self.trouble("reading a blob"):
            if folder.index.size_of(key.digest) is None:
                return None
            try:
                found = blob.open_map(folder.path_of(key.digest), key.digest, self.proven)
            except FileNotFoundError:  # It is being filled just now, or its filler died.
                return None
            self._touched.add(key.digest)
            if time.monotonic() >= self._flush_at:
                self.flush()
            return found
        return None


class _DiskDraft(Draft):
    """A blob being filled on disk where that goes, else in memory; gone again unless it is published."""

    def __init__(self, tier: LocalTier, key: BlobKey, *, keep: bool) -> None:
        super().__init__(key)
        self._tier = tier
        self._keep = keep
        self._owner = os.getpid()
        self._path: Path | None = None
        self._map: mmap.mmap | None = None

    def room(self, size: int) -> memoryview:
        if self._keep:
            with self._tier.trouble("making room for a blob"):
                self._map = self._on_disk(size)
        return super().room(size) if self._map is None else memoryview(self._map)[:size]

    def publish(self) -> memoryview:
        in_memory = super().publish()
        if self._map is None or self._path is None:
            return in_memory
        folder, digest = self._tier.folder, self.key.digest
        with self._tier.trouble("keeping a blob"):
            blob.seal(self._map, digest)
            target = folder.path_of(digest)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            self._path.rename(target)
            self._path = None
            return blob.open_map(target, digest, self._tier.proven)
        return in_memory

    def _on_disk(self, size: int) -> mmap.mmap | None:
        folder, digest = self._tier.folder, self.key.digest
        folder.discard(digest)  # A row without its file, or a file that failed its check.
        # The file is there before its row, so that whoever sweeps up after us knows which row to drop.
        self._path = folder.scratch.draft(digest)
        descriptor = blob.create(self._path)
        try:
            if not self._tier.reserve(self.key, size + blob.FOOTER_BYTES):
                self._tier.refuse(self.key, size)
                return None
            return blob.allocate(descriptor, size)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None and os.getpid() == self._owner:
            with self._tier.trouble("dropping a draft"):
                self._path.unlink(missing_ok=True)
                self._tier.folder.index.drop(self.key.digest)

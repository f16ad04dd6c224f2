"""The tier on a local disk: immutable files, an index that accounts for them, one filler at a time."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from dataload.cache.buffer_pool import BufferPool
from dataload.cache.health import CircuitBreaker, Health
from dataload.cache.local import blob_file
from dataload.cache.local.directory import CacheFolder
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import BATCH_ROWS, DAMAGED, LOCK_SECONDS, Row
from dataload.cache.local.registry import open_folder
from dataload.cache.local.verified import VerifiedPieces
from dataload.cache.local.writer import BlobWriter
from dataload.cache.tier import BlobKey, Fill, Span
from dataload.errors import ConfigError, CorruptEntry
from dataload.runtime.counters import Counters
from dataload.runtime.forks import ForkAware

FILL_SECONDS = 120.0
FLUSH_SECONDS = 1.0  # how far behind the record of uses may be: hits are never written one by one

log = logging.getLogger(__name__)


class LocalTier(ForkAware):
    """Blobs on a local disk, shared by all processes of a host that name the same folder.

    limit: most bytes on disk; None: the default limit of the folder, which is fixed when the cache is made.
    policy: "pin" admits until full and evicts only what no running process has used since it started; "lru" evicts
        what was used longest ago.
    clock: seconds, monotonic; by it a failing disk is tried again.

    allow_network_filesystem: open the folder whatever filesystem it is on; see `CacheConfig`.
    region: bytes of the limit for what finds no room under "pin": it passes through there, first come, first gone.

    Notes: nothing is opened before the first use. A warm `get` opens and maps a file and does not ask the index, so no
    other process can hold it up; what a process reads for the first time it also checks, in pieces of 64 KiB. Pickles
    as its settings. What the disk does wrong (full, failing, removed) is counted and logged; `stats()["health"]` says
    how it is.

    Raises ConfigError at the first use when the folder is one that a person must mend; see `CacheFolder`.
    """

    shared = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit: int | None = None,
        policy: str = "pin",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.policy = policy
        self.region = 0
        self.allow_network_filesystem = False
        self.fill_seconds = FILL_SECONDS
        self._given_limit = limit
        self._clock = clock
        self._was_open = False
        self._touched: set[bytes] = set()
        self._strays: set[bytes] = set()  # blobs that were read but have no row, until they are adopted
        self._reported: set[str] = set()
        self._flush_at = 0.0
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self.health = Health(str(self.path), self._clock)
        self.proven = VerifiedPieces()
        self.buffers = BufferPool()
        self._folder: CacheFolder | None = None
        self._mutex = threading.Lock()  # of `_touched` and `_strays`

    def _state(self) -> dict[str, int]:
        return {"region": self.region, "allow_network_filesystem": self.allow_network_filesystem}

    def __reduce__(self) -> tuple[type[LocalTier], tuple[Path, int | None, str], dict[str, int]]:
        return LocalTier, (self.path, self._given_limit, self.policy), self._state()

    def __repr__(self) -> str:
        state = "not opened" if self._folder is None else self.health.state
        return f"LocalTier({str(self.path)!r}, {self.policy}, {state})"

    @property
    def folder(self) -> CacheFolder:
        """What this process has open; opened on first use, and again after the folder was removed. Raises OSError."""
        folder = self._folder
        if folder is not None and not folder.closed:
            return folder
        try:
            # The same for threads that come here at once.
            folder = open_folder(self.path, allow_network_filesystem=self.allow_network_filesystem)
        except ConfigError as error:
            if not self._was_open:
                raise
            raise OSError(errno.ENXIO, str(error)) from error
        self._was_open = True
        self._limit = self._given_limit or folder.default_limit
        if folder.rebuilt:  # It entered all that was there.
            folder.evict(self._limit)
        self._folder = folder  # From here on other threads use it.
        return folder

    @property
    def limit(self) -> int:
        """Most bytes on disk; without end where nobody said and the disk cannot be asked."""
        if self._opened() is None:
            return self._given_limit or sys.maxsize
        return self._limit

    def get(self, key: BlobKey, span: Span | None = None) -> memoryview | None:
        found = self._look_up(key, span)
        if found is not None:
            self.counters.add(hits=1, bytes=len(found))
        return found

    def get_or_fill(
        self, key: BlobKey, fill: Fill, span: Span | None = None, *, to_keep: int | None = None
    ) -> memoryview:
        found = self.get(key, span)
        if found is not None:
            return found
        keep = self._may_keep()
        with ExitStack() as stack:
            folder = self._lock(key, stack) if keep else None
            if folder is not None:  # Another may have filled it since.
                found = self._look_up(key, span)
            if found is not None:
                self.counters.add(hits=1, waits=1, bytes=len(found))
                return found
            self.counters.add(misses=1, unkept=int(not keep))
            step("fill: locked")
            draft = stack.enter_context(BlobWriter(self, key, folder, or_nothing=to_keep is not None))
            fill(draft.allocate)
            step("fill: filled")
            return draft.publish(span)

    @contextmanager
    def key_lock(self, key: BlobKey, *, elect: bool = True) -> Iterator[None]:  # noqa: ARG002 (each is alone)
        with ExitStack() as stack:
            if self._may_keep():
                self._lock(key, stack)
            yield

    def fetch_from_cluster(self, keys: Iterable[BlobKey]) -> list[memoryview] | None:  # noqa: ARG002
        return None

    def stored_bytes(self, key: BlobKey) -> int:
        folder = self._opened()
        if folder is not None:
            with self.trouble("looking up a blob", self.health.reads, folder):
                return folder.index.size_of(key.digest) or 0
        return 0

    def settle(self) -> None:
        """Do nothing: blobs are written before `get_or_fill` returns."""

    def stats(self) -> dict[str, Any]:
        return {**self.counters.snapshot(), "health": self.health.stats()}

    def lease(self, keys: Iterable[BlobKey]) -> None:
        """Note that this process is going to use these blobs, those of them that are kept."""
        folder = None if self.health.writes.tripped else self._opened()
        if folder is not None:
            with self.trouble("noting uses", self.health.writes, folder):
                folder.index.touch(key.digest for key in keys)

    def is_transient(self, keys: Iterable[BlobKey]) -> bool:
        if not self.region or self.policy != "pin" or self.health.reads.tripped or self.health.writes.tripped:
            return False
        folder = self._opened()
        if folder is not None:
            with self.trouble("looking up a blob", self.health.writes, folder):
                return not folder.index.stay(key.digest for key in keys)
        return False

    def flush(self) -> None:
        """Write down which blobs were used since the last time, and enter those of them that have no row."""
        folder = self.folder
        self._note_uses(folder, LOCK_SECONDS)
        with self._mutex:
            strays = list(islice(self._strays, BATCH_ROWS))
        for digest in strays:
            if self._adopt(folder, digest):
                with self._mutex:
                    self._strays.discard(digest)

    def reserve(self, folder: CacheFolder, key: BlobKey, size: int) -> bool:
        """Enter a blob of `size` bytes in the index, evicting as the policy allows; False when it does not fit."""
        self.flush()
        return self._admit(folder, Row(key.digest, key.name, size))

    @contextmanager
    def trouble(self, doing: str, breaker: CircuitBreaker, folder: CacheFolder) -> Iterator[None]:
        """Swallow the tier's own trouble: counted, and logged once a kind. The bytes come from elsewhere.

        Args:
            doing: What fails, for the log.
            breaker: Of what is left alone for a while when this goes on.
            folder: The folder that is worked in. Only this one is let go of when something of it was removed: another
                thread may have opened it anew meanwhile.
        """
        try:
            yield
        except (OSError, lmdb.Error) as error:
            self._failed(doing, error, breaker, folder)

    def _opened(self) -> CacheFolder | None:
        """The folder, or None, counted, when it cannot be opened just now. Raises ConfigError as `LocalTier` does."""
        try:
            return self.folder
        except (OSError, lmdb.Error) as error:
            self._report("opening it", error)
            self.health.reads.failed(for_good=True)
            return None

    def _may_keep(self) -> bool:
        return not self.health.reads.tripped and self.health.writes.allows()

    def _lock(self, key: BlobKey, stack: ExitStack) -> CacheFolder | None:
        """Hold the lock of a key until `stack` ends; the folder it holds in.

        None past the deadline, or without locks: the caller fetches, and keeps nothing. Never a deadlock. After a
        deadline has passed, no lock is waited for until one was free again: its holder has been stopped.
        """
        folder = self._opened()
        if folder is not None:
            timeout = 0 if self.health.writes.tripped else self.fill_seconds
            with self.trouble("locking a blob", self.health.writes, folder):
                if stack.enter_context(folder.locks.hold(key.digest, timeout)):
                    return folder
                raise TimeoutError(errno.ETIMEDOUT, f"another process has held its lock for {timeout:g} s", key.name)
        return None

    def _admit(self, folder: CacheFolder, row: Row) -> bool:
        evict_before = folder.oldest_process if self.policy == "pin" else time.time_ns
        region = self.region if self.policy == "pin" else 0
        return folder.reserve(row, limit=self.limit, region=region, evict_before=evict_before)

    def _note_uses(self, folder: CacheFolder, timeout: float) -> None:
        with self._mutex:
            touched, self._touched = self._touched, set()
            self._flush_at = time.monotonic() + FLUSH_SECONDS
        try:
            strays = folder.index.touch(touched, timeout)
        except TimeoutError:
            with self._mutex:
                self._touched |= touched
            if timeout:
                raise
        else:
            with self._mutex:
                self._strays.update(strays)

    def _failed(self, doing: str, error: Exception, breaker: CircuitBreaker, folder: CacheFolder) -> None:
        self._report(doing, error)
        if isinstance(error, CorruptEntry) or folder.closed:  # One blob's trouble, or of a folder that was let go of.
            return
        if isinstance(error, (FileNotFoundError, NotADirectoryError, *DAMAGED)):
            folder.doubt()
            self.health.reads.failed()
        else:
            breaker.failed()

    def _report(self, doing: str, error: Exception) -> None:
        self.counters.add(errors=1)
        kind = f"{doing} {type(error).__name__} {getattr(error, 'errno', None)}"
        if kind not in self._reported:
            self._reported.add(kind)
            # Its text, not itself: kept by a handler, its traceback would keep the folder open.
            log.warning("cache %s: trouble %s, going on without it: %s", self.path, doing, str(error))

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

    def _look_up(self, key: BlobKey, span: Span | None) -> memoryview | None:
        """The blob if it is kept."""
        folder = self._opened() if self.health.reads.allows() else None
        if folder is None:
            return None
        found = None
        with self.trouble("reading a blob", self.health.reads, folder):
            with suppress(FileNotFoundError):
                found = blob_file.open_map(folder.file_of(key.digest), key.digest, self.proven, span)
            if found is not None or self.health.reads.tripped:
                self.health.reads.worked()
        if found is not None:
            with self._mutex:
                self._touched.add(key.digest)
            if time.monotonic() >= self._flush_at and not self.health.writes.tripped:
                with self.trouble("noting uses", self.health.writes, folder):
                    self._note_uses(folder, timeout=0)
        return found

    def _adopt(self, folder: CacheFolder, digest: bytes) -> bool:
        """Enter a row for a sound file that has none, as when the index was lost under us; else remove the file.

        Return False while another process holds the blob's lock.
        """
        with folder.locks.hold(digest, timeout=0) as alone:
            if not alone:
                return False
            if folder.index.size_of(digest) is not None:
                return True
            try:
                footer, name, _ = blob_file.read_footer(folder.file_of(digest))
                if footer.digest == digest and self._admit(folder, Row(digest, name, footer.size)):
                    step("adopt: entered")
                    return True
            except FileNotFoundError:
                return True
            except CorruptEntry as error:
                self._report("reading a blob", error)
            folder.unlink(digest)
            return True

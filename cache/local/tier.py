"""The local disk tier: immutable blob files, an index that accounts for them, one writer per blob."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from dataload.cache import blob_file
from dataload.cache.division import Division, Need
from dataload.cache.health import CircuitBreaker, Health
from dataload.cache.local.directory import EXHAUSTED, CacheFolder
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import Row
from dataload.cache.local.lmdb_file import DAMAGED
from dataload.cache.local.needs import Lease, host_needs
from dataload.cache.local.registry import open_folder
from dataload.cache.local.staging import users
from dataload.cache.local.writer import BlobWriter, BulkWriter
from dataload.cache.reports import warn_once
from dataload.cache.tier import FILL_SECONDS, MAKE_SECONDS, BlobKey, Fill, Notes, Span, Tier, Waited
from dataload.errors import ConfigError, CorruptEntry
from dataload.runtime.counters import Counters
from dataload.runtime.forks import ForkAware

WAITS = "cache %s: waiting for another process, which runs and has been making %s for more than %g s"
log = logging.getLogger(__name__)


class LocalTier(ForkAware, Tier):
    """A cache tier on a local disk, shared by all processes of a host that use the same folder.

    The tier opens its folder on first use and pickles as its settings. A warm `get` opens and maps one file without
    reading the index, so no other process can block it. Each process verifies the checksums of a blob on first read, in
    segments of 64 KiB. Disk errors are counted and logged, never raised; `stats()["health"]` reports the state.

    Args:
        path: The cache folder.
        limit: Most bytes on disk. None: the default limit of the folder, which is fixed when the cache is created.
        policy: "pin" admits blobs until the cache is full and evicts only blobs that no running process has used
            since it started. "lru" evicts the least recently used blobs.
        clock: Monotonic time in seconds; it schedules the retries of a failing disk.
        allow_network_filesystem: Open the folder on any filesystem; see `CacheConfig`.

    Raises:
        ConfigError: On first use, if the user must fix the folder; see `CacheFolder`.
    """

    shared = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit: int | None = None,
        policy: str = "pin",
        clock: Callable[[], float] = time.monotonic,
        *,
        allow_network_filesystem: bool = False,
    ) -> None:
        self.path = Path(path)
        self.policy = policy
        self._allow_network_filesystem = allow_network_filesystem
        self._given_limit = limit
        self.clock = clock
        self._was_open = False
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self.needs = host_needs(self.path)
        self.health = Health(str(self.path), self.clock, self.counters)
        self.verified = blob_file.VerifiedSegments()
        self._busy = set[bytes]()  # digests of keys that another process has locked for `FILL_SECONDS`
        self._folder: CacheFolder | None = None
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(LocalTier, allow_network_filesystem=self._allow_network_filesystem)
        return make, (self.path, self._given_limit, self.policy), {"_was_open": self._was_open}

    def __repr__(self) -> str:
        return f"LocalTier({str(self.path)!r}, {self.policy}, {self.health.state if self._folder else 'not opened'})"

    @property
    def folder(self) -> CacheFolder:
        """The folder, opened on first use and reopened after its removal.

        Raises:
            OSError: The folder cannot be opened.
        """
        if (folder := self._folder) is not None and not folder.closed:
            return folder
        try:
            # Concurrent threads get the same object.
            folder = open_folder(self.path, allow_network_filesystem=self._allow_network_filesystem)
        except ConfigError as error:
            if not self._was_open:
                raise
            raise OSError(errno.ENXIO, str(error)) from error
        self._was_open = True
        if self._given_limit:  # A process without one makes no cache smaller.
            self._compare_limits(folder, self._given_limit)
            with suppress(OSError, lmdb.Error):  # Cached blobs are readable without it. A fill meets the error, too.
                folder.evict(self._given_limit, pin=self.policy == "pin")
        self._folder = folder  # Last: other threads use it from here on.
        return folder

    def _compare_limits(self, folder: CacheFolder, limit: int) -> None:
        """Warn if another running process limits the cache to another size. Best effort."""
        with suppress(OSError, ValueError):  # such as a full disk
            folder.staging.show("limit", str(limit).encode())
            others = {int(content): process for process, content in folder.staging.read("limit")}
            others.pop(limit, None)
            if others:
                least = min(others)
                warn_once(
                    f"limits of {self.path} and {limit}",
                    f"cache {self.path}: this process limits it to {limit} bytes, and {others[least]} to {least}: the "
                    "smaller limit evicts what the larger one keeps; give both the same cache_bytes",
                )

    @property
    def location(self) -> str:
        return str(self.path)

    @property
    def bulk(self) -> BulkWriter:
        return BulkWriter(self)

    @property
    def limit(self) -> int:
        """Most bytes on disk; `sys.maxsize` if no limit was given and the folder cannot be opened."""
        folder = None if self._given_limit else self.opened()
        return self._given_limit or (sys.maxsize if folder is None else folder.default_limit)

    @property
    def used_bytes(self) -> int | None:
        with suppress(OSError, lmdb.Error):  # A look at the size decides nothing about the health.
            if (folder := self._folder) is not None and not folder.closed:
                return folder.index.used_bytes()
        return None

    @property
    def limiting_disk(self) -> Path | None:
        return None if self._given_limit else self.path

    @property
    def retains_blobs(self) -> bool:
        return self.health.state == "normal" and not self.division().region

    def get(self, key: BlobKey, span: Span | None = None) -> memoryview | None:
        if (found := self._lookup(key, span)) is not None:
            self.counters.add(hits=1, bytes=len(found))
        return found

    def get_or_fill(
        self, key: BlobKey, fill: Fill, span: Span | None = None, *, to_keep: int | None = None
    ) -> memoryview:
        if (found := self.get(key, span)) is not None:
            return found
        keep = self.can_write()
        with ExitStack() as stack:
            folder = self.acquire(key, stack) if keep else None
            # Another process may have filled the blob meanwhile.
            if folder is not None and (found := self._lookup(key, span)) is not None:
                self.counters.add(hits=1, waits=1, bytes=len(found))
                return found
            self.counters.add(misses=1, unkept=int(folder is None))
            step("fill: locked")
            writer = stack.enter_context(BlobWriter(self, key, folder, must_cache=to_keep is not None))
            fill(writer.allocate)
            step("fill: filled")
            return writer.publish(span)

    @contextmanager
    def key_lock(self, key: BlobKey, *, elect: bool = True) -> Iterator[Callable[[], Waited] | None]:  # noqa: ARG002 (each is alone)
        folder = self.opened() if self.health.state == "normal" else None
        held = True
        with ExitStack() as stack:
            if folder is not None:
                with self.attempt("locking a blob", folder):
                    if held := stack.enter_context(folder.locks.hold(key.digest, timeout=0)):
                        stack.enter_context(folder.locks.beating(key.digest))
            yield None if held else partial(self.wait_for_holder, key)

    def acquire(self, key: BlobKey, stack: ExitStack) -> CacheFolder | None:
        """Acquire the lock of a key until `stack` ends. Return the folder that the lock belongs to.

        Return None after `FILL_SECONDS`, or if the lock fails: the caller then fetches without caching, so there is no
        deadlock. Later calls for this key do not wait until its lock was free again.
        """
        folder = self.opened()
        if folder is not None:
            with self.attempt("locking a blob", folder), ExitStack() as own:
                began, patience = time.monotonic(), self._patience(key)
                if own.enter_context(folder.locks.hold(key.digest, patience)):
                    self._busy.discard(key.digest)
                    stack.push(own.pop_all())
                    return folder
                if patience:
                    self._busy.add(key.digest)
                    seconds = time.monotonic() - began
                    reason = f"another process has held its lock for {seconds:.0f} s; {users(self.path)}"
                    self.health.report("locking a blob", TimeoutError(errno.ETIMEDOUT, reason, key.name))
        return None

    def wait_for_holder(self, key: BlobKey) -> Waited:
        """Wait until no other process holds the lock of a key, as long as that process runs."""
        folder, deadline, is_running = self.opened(), self.clock() + MAKE_SECONDS, True
        while folder is not None and is_running and self.clock() < deadline:
            is_running = False
            with self.attempt("waiting for a blob", folder):
                with folder.locks.hold(key.digest, self._patience(key)) as held:
                    if held:
                        self._busy.discard(key.digest)
                        return Waited.FOR_PROCESS
                self._busy.add(key.digest)
                is_running = folder.locks.is_running(key.digest)
                if not is_running:
                    reason = f"the process that makes it was stopped; {users(self.path)}"
                    self.health.report("waiting for a blob", TimeoutError(errno.ETIMEDOUT, reason, key.name))
                elif self.health.is_new(f"wait for {key.name}"):
                    log.warning(WAITS, self.path, key.name, FILL_SECONDS)
        return Waited.IN_VAIN

    def _patience(self, key: BlobKey) -> float:
        return 0 if self.health.writes.tripped or key.digest in self._busy else FILL_SECONDS

    def holder(self, key: BlobKey) -> int | None:
        with suppress(OSError):  # It is for a message.
            if (folder := self._folder) is not None and not folder.closed:
                return folder.locks.holder(key.digest)
        return None

    def stored_bytes(self, key: BlobKey) -> int:
        if not self.health.writes.tripped and (folder := self.opened()) is not None:
            with self.attempt("looking up a blob", folder):
                return folder.index.size_of(key.digest) or 0
        return 0

    def discard(self, keys: Iterable[BlobKey], made: Iterable[BlobKey]) -> None:
        folder = self.opened() if self.health.state == "normal" else None
        if folder is not None:
            with self.attempt("removing blobs", folder):
                if all(folder.path_of(key.digest).exists() for key in made):
                    folder.remove(key.digest for key in keys)

    def retract(self, keys: Iterable[BlobKey]) -> None:
        if (folder := self.opened()) is not None:  # whatever the health: a disk that fails may still remove files
            with self.attempt("removing blobs", folder):
                # Usually there are none, and then no lock and no transaction is needed.
                if stored := [key.digest for key in keys if os.path.exists(folder.file_of(key.digest))]:  # noqa: PTH110
                    folder.remove(stored)

    def stats(self) -> dict[str, Any]:
        return {**self.counters.snapshot(), "health": self.health.stats()}

    def touch(self, keys: Iterable[BlobKey]) -> None:
        if not self.health.writes.tripped and (folder := self.opened()) is not None:
            with self.attempt("recording uses", folder):
                folder.index.touch(key.digest for key in keys)

    def is_transient(self, keys: Iterable[BlobKey]) -> bool:
        if self.health.state == "normal" and self.division().region and (folder := self.opened()) is not None:
            with self.attempt("looking up a blob", folder):
                return not folder.index.all_pinned(key.digest for key in keys)
        return False

    @property
    def notes(self) -> Notes | None:
        folder = self.opened()
        return None if folder is None else folder.staging

    def lease(self, need: Need) -> Lease:
        lease = Lease(self.needs, need)
        self.division()  # announces the need
        return lease

    def division(self) -> Division:
        folder = self.opened() if self.policy == "pin" else None
        return Division() if folder is None else self.needs.division(folder, self.limit)

    def reserve(self, folder: CacheFolder, key: BlobKey, size: int, draft: str, disk_limit: int = sys.maxsize) -> bool:
        """Enter a blob of `size` bytes in the index, evicting as the policy allows. Return whether it fits.

        disk_limit: Most bytes of the cache that a full disk has space for.
        """
        own = self._given_limit or max(folder.default_limit, folder.index.used_bytes())  # as at the opening
        pin, row, limit = self.policy == "pin", Row(key.digest, key.name, size), min(own, disk_limit)
        if folder.reserve(row, draft, limit, self.division(), pin=pin):
            return True
        if limit < own:  # The caller reports the full disk.
            return False
        self.counters.add(refused=1)
        warn_once(
            f"{self.path} is full at {limit}",
            f"cache {self.path} is full ({limit} bytes): {key.name} ({size} bytes) and later blobs are read from the "
            "origin each time; raise cache_bytes or evict",
        )
        return False

    @contextmanager
    def attempt(self, doing: str, folder: CacheFolder, breaker: CircuitBreaker | None = None) -> Iterator[None]:
        """End the block at an error of the disk or the index. Count it, log each kind once, and tell the breaker.

        The caller falls back to the next tier or the origin. If a part of `folder` was removed, only this object is
        closed: another thread may already have reopened the folder. breaker: None: that of writes.
        """
        try:
            yield
        except (OSError, lmdb.Error) as error:
            if isinstance(error, CorruptEntry) or not folder.released:
                self.health.report(doing, error)
            is_of_process = getattr(error, "errno", None) in EXHAUSTED
            if isinstance(error, CorruptEntry) or is_of_process or folder.released:  # It tells nothing about the disk.
                return
            if isinstance(error, (FileNotFoundError, NotADirectoryError, *DAMAGED)):
                folder.doubt()
                self.health.reads.failed()
            else:
                (breaker or self.health.writes).failed()

    def opened(self) -> CacheFolder | None:
        """Return the folder, or count an error and return None. Raises ConfigError as `LocalTier` does.

        Opening may take a minute. Threads wait for the first attempt together, and for later ones never.
        """
        if (folder := self._folder) is not None and not folder.closed:
            return folder
        reads = self.health.reads
        if not self._opening.acquire(blocking=not reads.tripped):
            return None
        try:
            folder = self.folder if not reads.tripped or reads.is_trying or reads.allows() else None
        except (OSError, lmdb.Error) as error:
            self.health.report("opening the folder", error)
            reads.failed(for_good=True)
            return None
        else:
            if folder is not None and reads.tripped:  # as the folder could not be opened, or was damaged
                reads.worked()
            return folder
        finally:
            self._opening.release()

    def can_write(self) -> bool:  # for a caller that reports the result, see `CircuitBreaker.allows`
        reads = self.health.reads
        # Half open, a written blob closes the breaker: the cache may have lost all others.
        return (not reads.tripped or reads.is_half_open) and self.health.writes.allows()

    def _lookup(self, key: BlobKey, span: Span | None) -> memoryview | None:
        folder = self.opened() if self.health.reads.allows() else None
        if folder is None:
            return None
        found = None
        with self.attempt("reading a blob", folder, self.health.reads):
            with suppress(FileNotFoundError):
                found = blob_file.open_map(folder.file_of(key.digest), key.digest, self.verified, span, key)
            if found is not None:
                self.health.reads.worked()
            else:  # A failing disk may still find that a file is missing.
                self.health.reads.inconclusive()
        if found is not None:
            folder.uses.add(key.digest)
            if folder.uses.is_due and not self.health.writes.tripped:
                with self.attempt("recording uses", folder):
                    folder.uses.flush(timeout=0)
        return found

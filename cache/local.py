"""The tier on a local disk: immutable files, an index that accounts for them, one filler at a time."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lmdb

from dataload.cache import blob
from dataload.cache.buffers import Buffers
from dataload.cache.draft import DiskDraft
from dataload.cache.folder import CacheFolder
from dataload.cache.forks import ForkAware
from dataload.cache.health import Breaker, Health
from dataload.cache.index import DAMAGED, Row
from dataload.cache.opened import open_folder
from dataload.cache.proven import Proven
from dataload.cache.steps import step
from dataload.cache.tier import BlobKey, Fill, Span
from dataload.errors import ConfigError, CorruptEntry
from dataload.metrics import Counters

FILL_SECONDS = 120.0
LEASED_AT_ONCE = 1000  # in one transaction, which others wait for
FLUSH_SECONDS = 1.0  # how far behind the record of uses may be: hits are never written one by one

log = logging.getLogger(__name__)


class LocalTier(ForkAware):
    """Blobs on a local disk, shared by all processes of a host that name the same folder.

    limit: most bytes on disk; None: 90 % of what the disk has free, and what is kept already.
    policy: "pin" admits until full and evicts only what no running process has used since it started; "lru" evicts
        what was used longest ago.
    clock: seconds, monotonic; by it a failing disk is tried again.

    region: bytes of the limit for what finds no room under "pin": it passes through there, first come, first gone.

    Notes: nothing is opened before the first use. A warm `get` costs a lookup and a map; what a process reads for the
    first time it also checks, in pieces of 64 KiB. Pickles as its settings. What the disk does wrong (full, failing,
    removed) is counted and logged; `stats()["health"]` says how it is.

    Raises ConfigError at the first use when the folder is one that a person must mend; see `CacheFolder`.
    """

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
        self.fill_seconds = FILL_SECONDS
        self._given_limit = limit
        self._clock = clock
        self._was_open = False
        self._touched: set[bytes] = set()
        self._reported: set[str] = set()
        self._flush_at = 0.0
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self.health = Health(str(self.path), self._clock)
        self.proven = Proven()
        self.buffers = Buffers()
        self._folder: CacheFolder | None = None

    def __reduce__(self) -> tuple[type[LocalTier], tuple[Path, int | None, str], dict[str, int]]:
        return LocalTier, (self.path, self._given_limit, self.policy), {"region": self.region}

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
            folder = open_folder(self.path)  # The same for threads that come here at once.
        except ConfigError as error:
            if not self._was_open:
                raise
            raise OSError(errno.ENXIO, str(error)) from error
        self._was_open = True
        self._limit = self._given_limit or folder.room()
        if folder.rebuilt:  # It entered all that was there.
            folder.evict(self._limit)
        self._folder = folder  # From here on other threads use it.
        return folder

    @property
    def limit(self) -> int:
        """Most bytes on disk; without end where nobody said and the disk cannot be asked."""
        with self.trouble("opening it", self.health.reads):
            _ = self.folder
            return self._limit
        return self._given_limit or sys.maxsize

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
        keep = not self.health.reads.tripped and self.health.writes.allows()
        with ExitStack() as stack:
            alone = False  # Past the deadline, or without locks: fetch, and keep nothing. Never a deadlock.
            if keep:
                with self.trouble("locking a blob", self.health.writes):
                    alone = stack.enter_context(self.folder.locks.hold(key.digest, self.fill_seconds))
                found = self._look_up(key, span, locked=alone)
            if found is not None:
                self.counters.add(hits=1, waits=1, bytes=len(found))
                return found
            self.counters.add(misses=1, unkept=int(not keep))
            step("fill: locked")
            draft = stack.enter_context(DiskDraft(self, key, keep=alone, or_nothing=to_keep is not None))
            fill(draft.allocate)
            step("fill: filled")
            return draft.publish(span)

    @contextmanager
    def alone(self, key: BlobKey, *, elect: bool = True) -> Iterator[None]:  # noqa: ARG002 (each is alone)
        with ExitStack() as stack:
            if not self.health.reads.tripped and self.health.writes.allows():
                with self.trouble("locking a blob", self.health.writes):
                    stack.enter_context(self.folder.locks.hold(key.digest, self.fill_seconds))
            yield

    def bring(self, keys: Iterable[BlobKey]) -> list[memoryview] | None:  # noqa: ARG002 (there is nobody to bring them)
        return None

    def stats(self) -> dict[str, Any]:
        return {**self.counters.snapshot(), "health": self.health.stats()}

    def lease(self, keys: Iterable[BlobKey]) -> None:
        """Note that this process is going to use these blobs, those of them that are kept."""
        digests = iter([key.digest for key in keys])
        with self.trouble("noting uses", self.health.writes):
            while some := list(itertools.islice(digests, LEASED_AT_ONCE)):
                self.folder.index.touch(some)

    def passes(self, keys: Iterable[BlobKey]) -> bool:
        if not self.region or self.policy != "pin" or self.health.reads.tripped or self.health.writes.tripped:
            return False
        with self.trouble("looking up a blob", self.health.reads):
            return not self.folder.index.stay(key.digest for key in keys)
        return False

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
        evict_before = folder.oldest_process if self.policy == "pin" else time.time_ns
        region = self.region if self.policy == "pin" else 0
        row = Row(key.digest, key.name, size)
        return folder.reserve(row, limit=self.limit, region=region, evict_before=evict_before)

    @contextmanager
    def trouble(self, doing: str, breaker: Breaker) -> Iterator[None]:
        """Swallows the tier's own trouble: counted, and logged once a kind. The bytes come from elsewhere.

        breaker: of what is left alone for a while when this goes on.
        """
        try:
            yield
        except (OSError, lmdb.Error) as error:
            self._failed(doing, error, breaker)

    def _failed(self, doing: str, error: Exception, breaker: Breaker) -> None:
        self._report(doing, error)
        if isinstance(error, CorruptEntry):  # One blob's trouble, not the disk's.
            return
        folder = self._folder
        if folder is None or (folder.closed and getattr(error, "errno", None) != errno.ESTALE):
            self.health.reads.failed(for_good=True)  # It cannot be opened.
        elif folder.closed:
            return  # Another thread has just let go of it.
        elif isinstance(error, (FileNotFoundError, NotADirectoryError, *DAMAGED)):
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

    def _look_up(self, key: BlobKey, span: Span | None, *, locked: bool = False) -> memoryview | None:
        """The blob if it is kept. locked: the caller holds its lock."""
        if not self.health.reads.allows():
            return None
        found = None
        try:
            folder = self.folder
            if folder.index.size_of(key.digest) is not None or self._adopt(folder, key, locked=locked):
                try:
                    found = blob.open_map(folder.file_of(key.digest), key.digest, self.proven, span)
                except FileNotFoundError:  # It is being filled just now, or its filler died.
                    found = None
            if found is not None or self.health.reads.tripped:
                self.health.reads.worked()
        except (OSError, lmdb.Error) as error:
            self._failed("reading a blob", error, self.health.reads)
        if found is not None:
            self._touched.add(key.digest)
            if time.monotonic() >= self._flush_at and not self.health.writes.tripped:
                with self.trouble("noting uses", self.health.writes):
                    self.flush()
        return found

    def _adopt(self, folder: CacheFolder, key: BlobKey, *, locked: bool) -> bool:
        """Enter a row for a sound file that has none, as when the index was lost under us; whether there was one."""
        path = folder.file_of(key.digest)
        if self.health.writes.tripped or not os.path.exists(path):  # noqa: PTH110 - asked at every miss
            return False
        with ExitStack() as stack:
            if not locked and not stack.enter_context(folder.locks.hold(key.digest, timeout=0)):
                return False
            try:
                footer, _, _ = blob.read_footer(path)
            except FileNotFoundError:  # Another has filled it and let it go since we looked.
                return False
            with self.trouble("making room for a blob", self.health.writes):
                if footer.digest == key.digest and self.reserve(key, footer.size):
                    step("adopt: entered")
                    return True
                folder.unlink(key.digest)
        return False

"""One filler at a time for each key, among all threads of all processes of a host."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dataload.runtime.forks import ForkAware, close_copies

FIRST_WAIT = 0.0001
LONGEST_WAIT = 0.02
EVICTION_SECONDS = 2.0
_EVICTIONS = 1 << 62  # the first byte that evictions lock; fills lock theirs and the one below it
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of fcntl(2): type, whence, start, length, pid


class ThreadLocks(ForkAware):
    """Locks named by keys, among the threads of this process. A lock is gone when nobody holds or awaits it."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._locks: weakref.WeakValueDictionary[bytes, threading.Lock] = weakref.WeakValueDictionary()

    @contextmanager
    def hold(self, digest: bytes, timeout: float = -1) -> Iterator[bool]:
        """Hold the lock of `digest`; yields False, without it, when `timeout` seconds pass first."""
        with self._mutex:
            lock = self._locks.setdefault(digest, threading.Lock())
        held = lock.acquire(timeout=timeout)
        try:
            yield held
        finally:
            if held:
                lock.release()


class KeyLocks(ForkAware):
    """Locks named by keys, among all processes of a host, in one file that is never unlinked.

    Open-file-description locks (fcntl(2), F_OFD_SETLK) on one byte a key: the kernel drops them with their holder, so
    nothing is left over from a killed process; unlike POSIX locks they survive the closing of other descriptors.
    Threads of one process are kept apart in memory first, so that at most one of them polls the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._threads = ThreadLocks()
        super().__init__()

    def after_fork_in_child(self) -> None:
        close_copies(self._path)  # Never unlock here: the lock is the parent's. Closing lets it end with the parent.

    @contextmanager
    def hold(self, digest: bytes, timeout: float) -> Iterator[bool]:
        """Hold the lock of `digest`; yields False, without it, when `timeout` seconds pass first.

        An eviction holds it for milliseconds, a fill for as long as the origin takes. So an eviction is waited for
        `EVICTION_SECONDS` at most: one that takes longer has been stopped.
        """
        deadline = time.monotonic() + timeout
        with self._threads.hold(digest, timeout) as first:
            if not first:
                yield False
                return
            with self._opened() as descriptor:
                byte = _byte_of(digest)
                held = _wait_for_lock(descriptor, byte, deadline)
                soon = min(deadline, time.monotonic() + EVICTION_SECONDS)
                yield held and _wait_for_lock(descriptor, _EVICTIONS + byte, soon)

    @contextmanager
    def hold_to_evict(self, digest: bytes) -> Iterator[bool]:
        """Hold the lock of `digest` for a moment, to remove its blob; yields False where another has it."""
        with self._threads.hold(digest, 0) as first, self._opened() as descriptor:
            yield first and set_lock(descriptor, _EVICTIONS + _byte_of(digest), fcntl.F_WRLCK)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the lock file, all of whose locks end with the block."""
        owner = os.getpid()
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            if os.getpid() == owner:
                with suppress(OSError):  # Closing alone would not do while a child has yet to close its copy.
                    set_lock(descriptor, 0, fcntl.F_UNLCK, 0)
                os.close(descriptor)


def _byte_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 2  # an off_t is 63 bits


def _wait_for_lock(descriptor: int, byte: int, deadline: float) -> bool:
    wait = FIRST_WAIT
    while not (held := set_lock(descriptor, byte, fcntl.F_WRLCK)) and time.monotonic() < deadline:
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT)
    return held


def set_lock(descriptor: int, byte: int, kind: int, count: int = 1) -> bool:
    """Lock (F_WRLCK) or unlock (F_UNLCK) `count` bytes of an open file description; 0: all from `byte` on.

    Return False when another description has one of them locked.

    Threads that share a descriptor do not exclude each other. Raises OSError where locks do not work.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True

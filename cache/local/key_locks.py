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
        """Hold the lock of `digest`; yields False, without it, when `timeout` seconds pass first."""
        deadline = time.monotonic() + timeout
        byte = int.from_bytes(digest[:8], "little") >> 2  # an off_t is 63 bits
        with self._threads.hold(digest, timeout) as first:
            if not first:
                yield False
                return
            with self._locked_byte(byte, deadline) as held:
                yield held

    @contextmanager
    def _locked_byte(self, byte: int, deadline: float) -> Iterator[bool]:
        owner = os.getpid()
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            wait = FIRST_WAIT
            while not (held := set_lock(descriptor, byte, fcntl.F_WRLCK)) and time.monotonic() < deadline:
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
            yield held
        finally:
            if os.getpid() == owner:
                with suppress(OSError):  # Closing alone would not do while a child has yet to close its copy.
                    set_lock(descriptor, byte, fcntl.F_UNLCK)
                os.close(descriptor)


def set_lock(descriptor: int, byte: int, kind: int) -> bool:
    """Lock (F_WRLCK) or unlock (F_UNLCK) bytes of an open file description. Return False when another has one locked.

    Threads that share a descriptor do not exclude each other. Raises OSError where locks do not work.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True

"""One filler at a time for each key, and so many requests at a time, among all threads of all processes of a host."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dataload.cache.forks import ForkAware, close_copies

FIRST_WAIT = 0.0001
LONGEST_WAIT = 0.02
SLOTS_FROM = 1 << 62  # the first byte that no key is locked by
PATIENCE, HOPELESS = 10.0, 60.0  # for a place; and how long it is not waited for again when there was none
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


class Slots(ForkAware):
    """`count` places, each for one of the threads of all processes of a host that name the same file.

    A byte of the file is a place, locked as `KeyLocks` does it. They keep order and no more: who is given none in
    `PATIENCE` seconds, for those who have them are stopped, or cannot be told where there is one, goes on without.
    Threads of one process wait for each other in memory: only for other processes is the file asked again and again.
    """

    def __init__(self, path: str, count: int) -> None:
        self._path = path
        self._count = count
        self._begin()
        super().__init__()

    def _begin(self) -> None:
        self._next = threading.Lock()  # One thread asks for all of its process, which so come in turn.
        self._turns = threading.Semaphore(self._count)
        # Places that no thread has through this object; each process tries them in an order of its own.
        self._idle = random.sample(range(self._count), self._count)
        self._hopeless_until = 0.0

    def after_fork_in_child(self) -> None:
        self._begin()
        close_copies(self._path)

    def __reduce__(self) -> tuple[type[Slots], tuple[str, int]]:
        return Slots, (self._path, self._count)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Have a place, as soon as there is one."""
        owner, turns, idle = os.getpid(), self._turns, self._idle
        turn, descriptor, place = False, None, None
        try:
            with suppress(OSError), self._next:
                hopeless = time.monotonic() < self._hopeless_until
                turn = turns.acquire(timeout=0 if hopeless else PATIENCE)
                if turn:
                    descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                    place = self._wait(descriptor)
                elif not hopeless:
                    self._hopeless_until = time.monotonic() + HOPELESS
            yield
        finally:
            if descriptor is not None and os.getpid() == owner:
                with suppress(OSError):  # as of a key
                    set_lock(descriptor, SLOTS_FROM, fcntl.F_UNLCK, self._count)
                os.close(descriptor)
            if place is not None:
                idle.append(place)
            if turn:
                turns.release()

    def _wait(self, descriptor: int) -> int | None:
        """A place for this process alone; None when there was none in all that time."""
        wait, deadline = FIRST_WAIT, time.monotonic() + PATIENCE
        while (place := self._lock_one(descriptor)) is None and (now := time.monotonic()) >= self._hopeless_until:
            if now > deadline:
                self._hopeless_until = now + HOPELESS
                break
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        return place

    def _lock_one(self, descriptor: int) -> int | None:
        for place in reversed(self._idle):
            if set_lock(descriptor, SLOTS_FROM + place, fcntl.F_WRLCK):
                self._idle.remove(place)
                return place
        return None


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


def set_lock(descriptor: int, byte: int, kind: int, count: int = 1) -> bool:
    """Lock (F_WRLCK) or unlock (F_UNLCK) bytes of an open file description. Return False when another has one locked.

    Threads that share a descriptor do not exclude each other. Raises OSError where locks do not work.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True

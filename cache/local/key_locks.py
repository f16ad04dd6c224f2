"""Locks per key, exclusive among all threads of all processes of a host."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dataload.runtime.forks import ForkAware, close_copies
from dataload.runtime.renewals import Renewals

FIRST_PAUSE, LONGEST_PAUSE = 0.0001, 0.02  # seconds between attempts to lock
EVICTION_SECONDS = 2.0
BEAT_SECONDS, BEAT_PERIOD = 0.05, 0.5  # A holder locks its key's byte for heartbeats that long, and that often.
SILENCE_SECONDS = 10.0  # A holder without a heartbeat for this time was stopped.
# Offsets of the bytes for evictions and heartbeats. A fill locks its key's byte and its eviction byte.
_EVICTIONS, _BEATS = 1 << 61, 2 << 61
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of fcntl(2): type, whence, start, length, pid


class ThreadLocks(ForkAware):
    """Locks named by keys, among the threads of this process. An unused lock is freed."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._locks: weakref.WeakValueDictionary[bytes, threading.Lock] = weakref.WeakValueDictionary()

    @contextmanager
    def hold(self, digest: bytes, timeout: float = -1) -> Iterator[bool]:
        """Hold the lock of `digest`. Yield False, without the lock, after `timeout` seconds."""
        with self._mutex:
            lock = self._locks.setdefault(digest, threading.Lock())
        held = lock.acquire(blocking=False)
        if not held and timeout:
            held = lock.acquire(timeout=timeout)
        try:
            yield held
        finally:
            if held:
                lock.release()


class KeyLocks(ForkAware):
    """Locks named by keys, among all processes of a host, in one file that is never unlinked.

    A lock is an open-file-description lock (fcntl(2), F_OFD_SETLK) on one byte of the file. The kernel releases it when
    its holder dies. Unlike a POSIX lock, it survives the closing of other descriptors. Threads of one process compete
    for an in-memory lock first, so at most one of them polls the file.

    Args:
        path: The lock file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._threads = ThreadLocks()
        self._heartbeats = _Heartbeats(path)
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._heartbeats = _Heartbeats(self._path)
        close_copies(self._path)  # Close, never unlock: the lock belongs to the parent and must end with it.

    @contextmanager
    def hold(self, digest: bytes, timeout: float) -> Iterator[bool]:
        """Hold the lock of `digest`. Yield False, without the lock, after `timeout` seconds.

        A fill holds the lock as long as the origin takes, an eviction for milliseconds. An eviction that takes longer
        than `EVICTION_SECONDS` was stopped, so the wait for evictions ends then.
        """
        deadline = time.monotonic() + timeout
        with self._threads.hold(digest, timeout) as first:
            if not first:
                yield False
                return
            with _opened(self._path) as descriptor:
                byte = _byte_of(digest)
                held = _wait_for_lock(descriptor, byte, deadline)
                eviction_deadline = min(deadline, time.monotonic() + EVICTION_SECONDS)
                yield held and _wait_for_lock(descriptor, _EVICTIONS + byte, eviction_deadline)

    @contextmanager
    def hold_free(self, digests: Sequence[bytes]) -> Iterator[list[ExitStack | None]]:
        """Hold those locks of `digests` that are free, for many fills at once.

        Yield a stack for each, which releases the lock when it is closed, or None if the lock is not held.
        """
        with _opened(self._path) as descriptor, ExitStack() as stack:
            found: list[ExitStack | None] = []
            for digest in digests:
                own, byte = stack.enter_context(ExitStack()), _byte_of(digest)
                held = own.enter_context(self._threads.hold(digest, 0))
                if held:  # Otherwise the byte may belong to an equal digest before.
                    own.callback(_release, descriptor, byte, os.getpid())
                    held = all(set_lock(descriptor, start + byte, fcntl.F_WRLCK) for start in (0, _EVICTIONS))
                if not held:  # Other threads may wait for it.
                    own.close()
                found.append(own if held else None)
            yield found

    @contextmanager
    def hold_to_evict(self, digest: bytes) -> Iterator[bool]:
        """Hold the lock of `digest` to remove its blob. Yield False at once if the lock is taken."""
        with self._threads.hold(digest, 0) as first, _opened(self._path) as descriptor:
            yield first and set_lock(descriptor, _EVICTIONS + _byte_of(digest), fcntl.F_WRLCK)

    @contextmanager
    def beating(self, digest: bytes) -> Iterator[None]:
        """Show other processes for the duration of the block that the holder of this lock runs. Best effort."""
        byte = _byte_of(digest)
        with suppress(RuntimeError):  # No thread can be started.
            self._heartbeats.hold(byte)
        try:
            yield
        finally:
            self._heartbeats.release(byte)

    def holder(self, digest: bytes) -> int | None:
        """Return another process that holds the lock of `digest`; None: none does, or this one may not see which.

        The kernel knows no process of such a lock, but lists the locks of each process's open files.
        """
        lock = f":{Path(self._path).stat().st_ino} {_byte_of(digest)} "
        for process in Path("/proc").glob("[1-9]*"):
            with suppress(OSError):  # It is another user's, or has ended.
                for file in (process / "fdinfo").iterdir():
                    if lock in file.read_text() and int(process.name) != os.getpid():
                        return int(process.name)
        return None

    def is_running(self, digest: bytes) -> bool:
        """Return whether the holder of a lock runs, or has released it. If it was stopped: after `SILENCE_SECONDS`."""
        byte, beats = _byte_of(digest), set[bool]()
        with _opened(self._path) as descriptor:
            for _ in attempts(time.monotonic() + SILENCE_SECONDS):
                beats.add(is_locked(descriptor, _BEATS + byte))
                if len(beats) > 1 or not is_locked(descriptor, byte):
                    return True
        return False


class _Heartbeats(Renewals[int]):
    """The heartbeats of this process: bytes of the lock file that it locks and unlocks periodically."""

    def __init__(self, path: str) -> None:
        super().__init__(BEAT_PERIOD, "dataload-blocks-heartbeat")
        self._path = path

    def renew(self, held: Iterable[int]) -> None:
        with suppress(OSError), _opened(self._path) as descriptor:
            for byte in held:
                set_lock(descriptor, _BEATS + byte, fcntl.F_WRLCK)
            time.sleep(BEAT_SECONDS)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Yield a descriptor of the lock file; its locks are released at the end of the block."""
    owner = os.getpid()
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        if os.getpid() == owner:
            with suppress(OSError):  # A child may still have its copy open, so closing does not unlock.
                set_lock(descriptor, 0, fcntl.F_UNLCK, 0)
            os.close(descriptor)


def _release(descriptor: int, byte: int, owner: int) -> None:
    """Unlock a key, but not in a forked child: the lock belongs to its parent."""
    if os.getpid() == owner:
        with suppress(OSError):
            for start in (0, _EVICTIONS):
                set_lock(descriptor, start + byte, fcntl.F_UNLCK)


def _byte_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 3  # an off_t is 63 bits, and there are three ranges of bytes


def _wait_for_lock(descriptor: int, byte: int, deadline: float) -> bool:
    return any(set_lock(descriptor, byte, fcntl.F_WRLCK) for _ in attempts(deadline))


def attempts(deadline: float) -> Iterator[None]:
    """Yield at least once, and then until `deadline` (monotonic seconds), after growing pauses."""
    yield
    pause = FIRST_PAUSE
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        yield


def set_lock(descriptor: int, byte: int, kind: int, count: int = 1) -> bool:
    """Lock or unlock bytes of an open file description. Return False if another description holds one of the locks.

    Threads that share a descriptor do not exclude each other.

    Args:
        descriptor: The open file.
        byte: The first byte.
        kind: F_WRLCK to lock, F_UNLCK to unlock.
        count: Number of bytes; 0: all from `byte` on.

    Raises:
        OSError: The filesystem does not support locks.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(descriptor: int, byte: int) -> bool:
    """Return whether another open file description holds the lock of a byte. Raises OSError as `set_lock` does."""
    probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, probe))[0]
    return kind != fcntl.F_UNLCK

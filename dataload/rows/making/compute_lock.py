"""The lock of the threads that decode small row groups: one of them computes, and the others wait.

A thread releases the interpreter lock at each system call. If several threads compute in Python, another one takes the
lock each time, and switching between threads takes longer than the work on a small row group.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush

from dataload.runtime.forks import ForkAware
from dataload.runtime.priority import current_priority

PATIENCE_SECONDS = 0.1  # for a holder that itself waits for something; then a thread computes without the lock


class ComputeLock(ForkAware):
    """A best-effort lock that threads get by `priority`, then in the order of their requests.

    Whether `acquire` got the lock, `is_held` tells, also to a thread that was interrupted meanwhile.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        self._holder: threading.Thread | None = None
        self._handovers = 0
        # A heap: priority, number, thread, and a lock that the last holder releases.
        self._waiters: list[tuple[int, int, threading.Thread, threading.Lock]] = []

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it."""
        return self._holder is threading.current_thread()

    def acquire(self) -> None:
        """Block until this thread holds the lock, or `PATIENCE_SECONDS` pass without a handover."""
        this, waiter = threading.current_thread(), None
        try:
            with self._mutex:
                if self._holder in (None, this) or not self._holder.is_alive():
                    self._holder = this
                    return
                given = threading.Lock()
                given.acquire()
                waiter = current_priority(), next(self._numbers), this, given
                heappush(self._waiters, waiter)
                handovers = self._handovers
            while not given.acquire(timeout=PATIENCE_SECONDS):
                with self._mutex:
                    if self._holder is this or handovers == self._handovers:
                        return
                    handovers = self._handovers
        finally:
            if waiter is not None:
                self._leave(waiter)

    def _leave(self, waiter: tuple[int, int, threading.Thread, threading.Lock]) -> None:
        with self._mutex:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                heapify(self._waiters)

    def release(self) -> None:
        """Hand the lock to the next thread, if this thread holds it."""
        with self._mutex:
            if not self.is_held:
                return
            self._handovers += 1
            self._holder = self._waiters[0][2] if self._waiters else None
            if self._waiters:
                heappop(self._waiters)[-1].release()


lock = ComputeLock()


@contextmanager
def computing() -> Iterator[None]:
    """Hold the lock for the duration of the block, which should wait for nothing but the disk.

    Best effort: a thread goes on without it after a while.
    """
    try:
        lock.acquire()
        yield
    finally:
        lock.release()

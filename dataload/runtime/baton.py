"""The baton of the threads that load row groups: one of them computes, and the others wait.

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
from dataload.runtime.turns import current_turn

PATIENCE_SECONDS = 0.1  # for a holder that waits for a lock; then a thread goes on without the baton


class _Baton(ForkAware):
    """Threads receive the baton by turn (`in_turn`), then in the order of their requests.

    A thread that is interrupted while it takes the baton learns from `is_mine` whether it has it.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        self._holder: threading.Thread | None = None
        self._times_given = 0
        # A heap: turn, number, thread, and a lock that the last holder releases.
        self._waiters: list[tuple[int, int, threading.Thread, threading.Lock]] = []

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the baton."""
        return self._holder is threading.current_thread()

    def take(self) -> None:
        """Block until this thread holds the baton, or `PATIENCE_SECONDS` pass without a handover; see `is_mine`."""
        this, waiter = threading.current_thread(), None
        try:
            with self._mutex:
                if self._holder in (None, this) or not self._holder.is_alive():
                    self._holder = this
                    return
                given = threading.Lock()
                given.acquire()
                waiter = current_turn(), next(self._numbers), this, given
                heappush(self._waiters, waiter)
                times_given = self._times_given
            while not given.acquire(timeout=PATIENCE_SECONDS):
                with self._mutex:
                    if self._holder is this or times_given == self._times_given:
                        return
                    times_given = self._times_given
        finally:
            if waiter is not None:
                self._leave(waiter)

    def _leave(self, waiter: tuple[int, int, threading.Thread, threading.Lock]) -> None:
        with self._mutex:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                heapify(self._waiters)

    def give(self) -> None:
        """Give the baton to the next thread, if this thread has it."""
        with self._mutex:
            if not self.is_mine:
                return
            self._times_given += 1
            self._holder = self._waiters[0][2] if self._waiters else None
            if self._waiters:
                heappop(self._waiters)[-1].release()


_baton = _Baton()


@contextmanager
def computing() -> Iterator[None]:
    """Hold the baton for the duration of the block, which should wait for nothing but the disk.

    Best effort: a thread goes on without it after a while.
    """
    try:
        _baton.take()
        yield
    finally:
        _baton.give()

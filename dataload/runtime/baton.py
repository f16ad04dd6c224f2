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

from dataload.runtime.executor import current_turn
from dataload.runtime.forks import ForkAware

PATIENCE_SECONDS = 0.1  # for a holder that waits without `waiting`; then a thread goes on without the baton


class _Baton(ForkAware):
    """Threads receive the baton by turn (`in_turn`), then in the order of their requests."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        self._free = True
        self._times_given = 0
        self._waiters: list[tuple[int, int, threading.Lock]] = []  # a heap: turn, number, released by the last holder

    def take(self) -> bool:
        """Wait for the baton. Return whether this thread has it."""
        with self._mutex:
            if self._free:
                self._free = False
                return True
            given = threading.Lock()
            given.acquire()
            waiter = current_turn(), next(self._numbers), given
            heappush(self._waiters, waiter)
            times_given = self._times_given
        while not given.acquire(timeout=PATIENCE_SECONDS):
            with self._mutex:
                if times_given == self._times_given:  # Therefore this one still waits.
                    self._waiters.remove(waiter)
                    heapify(self._waiters)
                    return False
                times_given = self._times_given
        return True

    def give(self) -> None:
        """Give the baton to the next thread."""
        with self._mutex:
            self._times_given += 1
            if self._waiters:
                heappop(self._waiters)[-1].release()
            else:
                self._free = True


_baton = _Baton()
_this_thread = threading.local()


@contextmanager
def computing() -> Iterator[None]:
    """Hold the baton for the duration of the block. Best effort: a thread goes on without it after a while."""
    if getattr(_this_thread, "holds", False):
        yield
        return
    _this_thread.holds = _baton.take()
    try:
        yield
    finally:
        if _this_thread.holds:
            _this_thread.holds = False
            _baton.give()


@contextmanager
def waiting() -> Iterator[None]:
    """Leave the baton to other threads for the duration of the block, which mostly waits.

    Enter it before `doing`: the wait for the baton at its end is not charged to that cause.
    """
    if not getattr(_this_thread, "holds", False):
        yield
        return
    _this_thread.holds = False
    _baton.give()
    try:
        yield
    finally:
        _this_thread.holds = _baton.take()

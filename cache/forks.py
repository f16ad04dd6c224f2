"""What must not cross a fork hears of it here: LMDB environments, lock descriptors, thread pools, event loops."""

from __future__ import annotations

import os
import threading
import weakref


class ForkAware:
    """Told of every fork of this process, in the forking thread.

    A subclass overrides what it needs, and calls `super().__init__()` last: from there on it may be told.
    `before_fork` and `after_fork_in_parent` come in pairs.
    """

    def __init__(self) -> None:
        _forks.join(self)

    def before_fork(self) -> None:
        """About to fork: let go of what a child must not inherit."""

    def after_fork_in_parent(self) -> None:
        """Forked; this is the parent."""

    def after_fork_in_child(self) -> None:
        """Forked; this is the child. Its other threads are gone, and with them whoever held a lock."""


class _Forks:
    """Everyone who wants to know. One fork at a time: threads may fork at once, and the hooks come in two halves."""

    def __init__(self) -> None:
        self._gate = threading.RLock()
        self._installed = False
        self._alive: weakref.WeakSet[ForkAware] = weakref.WeakSet()
        self._told: list[ForkAware] = []

    def join(self, one: ForkAware) -> None:
        with self._gate:
            if not self._installed:
                os.register_at_fork(
                    before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
                )
                self._installed = True
            self._alive.add(one)

    def _before(self) -> None:
        self._gate.acquire()
        self._told = list(self._alive)
        for one in self._told:
            one.before_fork()

    def _after_in_parent(self) -> None:
        for one in self._told:
            one.after_fork_in_parent()
        self._told = []
        self._gate.release()

    def _after_in_child(self) -> None:
        for one in self._told:
            one.after_fork_in_child()
        self._told = []
        self._gate.release()


_forks = _Forks()

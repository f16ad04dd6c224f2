"""What must not cross a fork hears of it here: LMDB environments, lock descriptors, thread pools, event loops."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress


class ForkAware:
    """Told of every fork of this process, in the forking thread.

    A subclass overrides what it needs, and calls `super().__init__()` when it is ready to be told.
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


def close_copies(path: str | os.PathLike[str]) -> None:
    """Close every descriptor that this child has of the file or folder at `path`, which is no link.

    Asked of the kernel, not taken from a list: another thread of the parent may have been opening or closing one at the
    fork, so that a list would lack it, or have its number, which is another file's by now.
    """
    real = os.path.realpath(path)
    with suppress(OSError):  # Without /proc they end with the child.
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - there may be thousands
            with suppress(OSError):  # The one that lists them is gone.
                if os.readlink(f"/proc/self/fd/{number}") == real:  # noqa: PTH115 - `stat` may hang on another's disk
                    os.close(int(number))

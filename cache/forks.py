"""What must not cross a fork hears of it here: LMDB environments, lock descriptors, thread pools, event loops."""

from __future__ import annotations

import functools
import os
import weakref


class ForkAware:
    """Told of every fork of this process, in the forking thread.

    A subclass overrides what it needs; `before_fork` and `after_fork_in_parent` come in pairs.
    """

    def __init__(self) -> None:
        _install()
        _alive.add(self)

    def before_fork(self) -> None:
        """About to fork: let go of what a child must not inherit."""

    def after_fork_in_parent(self) -> None:
        """Forked; this is the parent."""

    def after_fork_in_child(self) -> None:
        """Forked; this is the child. Its other threads are gone, and with them whoever held a lock."""


_alive: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_forking: list[ForkAware] = []


@functools.cache
def _install() -> None:
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    _forking.extend(_alive)
    for one in _forking:
        one.before_fork()


def _in_parent() -> None:
    for one in _forking:
        one.after_fork_in_parent()
    _forking.clear()


def _in_child() -> None:
    for one in _forking:
        one.after_fork_in_child()
    _forking.clear()

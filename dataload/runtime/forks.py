"""Fork hooks for objects that a child process must not inherit, such as lock descriptors and thread pools."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

T = TypeVar("T")


class ForkAware:
    """Base class of objects with fork hooks. The forking thread calls the hooks.

    A subclass overrides the hooks that it needs. It calls `super().__init__()` once its hooks may be called.
    `before_fork` and `after_fork_in_parent` are called in pairs.
    """

    def __init__(self) -> None:
        _registry.register(self)

    def before_fork(self) -> None:
        """Release the resources that a child must not inherit."""

    def after_fork_in_parent(self) -> None:
        """Acquire the released resources again, in the parent."""

    def after_fork_in_child(self) -> None:
        """Reset this object in the child. The parent's other threads, and the locks they held, do not exist there."""


class _Registry:
    """The live `ForkAware` objects. It serialises forks, because each fork calls the hooks in two steps."""

    def __init__(self) -> None:
        self._gate = threading.RLock()
        self._installed = False
        self._live: weakref.WeakSet[ForkAware] = weakref.WeakSet()
        self._notified: list[ForkAware] = []

    def register(self, member: ForkAware) -> None:
        with self._gate:
            if not self._installed:
                os.register_at_fork(
                    before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
                )
                self._installed = True
            self._live.add(member)

    def _before(self) -> None:
        self._gate.acquire()
        self._notified = list(self._live)
        # Python forks after an exception, such as that of Ctrl-C, and calls the other hooks.
        with ExitStack() as stack:
            for member in self._notified:
                stack.callback(member.before_fork)

    def _after_in_parent(self) -> None:
        self._notify(lambda member: member.after_fork_in_parent())

    def _after_in_child(self) -> None:
        self._notify(lambda member: member.after_fork_in_child())

    def _notify(self, hook: Callable[[ForkAware], None]) -> None:
        with ExitStack() as stack:  # calls all of them, whatever one raises
            stack.callback(self._gate.release)
            while self._notified:
                stack.callback(hook, self._notified.pop())


_registry = _Registry()


class KeptByChildren(ForkAware):
    """Objects that a forked child never frees, because their end would change its parent.

    Any thread may add objects. The process that adds an object frees it as usual.
    """

    def __init__(self) -> None:
        self._live: weakref.WeakSet[object] = weakref.WeakSet()
        self._inherited: list[object] = []
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Keep the parent's objects until this process ends."""
        self._inherited += self._live

    def add(self, added: T) -> T:
        """Add an object, and return it."""
        self._live.add(added)
        return added


def close_copies(path: str | os.PathLike[str]) -> None:
    """Close every descriptor of the file or folder at `path` in this child process.

    The kernel lists the descriptors, not this process: another thread of the parent may have opened or closed a
    descriptor during the fork. A list kept in memory could miss it, or name a number that another file has by now.

    Args:
        path: The file or folder itself, not a link to it.
    """
    real = os.path.realpath(path)
    with suppress(OSError):  # Without /proc the descriptors stay open until the child ends.
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - there may be thousands
            with suppress(OSError):  # The descriptor of the listing itself is closed by now.
                if os.readlink(f"/proc/self/fd/{number}") == real:  # noqa: PTH115 - `stat` may hang on another's disk
                    os.close(int(number))

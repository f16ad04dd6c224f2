"""Objects that all their users in one process share, by key."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from dataload.runtime.forks import ForkAware

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Instances(ForkAware, Generic[K, V]):
    """The live objects of this process by key. An object lives as long as its last user.

    Args:
        inherited: Whether a forked child goes on with the objects of its parent; otherwise it begins with none.

    Notes:
        Any thread may call it.
    """

    def __init__(self, *, inherited: bool) -> None:
        self._inherited = inherited
        self._live: weakref.WeakValueDictionary[tuple[int, K], V] = weakref.WeakValueDictionary()
        # Reentrant: the forking thread holds it, and other objects of the child may ask before it is released.
        self._mutex = threading.RLock()
        super().__init__()

    def before_fork(self) -> None:
        self._mutex.acquire()

    def after_fork_in_parent(self) -> None:
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        self._mutex.release()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the object of a key. `make` makes it if there is none; the result of a second thread is dropped."""
        here = 0 if self._inherited else os.getpid(), key
        found = self._live.get(here)
        if found is not None:
            return found
        made = make()  # without the mutex: a fork may wait for it while it holds up what `make` needs
        with self._mutex:
            return self._live.setdefault(here, made)

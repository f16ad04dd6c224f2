"""Objects that all their users in one process share, by key."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from dataload.runtime.forks import ForkAware

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Instances(ForkAware, Generic[K, V]):
    """The live objects of this process by key. An object lives as long as somebody uses it.

    Args:
        inherited: Whether a forked child goes on with the objects of its parent; otherwise it begins with none.

    Notes:
        Any thread may call it.
    """

    def __init__(self, *, inherited: bool) -> None:
        self._inherited = inherited
        self._live: weakref.WeakValueDictionary[K, V] = weakref.WeakValueDictionary()
        self._mutex = threading.RLock()  # Reentrant: the end of an object may ask for another one.
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.RLock()
        if not self._inherited:
            self._live = weakref.WeakValueDictionary()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the object of a key. `make` makes it if there is none; the result of a second thread is dropped."""
        found = self._live.get(key)
        if found is not None:
            return found
        made = make()  # without the mutex: a fork may wait for it while it holds up what `make` needs
        with self._mutex:
            return self._live.setdefault(key, made)

"""Objects that all their users in one process share, by key, and the largest numbers that these users ask for."""

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


class Largest:
    """Numbers that the users of a shared object ask for. Of each number, the largest of all live users applies.

    Notes:
        Any thread may call it.
    """

    def __init__(self) -> None:
        self._asked: weakref.WeakKeyDictionary[object, tuple[int, ...]] = weakref.WeakKeyDictionary()

    def of(self, user: object, *numbers: int) -> tuple[int, ...]:
        """Set the numbers of a user, as long as it lives. Return the largest ones."""
        self._asked[user] = numbers
        # A copy in one step, unlike `values`: users of other threads may come and go meanwhile.
        users = [reference() for reference in self._asked.keyrefs()]
        return tuple(map(max, zip(*(self._asked[each] for each in users if each is not None), strict=True)))

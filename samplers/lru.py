"""Small caches for values that can be rebuilt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """A mapping that keeps only the `size` most recently used values.

    Notes: threads may share one cache. It has no lock, because a child forked meanwhile would inherit it locked and
    block for ever. Each operation on the dict is atomic. Threads that miss the same key at once may each build its
    value; all of them return the first one stored. Pickled copies start empty.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """Return the value of `key`. Call `make(key)` if it is not cached."""
        try:
            value = self._values[key]
        except KeyError:
            value = self._values.setdefault(key, make(key))
        with suppress(KeyError):  # Another thread may have evicted the key, or the last value.
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value

    def __reduce__(self) -> tuple[type[LRU[K, V]], tuple[int]]:
        return type(self), (self._size,)


class FirstKept(Generic[K, V]):
    """A mapping that keeps the first `size` values, for keys that come again in the same order.

    An LRU cache that is a little too small would keep none of them until they come again. Otherwise it is like `LRU`.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """Return the value of `key`. Call `make(key)` if it is not cached."""
        try:
            return self._values[key]
        except KeyError:
            value = make(key)
        if len(self._values) < self._size:
            self._values.setdefault(key, value)
        return value

    def __reduce__(self) -> tuple[type[FirstKept[K, V]], tuple[int]]:
        return type(self), (self._size,)

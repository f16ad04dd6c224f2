"""The few things made last, kept because they will be asked for again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Values by key; the `size` used last are kept.

    Notes: threads may share one. Pickled copies start empty: what was made can be made again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of `key`, made now unless it was made lately."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make(key)
            self._values.move_to_end(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)
            return self._values[key]

    def __reduce__(self) -> tuple[type[LRU[K, V]], tuple[int]]:
        return type(self), (self._size,)

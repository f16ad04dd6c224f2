"""A FIFO memory budget shared by threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ReservationCancelled(Exception):
    """The consumer of a pending reservation has stopped."""


class MemoryBudget:
    """Bytes that threads reserve before they allocate.

    Reservations are granted in request order, so the row group that is needed first is never starved by later, smaller
    ones. A request for more than the whole budget waits until it can have all of it.

    Args:
        total: Size of the budget in bytes.

    Attributes:
        total: As above.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._mutex = threading.Lock()
        self._waiters: deque[threading.Condition] = deque()  # FIFO; only the head is notified

    @property
    def idle(self) -> bool:
        """Whether nothing is reserved."""
        return self._free == self.total

    @property
    def reserved(self) -> int:
        """Bytes that are reserved now."""
        return self.total - self._free

    def fits(self, size: int) -> bool:
        """Return whether a reservation of `size` bytes would be granted at once."""
        return not self._waiters and self._free >= min(size, self.total)

    def resize(self, total: int) -> None:
        """Change the size of the budget. Reservations stay."""
        with self._mutex:
            self._free += total - self.total
            self.total = total
            self._notify_head()

    @contextmanager
    def reserve(self, size: int, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Callable[[int], None]]:
        """Hold `size` bytes for the duration of the block. Yield a function that gives some of them back before.

        Args:
            size: Bytes to reserve. A size above the total reserves the total.
            cancelled: Returns whether the consumer has stopped. A waiter checks it when it becomes the head.

        Raises:
            ReservationCancelled: `cancelled()` became true before the reservation was granted.
        """
        waiter = threading.Condition(self._mutex)
        with self._mutex:
            self._waiters.append(waiter)
            self._notify_head()  # The head may have been cancelled; let it leave the queue.
            try:
                while not cancelled():
                    reserved = min(size, self.total)  # The total may have changed.
                    if self._waiters[0] is waiter and self._free >= reserved:
                        break
                    waiter.wait()
                else:
                    raise ReservationCancelled
                self._free -= reserved
            finally:
                self._waiters.remove(waiter)
                self._notify_head()
        remaining = reserved

        def give_back(part: int) -> None:
            nonlocal remaining
            with self._mutex:
                part = min(part, remaining)
                remaining -= part
                self._free += part
                self._notify_head()

        try:
            yield give_back
        finally:
            give_back(remaining)

    def _notify_head(self) -> None:
        if self._waiters:
            self._waiters[0].notify()

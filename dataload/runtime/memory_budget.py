"""Memory that threads share: nobody goes on before there is room for what they will hold."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ReservationCancelled(Exception):
    """Who asked for what waits for room has ended."""


class MemoryBudget:
    """`total` units, given in the order in which they are asked for. Whoever wants more than all of them gets all."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._mutex = threading.Lock()
        self._turns: deque[threading.Condition] = deque()  # of those that wait; only the first is ever woken

    @property
    def unused(self) -> bool:
        """Whether nobody holds anything."""
        return self._free == self._total

    def has(self, units: int) -> bool:
        """Whether who wants so many would not wait."""
        return not self._turns and self._free >= min(units, self._total)

    @contextmanager
    def hold(self, units: int, unwanted: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Hold so many meanwhile. Raises UnwantedError where it is `unwanted`, at once or in its turn."""
        units, turn = min(units, self._total), threading.Condition(self._mutex)
        with self._mutex:
            self._turns.append(turn)
            self._wake()  # Who is first, and no longer wants it, is in the way.
            try:
                while not unwanted():
                    if self._turns[0] is turn and self._free >= units:
                        break
                    turn.wait()
                else:
                    raise ReservationCancelled
                self._free -= units
            finally:
                self._turns.remove(turn)
                self._wake()
        try:
            yield
        finally:
            with self._mutex:
                self._free += units
                self._wake()

    def _wake(self) -> None:
        if self._turns:
            self._turns[0].notify()

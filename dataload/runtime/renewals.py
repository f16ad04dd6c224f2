"""Claims that a thread of this process renews while they are held, such as leases."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Renewals(Generic[T]):
    """Base of claims that one thread renews periodically. Thread-safe; a forked child creates its own.

    Args:
        seconds: Time between two renewals. The thread ends if nothing is held then, so most claims cost little.
        name: Name of the thread.
    """

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._mutex = threading.Lock()
        self._held: set[T] = set()
        self._is_running = False

    def renew(self, held: Iterable[T]) -> None:
        """Renew what is held. It raises nothing."""
        raise NotImplementedError

    def hold(self, claim: T) -> None:
        """Renew a claim from now on.

        Raises:
            RuntimeError: No thread can be started, so nothing would renew it.
        """
        with self._mutex:
            if not self._is_running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._is_running = True
            self._held.add(claim)

    def release(self, claim: T) -> bool:
        """Renew a claim no longer. Return whether this process held it."""
        with self._mutex:
            was_held = claim in self._held
            self._held.discard(claim)
            return was_held

    def _run(self) -> None:
        while True:
            time.sleep(self._seconds)
            with self._mutex:
                held = list(self._held)
                self._is_running = bool(held)
            if not held:
                return
            self.renew(held)

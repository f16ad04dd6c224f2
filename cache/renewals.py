"""Claims that a thread of this process renews while they are held, such as leases."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from dataload.runtime.executor import DaemonExecutor

T = TypeVar("T")


class Renewals(Generic[T]):
    """Base of claims that one thread renews periodically. Thread-safe; a forked child creates its own.

    Args:
        seconds: Time between two renewals.
        name: Name of the thread, which runs only while something is held.
    """

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._held: set[T] = set()
        self._changed = threading.Condition()
        self._thread = DaemonExecutor(1, name)

    def renew(self, held: Iterable[T]) -> None:
        """Renew what is held. It raises nothing."""
        raise NotImplementedError

    def hold(self, claim: T) -> None:
        """Renew a claim from now on.

        Raises:
            RuntimeError: No thread can be started, so nothing would renew it.
        """
        with self._changed:
            self._held.add(claim)
            first = len(self._held) == 1
        if first:
            try:
                self._thread.submit(self._run)
            except RuntimeError:
                self.release(claim)
                raise

    def release(self, claim: T) -> bool:
        """Renew a claim no longer. Return whether this process held it."""
        with self._changed:
            held = claim in self._held
            self._held.discard(claim)
            if not self._held:
                self._changed.notify()
        return held

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._held, self._seconds):
                    return
                held = list(self._held)
            self.renew(held)

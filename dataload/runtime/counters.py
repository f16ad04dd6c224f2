"""Counters that threads share, and the account that work is charged to."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Counters:
    """Named totals (counts, bytes or seconds). Any thread may add to them."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a loop's generator in a thread that holds the lock.
        self._lock = threading.RLock()
        self._totals: defaultdict[str, float] = defaultdict(int)

    def add(self, **amounts: float) -> None:
        """Add the amounts to the totals of these names."""
        with self._lock:
            for name, amount in amounts.items():  # Counter.update takes three times as long.
                self._totals[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Return a copy of the totals."""
        with self._lock:
            return dict(self._totals)


_account: ContextVar[Counters | None] = ContextVar("account", default=None)


@contextmanager
def charged_to(account: Counters) -> Iterator[None]:
    """Add the amounts of each `charge` in the block to `account`.

    The account also applies to the calls that the block submits to a `DaemonExecutor`.
    """
    token = _account.set(account)
    try:
        yield
    finally:
        _account.reset(token)


def charge(**amounts: float) -> None:
    """Add the amounts to the account of the current work, if there is one."""
    account = _account.get()
    if account is not None:
        account.add(**amounts)

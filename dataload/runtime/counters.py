"""Counters that threads share, and the account that work is charged to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Counters:
    """Named totals (counts, bytes or seconds), safe to add to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # The garbage collector may end a loop here, in a thread that holds the lock.
        self._totals: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        with self._lock:
            self._totals.update(amounts)

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)


_account: ContextVar[Counters | None] = ContextVar("account", default=None)


@contextmanager
def charged_to(account: Counters) -> Iterator[None]:
    """Add what `charge` is called with to `account`, in this thread and in the `Threads` that it submits work to."""
    token = _account.set(account)
    try:
        yield
    finally:
        _account.reset(token)


def charge(**amounts: float) -> None:
    """Add to the account of the work that is being done, if it has one."""
    account = _account.get()
    if account is not None:
        account.add(**amounts)

"""Notice of the threads that wait for the lock of a key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dataload.cache.local import key_locks
from dataload.cache.local.key_locks import ThreadLocks


def announce_waits(announce: Callable[[], object], patch: Callable[[object, str, object], None] = setattr) -> None:
    """Call `announce` at the first wait of each thread for a key lock: for another thread, or another process."""
    announced: set[int] = set()
    hold_at_once, attempts = ThreadLocks.hold, key_locks.attempts

    def waits() -> None:
        if (thread := threading.get_ident()) not in announced:
            announced.add(thread)
            announce()

    @contextmanager
    def hold(self: ThreadLocks, digest: bytes, timeout: float = -1) -> Iterator[bool]:
        with hold_at_once(self, digest, 0) as held:
            if held:
                yield True
                return
        if timeout:
            waits()
        with hold_at_once(self, digest, timeout) as held:
            yield held

    def announced_attempts(deadline: float) -> Iterator[None]:
        for number, _ in enumerate(attempts(deadline)):
            if number:
                waits()
            yield

    patch(ThreadLocks, "hold", hold)
    patch(key_locks, "attempts", announced_attempts)

"""Notice of the threads that wait for the lock of a key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from dataload.runtime import baton


def announcing(announce: Callable[[], object]) -> Callable[[], AbstractContextManager[None]]:
    """Return a `waiting` for `cache.local.key_locks` that calls `announce` at the first wait of each thread."""
    announced: set[int] = set()

    @contextmanager
    def waiting() -> Iterator[None]:
        if (thread := threading.get_ident()) not in announced:
            announced.add(thread)
            announce()
        with baton.waiting():
            yield

    return waiting

"""Fetching and decoding a dataset before the training that needs it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from dataload.cache.threads import Threads
from dataload.rowblobs import RowBlobs

AT_ONCE = 16  # row groups; `RowBlobs` bounds their memory
AHEAD = 64


def warm(blobs: RowBlobs, groups: Iterable[int], progress: Callable[[int], object] = lambda _: None) -> None:
    """Have these row groups kept as records, those that are not yet.

    progress: called with each row group that is there. Stopped half-way, the next call goes on where this one ended.
    Raises OriginError, DataError.
    """
    pending: deque[tuple[int, Future[None]]] = deque()
    stopped = threading.Event()

    def make(group: int) -> None:
        if not stopped.is_set():
            blobs.make(group)

    def settle(at_most: int) -> None:
        while len(pending) > at_most:
            group, done = pending.popleft()
            done.result()
            progress(group)

    threads = Threads(AT_ONCE, "dataload-warm")
    try:
        for group in groups:
            pending.append((group, threads.submit(make, group)))
            settle(AHEAD)
        settle(0)
    finally:
        stopped.set()

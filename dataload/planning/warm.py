"""Warming of the cache: fetching and decoding a dataset before training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import takewhile

from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.cache.cluster.store import waiting_for_space
from dataload.rows.making.pipeline import make_cached
from dataload.rows.row_groups import RowGroups
from dataload.runtime.executor import DaemonExecutor, awaited

AHEAD = 64  # row groups queued


def warm(row_groups: RowGroups, groups: Iterable[int], progress: Callable[[int], object] = lambda _: None) -> int:
    """Cache the decoded records of these row groups, also in the cluster. Return how many of them this host caches.

    The function stops once the cache is full or fails. After an interruption, the next call skips cached row groups.

    Args:
        row_groups: The decoded row groups.
        groups: Numbers of the row groups.
        progress: Called with each row group that is cached.

    Raises:
        OriginError: The origin failed.
        DataError: A row group cannot be decoded.
    """
    pending: deque[tuple[int, Future[bool]]] = deque()
    stopped = threading.Event()
    cached = 0

    def make(group: int) -> bool:
        cache, number = row_groups.of(group)
        with waiting_for_space():
            is_cached = not stopped.is_set() and make_cached(cache, number)
        if not is_cached and not cache.caches_everything:
            stopped.set()
        return is_cached

    def settle(at_most: int) -> None:
        nonlocal cached
        while len(pending) > at_most:
            group, future = pending.popleft()
            if awaited(future):
                progress(group)
                cached += 1

    threads = DaemonExecutor(IN_FLIGHT, "dataload-warm")  # a row group each; the memory budget bounds their bytes
    try:
        for group in takewhile(lambda _: not stopped.is_set(), groups):
            pending.append((group, threads.submit(make, group)))
            settle(AHEAD)
        settle(0)
    finally:
        stopped.set()
    for cache in row_groups.caches:
        cache.blocks.settle()  # Blobs for the cluster are queued, and a program that ends would lose them.
    return cached

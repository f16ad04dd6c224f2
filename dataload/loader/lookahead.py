"""Prefetching: batches on a thread, and row groups in the order of their first use."""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import tee
from time import perf_counter
from typing import Any, TypeVar

from dataload.telemetry.wait_timeline import Timeline

JOIN_SECONDS = 1.0
POLL_SECONDS = 0.2
SCAN_FACTOR = 8  # row groups scanned for each one prefetched further ahead; a scan takes 50 µs

T = TypeVar("T")


def run_ahead(items: Iterable[T], depth: int, stop: Future[None], waiting: Timeline) -> Generator[T, None, None]:
    """Yield items that a thread makes at most `depth` ahead of their use.

    An exception of `items` is raised here, in the place of the item. Closing the generator stops the thread and waits
    up to `JOIN_SECONDS` for it, and so does the end of the program. A longer wait could deadlock: the closing thread
    may hold a lock that the thread needs.

    Args:
        items: The items.
        depth: Most items that are ready and not yet used.
        stop: Set when the generator is closed, so that `items` can stop waiting.
        waiting: Timeline that records the causes of the waits for items.
    """
    ready: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    capacity = threading.Semaphore(depth)
    making = Timeline(usually="collate")

    def make() -> None:
        with making.here():
            try:
                iterator = iter(items)
                while capacity.acquire() and not stop.done():
                    ready.put((next(iterator), None))
            except BaseException as error:  # noqa: BLE001 (raised where the item is used)
                ready.put((None, error))

    thread = threading.Thread(target=make, name="dataload-ahead", daemon=True)

    def end() -> None:
        if not stop.done():
            stop.set_result(None)
        capacity.release()
        if thread is not threading.current_thread():  # The garbage collector runs in any thread.
            thread.join(JOIN_SECONDS)

    thread.start()
    atexit.register(end)  # A thread cannot run or be joined once the interpreter shuts down.
    try:
        while True:
            since = perf_counter()
            item, error = _next_of(ready)
            waiting.waited(since, making, instead="collate")
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            capacity.release()
            yield item  # type: ignore[misc]
    finally:
        atexit.unregister(end)
        end()


def _next_of(ready: queue.SimpleQueue[T]) -> T:
    while True:
        # The interpreter handles a signal that arrives just before the wait only after it, so the wait is short.
        with suppress(queue.Empty):
            return ready.get(timeout=POLL_SECONDS)


class Needs(Iterator[tuple[int, int]]):
    """Needs for a `Lookahead`, which records those that it has read. Another thread may consume the record."""

    def __init__(self, needs: Iterator[tuple[int, int]]) -> None:
        self._needs = needs
        self._seen: deque[tuple[int, int]] = deque()

    def __next__(self) -> tuple[int, int]:
        need = next(self._needs)
        self._seen.append(need)
        return need

    def before(self, position: int) -> Iterator[int]:
        """Yield the row groups needed before `position` that the lookahead has read, each once."""
        while self._seen and self._seen[0][0] < position:
            yield self._seen.popleft()[1]


class Lookahead:
    """Prefetches row groups before the batches that need them are made.

    Row groups that only pass through the cache come in runs. So `further` of them are prefetched, however many cached
    row groups are needed before them.

    Args:
        needs: (position in the epoch, row group), in the order of the first use.
        prefetch: Starts loading row groups.
        ahead: Row groups to prefetch before their first use.
        further: Row groups for which `passes` is true to prefetch. 0: none in addition.
        passes: Whether a row group only passes through the cache.
    """

    def __init__(
        self,
        needs: Iterator[tuple[int, int]],
        prefetch: Callable[[list[int]], Any],
        ahead: int,
        further: int = 0,
        passes: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._prefetch = prefetch
        every, passing = tee(needs) if further else (needs, iter(()))
        self._horizons = _Horizon(every, ahead, ahead), _Horizon(passing, further, SCAN_FACTOR * further, passes)

    def reach(self, position: int) -> None:
        """Prefetch for batches from `position` on. Earlier positions are done."""
        self._prefetch([group for horizon in self._horizons for group in horizon.reach(position)])


class _Horizon:
    """Reads needs until `counted_limit` counted ones, or `limit` needs, are ahead of the position."""

    def __init__(
        self,
        needs: Iterator[tuple[int, int]],
        counted_limit: int,
        limit: int,
        counts: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._needs = needs
        self._counted_limit, self._limit = counted_limit, limit
        self._counts = counts
        self._counted: deque[int] = deque()  # positions
        self._seen: deque[int] = deque()

    def reach(self, position: int) -> list[int]:
        """Return the counted row groups that are new within the horizon of `position`."""
        for ahead in (self._counted, self._seen):
            while ahead and ahead[0] < position:
                ahead.popleft()
        found = []
        while len(self._counted) < self._counted_limit and len(self._seen) < self._limit:
            need = next(self._needs, None)
            if need is None:
                break
            counts = self._counts(need[1])
            if counts:
                found.append(need[1])
            if need[0] >= position:
                self._seen.append(need[0])
                if counts:
                    self._counted.append(need[0])
        return found

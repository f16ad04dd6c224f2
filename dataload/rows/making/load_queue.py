"""The queue of loads that no thread has begun: small row groups are taken from it several at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import NamedTuple

from dataload.rows.making.row_group_memory import RowGroupMemory
from dataload.rows.row_group_load import RowGroupLoad, timed
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.priority import next_priority, priority

LEAST_TOGETHER, MOST_TOGETHER = 8, 16  # With memory for fewer, their requests would not keep the connections busy.
LISTS_AT_ONCE = 4  # of small row groups

Result = list[memoryview] | BaseException
"""The blobs of a row group, or why there are none."""

Report = Callable[[RowGroupLoad, Result], None]
Leave = Callable[[RowGroupLoad], None]
Stalled = Callable[[], None]

Run = Callable[[Sequence[RowGroupLoad], Report, Leave, Stalled], None]
"""Loads a list of row groups. It reports each of them, or leaves it to be loaded in a list of one. An error that it
raises is that of the remaining ones. Once it only waits, it says so: then another list begins."""


class Work(NamedTuple):
    """What to do with loads. The queue keeps it no longer than there are any, because its owner refers to the queue.

    Attributes:
        run: Loads a list.
        report: Takes the result of each load.
    """

    run: Run
    report: Report


class LoadQueue:
    """Hands loads to threads: those of small row groups in lists, every other one in a list of one.

    Args:
        threads: The threads that load: `LISTS_AT_ONCE` for small row groups, besides those that only wait.
        memory: The memory in which the row groups are made.
    """

    def __init__(self, threads: DaemonExecutor, memory: RowGroupMemory) -> None:
        self._threads = threads
        self._memory = memory
        self._mutex = threading.RLock()  # Reentrant: a call may be cancelled while it is submitted.
        self._waiting: deque[RowGroupLoad] = deque()  # of small row groups
        self._takers = 0  # threads that load lists of these, or soon will

    def add(self, load: RowGroupLoad, work: Work) -> None:
        """Queue a load.

        Raises:
            RuntimeError: No thread can be started. The load never begins.
        """
        if not 0 < load.small_bytes <= self._most_bytes // LEAST_TOGETHER:
            self.add_to(self._threads, load, work)
            return
        with self._mutex:
            self._waiting.append(load)
            if self._takers < LISTS_AT_ONCE:
                try:
                    self._submit(work)
                except RuntimeError:
                    self._waiting.remove(load)
                    raise
                self._takers += 1

    def add_to(self, threads: DaemonExecutor, load: RowGroupLoad, work: Work) -> None:
        """Queue a load for other threads, in a list of one. Raises as `add` does."""
        threads.submit(self._begin, load, work).add_done_callback(load.finish_with)

    def _begin(self, load: RowGroupLoad, work: Work) -> None:
        if load.begin():
            self._load([load], work, lambda: None)

    def _load(self, loads: Sequence[RowGroupLoad], work: Work, stalled: Stalled) -> None:
        """Load row groups. All their byte ranges come before those of later ones."""
        remaining = dict.fromkeys(loads)

        def report(load: RowGroupLoad, result: Result) -> None:
            del remaining[load]
            work.report(load, result)

        def leave(load: RowGroupLoad) -> None:
            with priority(0):  # as all calls that load row groups, not after those of later ones
                call = self._threads.submit(self._load, [load], work, lambda: None)
            call.add_done_callback(load.finish_with)
            del remaining[load]

        try:
            with timed(loads), next_priority():
                work.run(loads, report, leave, stalled)
        except BaseException as error:  # noqa: BLE001 (raised where the row groups are awaited)
            for load in list(remaining):
                report(load, error)

    @property
    def _most_bytes(self) -> int:
        """The bytes of a list of small row groups, at most: the memory has room for all that are made at once."""
        return self._memory.held.total // LISTS_AT_ONCE

    def _submit(self, work: Work) -> None:
        self._threads.submit(self._load_next, work).add_done_callback(self._cancel)

    def _load_next(self, work: Work) -> None:
        """Load the row groups that were requested first. Then, or once they only wait, let a thread load the next."""
        with self._mutex:
            loads = [load for load in self._next() if load.begin()]
        with ExitStack() as slot:
            slot.callback(self._submit_next, work)
            if len(loads) == 1:
                slot.close()  # It may wait for another process.
            if loads:
                self._load(loads, work, slot.close)

    def _submit_next(self, work: Work) -> None:
        with self._mutex, priority(0):
            if self._waiting:
                self._submit(work)
            else:
                self._takers -= 1

    def _next(self) -> list[RowGroupLoad]:
        """Take the next list, of one cache: an equal part of what waits, as far as its memory goes."""
        loads: list[RowGroupLoad] = []
        most, room = min(MOST_TOGETHER, -(-len(self._waiting) // LISTS_AT_ONCE)), self._most_bytes
        for load in list(self._waiting):
            if load.cache.tier.location != self._waiting[0].cache.tier.location:
                continue
            room -= load.small_bytes
            # Another loop may have requested one of them again.
            if len(loads) == most or (loads and room < 0) or load.group in {each.group for each in loads}:
                break
            loads.append(load)
        for load in loads:
            self._waiting.remove(load)
        return loads

    def _cancel(self, call: Future[None]) -> None:
        """Cancel the loads whose threads do not come, because the program exits."""
        with self._mutex:
            while call.cancelled() and self._waiting:
                self._waiting.popleft().finish_with(call)

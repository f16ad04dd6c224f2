"""The queue of row groups that are small enough to be made many at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from dataload.rows.making.bunches import Made
from dataload.rows.row_group_life import Lives, RowGroupLife, charged_together
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.priority import next_priority, priority

if TYPE_CHECKING:
    from dataload.rows.row_groups import RowGroups

LEAST_IN_A_BUNCH, MOST_IN_A_BUNCH = 8, 16  # With memory for fewer, their requests would not keep the connections busy.
BUNCHES_AT_ONCE = 4


class Loading(NamedTuple):
    """How the row groups of a process are loaded.

    Attributes:
        load: Loads a bunch, in the order of the requests. It yields each row group with its blobs or its error. It may
            call its second argument: those that it has not yielded wait for the origin.
        finish: Takes each row group that was loaded, and its blobs or its error.
        alone: Takes each row group that `load` yields with None, or not at all, to be loaded alone.
    """

    load: Callable[[Lives, Callable[[], None]], Iterator[tuple[int, Made]]]
    finish: Callable[[int, RowGroupLife, list[memoryview] | BaseException], None]
    alone: Callable[[int, RowGroupLife], None]

    def take(self, group: int, life: RowGroupLife, made: Made) -> None:
        """Take a row group that `load` yielded."""
        if made is not None:
            self.finish(group, life, made)
            return
        with priority(0):  # as all calls that load row groups, not after those of later ones
            self.alone(group, life)


class _Waiting(NamedTuple):
    """A row group that no thread has begun to load, and the bytes of memory that it takes."""

    group: int
    life: RowGroupLife
    num_bytes: int


class BunchQueue:
    """Row groups that wait to be made together with others.

    Args:
        row_groups: The row groups.
        threads: The threads that load them: `BUNCHES_AT_ONCE`, besides those that wait for late requests.
    """

    def __init__(self, row_groups: RowGroups, threads: DaemonExecutor) -> None:
        self._row_groups = row_groups
        self._threads = threads
        self._mutex = threading.RLock()  # Reentrant: a call may be cancelled while it is submitted.
        self._waiting: deque[_Waiting] = deque()
        self._loaders = 0  # threads that load bunches, or soon will

    def add(self, group: int, life: RowGroupLife, loading: Loading) -> bool:
        """Queue a row group, and let a thread load the next bunch. Return False if the row group is too large, or there
        is too little memory.
        """
        cache, number = self._row_groups.of(group)
        num_bytes = cache.bunched_bytes(number)
        if not 0 < num_bytes <= self._most_bytes // LEAST_IN_A_BUNCH:
            return False
        with self._mutex:
            self._waiting.append(waiting := _Waiting(group, life, num_bytes))
            if self._loaders < BUNCHES_AT_ONCE:
                try:
                    self._submit(loading)
                except RuntimeError:  # No thread can be started.
                    self._waiting.remove(waiting)
                    raise
                self._loaders += 1
        return True

    @property
    def _most_bytes(self) -> int:
        """The bytes of a bunch, at most: the memory has room for all that are made at once."""
        return self._row_groups.memory.held.total // BUNCHES_AT_ONCE

    def _submit(self, loading: Loading) -> None:
        self._threads.submit(self._load_next, loading).add_done_callback(self._cancel)

    def _load_next(self, loading: Loading) -> None:
        """Load the row groups that were requested first. Then, or once they are late, let a thread load the next."""
        with self._mutex:
            lives = {group: life for group, life, _ in self._next() if life.begin()}
        with ExitStack() as turn:
            turn.callback(self._end_turn, loading)
            remaining = lives.copy()
            try:
                if len(lives) > 1:
                    with charged_together(lives.values()), next_priority():
                        for group, made in loading.load(lives, turn.close):
                            loading.take(group, remaining.pop(group), made)
            except BaseException as error:  # noqa: BLE001 (raised where the row groups are awaited)
                while remaining:
                    loading.finish(*remaining.popitem(), error)
            for group, life in remaining.items():
                loading.take(group, life, None)

    def _end_turn(self, loading: Loading) -> None:
        with self._mutex, priority(0):
            if self._waiting:
                self._submit(loading)
            else:
                self._loaders -= 1

    def _next(self) -> list[_Waiting]:
        """Take the next bunch: an equal part of what waits, as far as its memory goes."""
        bunch: list[_Waiting] = []
        most, room = min(MOST_IN_A_BUNCH, -(-len(self._waiting) // BUNCHES_AT_ONCE)), self._most_bytes
        while self._waiting and len(bunch) < most and (not bunch or self._waiting[0].num_bytes <= room):
            if self._waiting[0].group in {each.group for each in bunch}:  # Another loop has requested it again.
                break
            bunch.append(self._waiting.popleft())
            room -= bunch[-1].num_bytes
        return bunch

    def _cancel(self, call: Future[None]) -> None:
        """Cancel the row groups whose threads do not come, because the program exits."""
        with self._mutex:
            while call.cancelled() and self._waiting:
                self._waiting.popleft().life.finish_with(call)

"""Work done ahead of its use: batches on a thread, row groups in the order in which they will be needed."""

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

PATIENCE_SECONDS = 1.0
LOOK_SECONDS = 0.2
SIGHT = 8  # times as many row groups as are asked for further ahead are looked at: it takes 50 µs each

T = TypeVar("T")


def run_ahead(items: Iterable[T], depth: int, stop: Future[None], waiting: Timeline) -> Generator[T, None, None]:
    """The items, made on a thread of their own, at most `depth` ahead of their use.

    stop: done when no more are wanted, so that whoever makes them need not get what he waits for. waiting: where it is
    written down what they were waited for.

    What making an item raises is raised here, in its place. Closing the generator stops the thread, and waits a moment
    for it, and so does the end of the program. No longer: whoever drops it may hold what the thread is waiting for.
    """
    ready: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    making = Timeline(usually="collate")

    def make() -> None:
        with making.here():
            try:
                iterator = iter(items)
                while room.acquire() and not stop.done():
                    ready.put((next(iterator), None))
            except BaseException as error:  # noqa: BLE001 (raised again where the item is awaited)
                ready.put((None, error))

    thread = threading.Thread(target=make, name="dataload-ahead", daemon=True)

    def end() -> None:
        if not stop.done():
            stop.set_result(None)
        room.release()
        if thread is not threading.current_thread():  # The garbage collector runs in any thread.
            thread.join(PATIENCE_SECONDS)

    thread.start()
    atexit.register(end)  # A thread that is left over can neither run nor be joined once the interpreter goes.
    try:
        while True:
            since = perf_counter()
            item, error = _next_of(ready)
            waiting.waited(since, making, instead="collate")
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item  # type: ignore[misc]
    finally:
        atexit.unregister(end)
        end()


def _next_of(ready: queue.SimpleQueue[T]) -> T:
    while True:
        # A signal that comes between the interpreter's last look and the wait would be heard after it.
        with suppress(queue.Empty):
            return ready.get(timeout=LOOK_SECONDS)


class Needs(Iterator[tuple[int, int]]):
    """Needs, as `Lookahead` takes them, of which another thread can ask for those that were passed."""

    def __init__(self, needs: Iterator[tuple[int, int]]) -> None:
        self._needs = needs
        self._seen: deque[tuple[int, int]] = deque()

    def __next__(self) -> tuple[int, int]:
        need = next(self._needs)
        self._seen.append(need)
        return need

    def before(self, position: int) -> Iterator[int]:
        """The row groups that positions before this one need, those that the lookahead has seen; each once."""
        while self._seen and self._seen[0][0] < position:
            yield self._seen.popleft()[1]


class Lookahead:
    """Asks for row groups before the batches that need them are made.

    needs: (position in the epoch, row group), in the order of their first need; ask: starts the loading of some;
    ahead: how many are asked for that no batch has needed yet.
    further: of those that only pass through the cache, how many are, wherever they lie: they come in clumps.
    """

    def __init__(
        self,
        needs: Iterator[tuple[int, int]],
        ask: Callable[[list[int]], Any],
        ahead: int,
        further: int = 0,
        passes: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._ask = ask
        every, passing = tee(needs) if further else (needs, iter(()))
        self._horizons = _Horizon(every, ahead, ahead), _Horizon(passing, further, SIGHT * further, passes)

    def reach(self, position: int) -> None:
        """Batches are made of all positions before this one."""
        self._ask([group for horizon in self._horizons for group in horizon.reach(position)])


class _Horizon:
    """How far ahead needs are seen: until so many that count lie ahead, or so many at all."""

    def __init__(
        self,
        needs: Iterator[tuple[int, int]],
        most: int,
        most_at_all: int,
        counts: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._needs = needs
        self._most, self._most_at_all = most, most_at_all
        self._counts = counts
        self._counted: deque[int] = deque()  # positions
        self._seen: deque[int] = deque()

    def reach(self, position: int) -> list[int]:
        """The row groups that come into sight, and count."""
        for ahead in (self._counted, self._seen):
            while ahead and ahead[0] < position:
                ahead.popleft()
        coming = []
        while len(self._counted) < self._most and len(self._seen) < self._most_at_all:
            need = next(self._needs, None)
            if need is None:
                break
            counts = self._counts(need[1])
            if counts:
                coming.append(need[1])
            if need[0] >= position:
                self._seen.append(need[0])
                if counts:
                    self._counted.append(need[0])
        return coming

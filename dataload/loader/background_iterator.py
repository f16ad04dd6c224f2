"""An iterator whose items threads make ahead of their use."""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

from dataload.telemetry.loader_stats import LOADING
from dataload.telemetry.wait_timeline import ELSEWHERE, Timeline

JOIN_SECONDS = 1.0
POLL_SECONDS = 0.2
RECENT_USES = 4

T = TypeVar("T")


def run_ahead(
    calls: Iterable[Callable[[], T]],
    threads: int,
    depth: int,
    stop: Future[None],
    waiting: Timeline,
    *,
    always: bool = True,
) -> Generator[T, None, None]:
    """Yield the results of calls in their order. Threads make them at most `depth` ahead of their use.

    An exception of `calls`, or of a call, is raised here, in the place of the item. Closing the generator stops the
    threads and waits up to `JOIN_SECONDS` for them, and so does the end of the program. A longer wait could deadlock:
    the closing thread may hold a lock that a thread needs.

    Args:
        calls: The calls. One thread at a time takes the next one; the calls themselves run concurrently.
        threads: Number of threads. With 0, or if the system cannot start one, the thread that iterates runs the calls,
            when it needs their items.
        depth: Most items that are being made, or ready and not yet used.
        stop: Set when the generator is closed, so that the calls can stop waiting.
        waiting: Timeline that records the causes of the waits for items.
        always: Whether threads make all items. Otherwise they do so only while the uses of the last items took at
            least as long as making one. A quicker loop would take turns with a thread for the interpreter lock.
    """
    work = _Work(iter(calls), stop)
    atexit.register(work.end)  # A thread cannot run or be joined once the interpreter shuts down.
    try:
        yield from _in_order(work, waiting, threads, depth, always=always)
    finally:
        atexit.unregister(work.end)
        work.end()


class _Made(NamedTuple, Generic[T]):
    """An item, or the error in its place.

    Attributes:
        item: The item.
        error: The error.
        seconds: Time that making the item took, without waits for row groups.
        making: Timeline of the thread that made it.
    """

    item: T | None
    error: BaseException | None
    seconds: float
    making: Timeline


class _Work(Generic[T]):
    """The calls of an iterator, which threads take in turn, or the loop while no thread has an item to make.

    Attributes:
        requested: Items that the threads are to make, or have made, and that the loop has not received.
        made: The items with their numbers, in the order in which they were done.
    """

    def __init__(self, calls: Iterator[Callable[[], T]], stop: Future[None]) -> None:
        self.requested = 0
        self.made: queue.SimpleQueue[tuple[int, _Made[T]]] = queue.SimpleQueue()
        # A token for each item to make. Queues are reentrant: a garbage collection inside one may close the iterator.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._calls = calls
        self._stop = stop
        self._turn = threading.Lock()  # held by the thread that takes the next call
        self._taken = 0
        self._ended = False
        self._threads: list[threading.Thread] = []

    def request(self, depth: int, threads: int) -> None:
        """Let threads make items until `depth` are requested, or none if the system cannot start a thread."""
        while self.requested < depth and self._start(threads):
            self.requested += 1
            self._tokens.put(None)

    def make(self, making: Timeline) -> _Made[T]:
        """Make the next item in the thread of the loop, while none is requested.

        Raises:
            StopIteration: There are no more calls.
        """
        since = perf_counter()
        with making.here():
            item = _result_of(next(self._calls))
        return _Made(item, None, _seconds(making, since), making)

    def end(self) -> None:
        """Stop the threads, and wait for them."""
        if not self._stop.done():
            self._stop.set_result(None)
        self._tokens.put(None)
        until = perf_counter() + JOIN_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # The garbage collector runs in any thread.
                thread.join(max(0.0, until - perf_counter()))

    def _start(self, threads: int) -> bool:
        """Start the threads if none runs. Return whether one does."""
        if not self._threads:
            with suppress(RuntimeError):  # The system cannot start another thread: the others make all items.
                for number in range(threads):
                    thread = threading.Thread(target=self._run, name=f"dataload-ahead_{number + 1}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
        return bool(self._threads)

    def _run(self) -> None:
        """Make items until there are no more, one raises, or the iterator stops."""
        making = Timeline(usually="collate")
        with making.here():
            while self._make_next(making):
                pass
        self._tokens.put(None)  # for the next thread, which also ends

    def _make_next(self, making: Timeline) -> bool:
        with self._turn:
            self._tokens.get()
            if self._ended or self._stop.done():
                return False
            number, self._taken = self._taken, self._taken + 1
            since = perf_counter()
            try:
                call = next(self._calls)
            except BaseException as error:  # noqa: BLE001 (raised where the item is used)
                return self._fail(number, error, making)
        try:
            item = _result_of(call)
        except BaseException as error:  # noqa: BLE001 (raised where the item is used)
            return self._fail(number, error, making)
        self.made.put((number, _Made(item, None, _seconds(making, since), making)))
        return True

    def _fail(self, number: int, error: BaseException, making: Timeline) -> bool:
        self._ended = True
        self.made.put((number, _Made(None, error, 0.0, making)))
        return False


def _in_order(work: _Work[T], waiting: Timeline, threads: int, depth: int, *, always: bool) -> Generator[T, None, None]:
    early: dict[int, _Made[T]] = {}
    uses: deque[float] = deque(maxlen=RECENT_USES)  # the shortest counts, because another process may delay any of them
    number, ahead = 0, always
    while True:
        if ahead:
            work.request(depth, threads)
        since = perf_counter()
        if work.requested:
            while number not in early:
                done, made = _next_of(work.made)
                early[done] = made
            made = early.pop(number)
            work.requested -= 1
            number += 1
            waiting.waited(since, made.making, instead="collate")
        else:
            try:
                made = work.make(waiting)
            except StopIteration:
                return
        if isinstance(made.error, StopIteration):
            return
        if made.error is not None:
            try:
                raise made.error
            finally:
                del made  # The error's traceback refers to this frame, which would make a reference cycle.
        item, seconds = made.item, made.seconds
        del made  # A wait must not keep the last item alive.
        if ahead:
            work.request(depth, threads)
        since = perf_counter()
        yield item  # type: ignore[misc]
        del item
        uses.append(perf_counter() - since)
        ahead = always or min(uses) >= seconds


def _seconds(making: Timeline, since: float) -> float:
    """Return the time since then without waits for row groups."""
    spent = making.seconds(since, perf_counter())
    return sum(seconds for cause, seconds in spent.items() if cause not in (*LOADING, ELSEWHERE))


def _result_of(call: Callable[[], T]) -> T:
    try:
        return call()
    except StopIteration as error:  # It must not end the loop in silence.
        raise RuntimeError("the call raised StopIteration") from error


def _next_of(ready: queue.SimpleQueue[Any]) -> Any:
    while True:
        # The interpreter handles a signal that arrives just before the wait only after it, so the wait is short.
        with suppress(queue.Empty):
            return ready.get(timeout=POLL_SECONDS)

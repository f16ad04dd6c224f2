"""An iterator whose items threads make ahead of their use."""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from time import perf_counter
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from dataload.telemetry.wait_timeline import Timeline

JOIN_SECONDS = 1.0
POLL_SECONDS = 0.2

P = ParamSpec("P")
T = TypeVar("T")


def closed_at_exit(function: Callable[P, Generator[T, None, None]]) -> Callable[P, Generator[T, None, None]]:
    """Close the generators of `function` when the program ends.

    The interpreter closes the generators of a script's own variables only after it has cleared modules.
    """

    @wraps(function)
    def generator(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        made = function(*args, **kwargs)
        close = partial(_close, weakref.ref(made))
        atexit.register(close)
        weakref.finalize(made, atexit.unregister, close).atexit = False
        return made

    return generator


def _close(generator: weakref.ref[Generator[Any, None, None]]) -> None:
    found = generator()
    if found is not None:
        with suppress(ValueError):  # Another thread runs it.
            found.close()


def check_process(owner: int) -> None:
    """Raise RuntimeError if this process is not `owner`. A forked child has neither the threads nor the workers."""
    if os.getpid() != owner:
        raise RuntimeError("this iterator belongs to the process that began it: begin another one here")


def run_ahead(
    calls: Iterable[Callable[[], T]],
    threads: int,
    depth: int,
    stop: Future[None],
    waiting: Timeline,
    *,
    begin: Callable[[], object] = lambda: None,
    timeout: float = 0,
) -> Generator[T, None, None]:
    """Yield the results of calls in their order. Threads make them at most `depth` ahead of their use.

    An exception of `calls`, or of a call, is raised here, in the place of the item. Closing the generator stops the
    threads and waits up to `JOIN_SECONDS` for them, and so does the end of the program. A longer wait could deadlock:
    the closing thread may hold a lock that a thread needs.

    Args:
        calls: The calls. One thread at a time takes the next one; the calls themselves run concurrently.
        threads: Number of threads. With 0, the thread that iterates runs the calls, when it needs their items.
        depth: Most items that are being made, or ready and not yet used.
        stop: Set when the generator is closed, so that the calls can stop waiting.
        waiting: Timeline that records the causes of the waits for items.
        begin: Each thread calls it at its start. An exception is raised in the place of an item.
        timeout: Most seconds to wait for an item of the threads. 0: no limit.

    Raises:
        RuntimeError: An item took longer than `timeout`, as torch's DataLoader raises it.
    """
    if not threads:
        yield from _run_here(calls, waiting)
        return
    work = _Work(iter(calls), depth, stop)
    started: list[threading.Thread] = []

    def end() -> None:
        if not stop.done():
            stop.set_result(None)
        work.capacity.put(None)
        until = perf_counter() + JOIN_SECONDS
        while started:
            thread = started.pop()
            if thread is not threading.current_thread():  # The garbage collector runs in any thread.
                thread.join(max(0.0, until - perf_counter()))
        with suppress(queue.Empty):  # An error's traceback refers to the work, which would make a reference cycle.
            while True:
                work.made.get_nowait()

    atexit.register(end)  # A thread cannot run or be joined once the interpreter shuts down.
    try:
        for number in range(threads):
            thread = threading.Thread(target=work.run, args=(begin,), name=f"dataload-ahead_{number + 1}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # The system cannot start another thread: the others make all items.
                if not started:
                    raise
                break
            started.append(thread)
        yield from _in_order(work, waiting, timeout or math.inf)
    finally:
        atexit.unregister(end)
        end()


def taken(items: list[T]) -> Iterator[T]:
    """Yield the items of a list in order, and take them out of it: one that the caller drops is freed at once."""
    items.reverse()
    while items:
        yield items.pop()


class _Made(NamedTuple, Generic[T]):
    """An item, or the error in its place, with the timeline of the thread that made it."""

    item: T | None
    error: BaseException | None
    making: Timeline


class _Work(Generic[T]):
    """The calls of an iterator, which threads take in turn.

    Attributes:
        capacity: A token for each further item that may be made. Queues are reentrant: a garbage collection inside one
            may close the iterator.
        made: The items with their numbers, in the order in which they were done.
    """

    def __init__(self, calls: Iterator[Callable[[], T]], depth: int, stop: Future[None]) -> None:
        self.capacity: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self.capacity.put(None)
        self.made: queue.SimpleQueue[tuple[int, _Made[T]]] = queue.SimpleQueue()
        self._calls = calls
        self._stop = stop
        self.timelines: list[Timeline] = []  # of the threads
        self._turn = threading.Lock()  # held by the thread that takes the next call
        self._taken = 0
        self._ended = False

    def run(self, begin: Callable[[], object]) -> None:
        """Call `begin`. Then make items until there are no more, one raises, or the iterator stops."""
        making = Timeline(usually="collate")
        self.timelines.append(making)
        with making.here():
            try:
                begin()
            except BaseException as error:  # noqa: BLE001 (raised where the next item is used)
                with self._turn:
                    self._fail(self._taken, error, making)
            while self._make_next(making):
                pass
        self.capacity.put(None)  # for the next thread, which also ends

    def _make_next(self, making: Timeline) -> bool:
        with self._turn:
            self.capacity.get()
            if self._ended or self._stop.done():
                return False
            number, self._taken = self._taken, self._taken + 1
            try:
                call = next(self._calls)
            except BaseException as error:  # noqa: BLE001 (raised where the item is used)
                return self._fail(number, error, making)
        try:
            self.made.put((number, _Made(call(), None, making)))
        except StopIteration as error:  # It must not end the loop in silence.
            return self._fail(number, _as_error(error), making)
        except BaseException as error:  # noqa: BLE001 (raised where the item is used)
            return self._fail(number, error, making)
        return True

    def _fail(self, number: int, error: BaseException, making: Timeline) -> bool:
        self._ended = True
        self.made.put((number, _Made(None, error, making)))
        return False


def _run_here(calls: Iterable[Callable[[], T]], waiting: Timeline) -> Generator[T, None, None]:
    iterator = iter(calls)
    while True:
        with waiting.here():
            call = next(iterator, None)
            if call is None:
                return
            item = call()
        del call
        yield item


def _in_order(work: _Work[T], waiting: Timeline, timeout: float) -> Generator[T, None, None]:
    early: dict[int, _Made[T]] = {}
    waiting.helpers = work.timelines
    number = 0
    while True:
        since = perf_counter()
        while number not in early:
            done, made = _next_of(work.made, since, timeout)
            early[done] = made
        made = early.pop(number)
        waiting.waited(since, made.making, instead="collate")
        if isinstance(made.error, StopIteration):
            return
        if made.error is not None:
            try:
                raise made.error
            finally:
                del made  # The error's traceback refers to this frame, which would make a reference cycle.
        work.capacity.put(None)
        number += 1
        yield made.item  # type: ignore[misc]
        del made  # A wait must not keep the last item alive.


def _as_error(error: StopIteration) -> RuntimeError:
    """Return the error that a generator raises in the place of a StopIteration."""
    raised = RuntimeError("the call raised StopIteration")
    raised.__cause__ = error
    return raised


def _next_of(ready: queue.SimpleQueue[Any], since: float, timeout: float) -> Any:
    while perf_counter() < since + timeout:
        # The interpreter handles a signal that arrives just before the wait only after it, so the wait is short.
        with suppress(queue.Empty):
            return ready.get(timeout=min(POLL_SECONDS, timeout))
    raise RuntimeError(
        f"DataLoader timed out after {timeout} seconds: reading rows, transform or collate_fn takes longer; raise "
        "timeout, or see loader.row_group_states() for the row groups that are not there yet"
    )

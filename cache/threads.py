"""Threads that work off calls, and for which the end of the program does not wait long."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import Any, TypeVar

from dataload.cache.forks import ForkAware

PATIENCE_SECONDS = 0.5
LOOK_SECONDS = 0.2

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """At most `count` threads, started as they are needed, that run calls in the order in which they come.

    Notes: they end with this object, when all calls are done. Those of `concurrent.futures` are waited for at the end
    of the program, however long a store may take to answer; of these none begins a call then, and what is under way is
    left after `PATIENCE_SECONDS`. In a forked child there are none: make another object there.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._mutex = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """What the call returns or raises, once a thread has run it, in the context variables of the caller."""
        future: Future[T] = Future()
        self._calls.put((future, copy_context().run, (call, *args)))
        with self._mutex:
            if not self._idle.acquire(blocking=False) and self._started < self._count:
                name = f"{self._name}_{self._started + 1}"
                threading.Thread(target=_work, args=(self._calls, self._idle), name=name, daemon=True).start()
                self._started += 1  # and not before: the system may have no more
        return future


def awaited(future: Future[T]) -> T:
    """Its result. In the main thread Ctrl-C is heard meanwhile, also one that comes just before the wait begins."""
    while not future.done():
        wait([future], LOOK_SECONDS)
    return future.result()


class _UnderWay(ForkAware):
    """The calls that threads of this process are at."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()
        self._installed = False

    def after_fork_in_child(self) -> None:
        self._futures: set[Future[Any]] = set()
        self._ending = False

    def run(self, future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._ending:
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        self._futures.add(future)
        try:
            future.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 (raised again where the result is awaited)
            future.set_exception(error)
        finally:
            self._futures.discard(future)
            del future, call, args  # An error's traceback holds this frame, and would so hold itself.

    def end_with_the_program(self) -> None:
        if not self._installed:
            self._installed = True
            atexit.register(self._end)

    def _end(self) -> None:
        self._ending = True
        wait(list(self._futures), PATIENCE_SECONDS)


_under_way = _UnderWay()


def _work(calls: queue.SimpleQueue[_Call | None], idle: threading.Semaphore) -> None:
    _under_way.end_with_the_program()
    while (asked := calls.get()) is not None:
        _under_way.run(*asked)
        del asked  # or its result would stay as long as nothing else is asked
        idle.release()
    calls.put(None)  # for the next one

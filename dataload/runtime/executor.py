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

from dataload.runtime.forks import ForkAware

PATIENCE_SECONDS = 0.5
LOOK_SECONDS = 0.2

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class DaemonExecutor:
    """At most `count` threads, started as they are needed, that run calls in the order in which they come.

    Notes: they end with this object, when all calls are done. Those of `concurrent.futures` are waited for at the end
    of the program, however long a store may take to answer; of these none begins a call then, and what is under way is
    left after `PATIENCE_SECONDS`. In a forked child there are none: make another object there. Where the system starts
    no more threads, those that run do all calls.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._work = _Work()
        self._started = 0
        weakref.finalize(self, self._work.calls.put, None).atexit = False

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Return a future of what the call returns or raises, once a thread has run it in the caller's context.

        Raises RuntimeError where no thread runs and none can be started. The call then never runs.
        """
        future: Future[T] = Future()
        with self._work.mutex:
            if self._started <= self._work.unfinished and self._started < self._count:
                self._start_one()
            self._work.unfinished += 1
            self._work.calls.put((future, copy_context().run, (call, *args)))
        return future

    def _start_one(self) -> None:
        name = f"{self._name}_{self._started + 1}"
        try:
            threading.Thread(target=_run_calls, args=(self._work,), name=name, daemon=True).start()
        except RuntimeError:
            if not self._started:
                raise
        else:
            self._started += 1


class _Work:
    """The calls of a pool. unfinished: those that wait and those that run; None ends the threads."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()  # The garbage collector may end something that submits, also in `submit`.
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.unfinished = 0


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


def _run_calls(work: _Work) -> None:
    _under_way.end_with_the_program()
    while (asked := work.calls.get()) is not None:
        _under_way.run(*asked)
        del asked  # or its result would stay as long as nothing else is asked
        with work.mutex:
            work.unfinished -= 1
    work.calls.put(None)  # for the next one

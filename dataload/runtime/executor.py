"""A thread pool whose calls do not delay the exit of the program."""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, wait
from contextvars import copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar

from dataload.runtime.forks import ForkAware
from dataload.runtime.instances import Instances
from dataload.runtime.priority import current_priority

PATIENCE_SECONDS = 0.5  # for running calls, at the exit of the program
LOOK_SECONDS = 0.2  # between two checks for signals

S = TypeVar("S")
T = TypeVar("T")
_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

_shared: Instances[tuple[str, int], DaemonExecutor] = Instances(inherited=False)


def shared_executor(count: int, name: str) -> DaemonExecutor:
    """Return the pool of this name that all its users in this process share. It ends with the last of them."""
    return _shared.get((name, count), lambda: DaemonExecutor(count, name))


class DaemonExecutor:
    """A pool of at most `count` daemon threads that run calls by `priority`, then in submission order.

    Threads start on demand and end with this object, once all calls are done. `concurrent.futures` waits for its
    threads at the exit of the program, however long an object store takes to answer. This pool starts no call during
    the exit and abandons running calls after `PATIENCE_SECONDS`.

    Notes:
        A forked child inherits no threads: create another pool there. If the system cannot start another thread, the
        running ones do all calls.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._work = _Work()
        self._started = 0
        weakref.finalize(self, self._work.tokens.put, None).atexit = False

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Schedule a call and return a future of its result. The call runs in the caller's context.

        Raises:
            RuntimeError: The pool has no thread and the system cannot start one. The call never runs.
        """
        future: Future[T] = Future()
        with self._work.mutex:
            if self._started <= self._work.unfinished and self._started < self._count:
                self._start_thread()
            self._work.unfinished += 1
            self._work.add((future, copy_context().run, (call, *args)))
        return future

    @property
    def idle(self) -> bool:
        """Whether no call is queued or running."""
        return not self._work.unfinished

    def map(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """Return the results of `call(item)`, in the order of the items.

        If a call raises, the exception is raised here, and the calls that have not started are cancelled.
        """
        futures: list[Future[T]] = []
        try:
            futures.extend(self.submit(call, item) for item in items)
            return list(map(awaited, futures))
        finally:
            while futures:  # An error's traceback refers to this frame, which would make a reference cycle.
                futures.pop().cancel()

    def _start_thread(self) -> None:
        name = f"{self._name}_{self._started + 1}"
        try:
            threading.Thread(target=_run_calls, args=(self._work,), name=name, daemon=True).start()
        except RuntimeError:
            if not self._started:
                raise
        else:
            self._started += 1


class _Work:
    """The calls of a pool.

    Attributes:
        tokens: One for each call that no thread has started. None ends a thread.
        unfinished: How many calls are queued or running.
    """

    def __init__(self) -> None:
        self.mutex = threading.RLock()  # Reentrant: the garbage collector may run a finalizer that submits a call.
        self.tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.unfinished = 0
        self._calls: list[tuple[int, int, _Call]] = []  # a heap: priority, number, call
        self._numbers = itertools.count()

    def add(self, call: _Call) -> None:
        """Queue a call. The caller holds `mutex`."""
        number = next(self._numbers)
        self.tokens.put(number)  # First: a Ctrl-C in between must not leave a call without a token.
        heappush(self._calls, (current_priority(), number, call))

    def take(self) -> _Call | None:
        """Return the next call, for a thread that took a token; None after a Ctrl-C."""
        with self.mutex:
            return heappop(self._calls)[-1] if self._calls else None


def awaited(future: Future[T]) -> T:
    """Return the result of a future. In the main thread, Ctrl-C interrupts the wait.

    The wait is cut into short ones, because a signal that arrives just before a wait begins would not interrupt it.
    """
    try:
        while not future.done():
            wait([future], LOOK_SECONDS)
        return future.result()
    finally:
        del future  # An error's traceback refers to this frame, which would make a reference cycle.


def result_until_exit(future: Future[T]) -> T:
    """Return the result of a future, for code that C++ has called. Raise CancelledError once the program exits.

    A thread that calls back into Python after the interpreter has gone is unwound by force. In C++ that is no unwinding
    at all: the process aborts ("terminate called without an active exception").
    """
    while not _running_calls.exiting:
        if future.done() or wait([future], LOOK_SECONDS).done:
            return future.result()
    raise CancelledError("the program exits")


class _RunningCalls(ForkAware):
    """The calls that threads of this process run.

    Attributes:
        exiting: Whether the program exits.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()
        self._installed = False

    def after_fork_in_child(self) -> None:
        self._futures: set[Future[Any]] = set()
        self.exiting = False

    def run(self, future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.exiting:
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
            del future, call, args  # An error's traceback refers to this frame, which would make a reference cycle.

    def install_exit_hook(self) -> None:
        if not self._installed:
            self._installed = True
            atexit.register(self._exit)

    def _exit(self) -> None:
        self.exiting = True
        wait(list(self._futures), PATIENCE_SECONDS)


_running_calls = _RunningCalls()


def _run_calls(work: _Work) -> None:
    _running_calls.install_exit_hook()
    while work.tokens.get() is not None:
        call = work.take()
        if call is not None:
            _running_calls.run(*call)
        del call  # An idle thread must not keep the last result alive.
        with work.mutex:
            work.unfinished -= 1
    work.tokens.put(None)  # for the next thread

"""A second request for what takes longer than usual: J. Dean, L. A. Barroso, The Tail at Scale, CACM 56(2), 2013."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import perf_counter
from typing import TypeVar

from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.forks import ForkAware

THREADS = 128
KNOWN, REMEMBERED = 100, 1000  # requests of about one size before it is known how long they take; and at most
SLOW = 0.99  # of them are faster than one that is asked for a second time
MOST = 0.05  # of all requests

T = TypeVar("T")


class Hedge(ForkAware):
    """Takes the first answer of two, where one has been waited for longer than 99 in 100 others of its size took.

    asked, hedged: requests, and those that were asked for a second time.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._threads = DaemonExecutor(THREADS, "dataload-hedge")
        self.asked = self.hedged = 0

    def first(self, size: int, call: Callable[[], T]) -> T:
        """What `call`, a request for `size` bytes, returns, or raises where a second one does, too."""
        with self._mutex:
            self.asked += 1
            known = sorted(self._seconds[size.bit_length()])
        pending: set[Future[T]] = {self._ask(size, call)}
        wait(pending, known[int(SLOW * len(known))] if len(known) >= KNOWN else None)
        if not next(iter(pending)).done() and self._may():
            pending.add(self._ask(size, call))
        while True:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            answered = [one for one in done if one.exception() is None]
            if answered or not pending:
                return (answered or list(done))[0].result()

    def _ask(self, size: int, call: Callable[[], T]) -> Future[T]:
        def timed() -> T:
            since = perf_counter()
            answer = call()
            with self._mutex:
                self._seconds[size.bit_length()].append(perf_counter() - since)
            return answer

        return self._threads.submit(timed)

    def _may(self) -> bool:
        with self._mutex:
            may = self.hedged < int(MOST * self.asked)
            self.hedged += may
            return may

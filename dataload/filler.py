"""A process that fetches and decodes row groups for another one, whose training step it leaves alone."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import NamedTuple

from dataload.allowance import Allowance
from dataload.cache.forks import ForkAware
from dataload.cache.threads import Threads
from dataload.rowblobs import RowBlobs
from dataload.timeline import Timeline, waited

FETCHED_BYTES = 160 << 20  # of row groups: sixteen requests' worth
AT_ONCE = 24  # row groups; `RowBlobs` bounds their memory
NICENESS = 19  # beside a step that keeps the interpreter busy it leaves it nine tenths of its speed
IDLE_SECONDS = 60.0
LOOK_SECONDS = 0.2  # how often either looks for what it may not hear of: a death, a hurry
ENDING_SECONDS = 0.5  # then it is killed, which leaves a little to be swept up
MOST_FAILURES = 3

log = logging.getLogger(__name__)


class _Done(NamedTuple):
    """What became of a row group. counted: what the caches of the process have counted in all."""

    group: int
    error: Exception | None
    making: Timeline
    counted: dict[str, float]


class Filler(ForkAware):
    """Has row groups' blobs made by a process of its own, started when there is first something to make.

    spent: on what making row groups has taken its time, in seconds by cause.

    Notes: may be called from any thread. It is an optimisation and no more: as long as its process is not ready, and
    when it has died, the work is left to whoever asks for it. That process never imports torch, yields to all others,
    is gone when nothing is asked of it for a while, and does not outlive this one, however that ends.
    """

    def __init__(self, blobs: RowBlobs) -> None:
        self._blobs = blobs
        self._process: _Process | None = None
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        if self._process is not None:
            self._process.let_go()
        self._mutex = threading.Lock()
        self._process = None
        self._counted_before: Counter[str] = Counter()
        self._failures = 0
        self.spent: Counter[str] = Counter()

    def make(self, group: int, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Have the blobs of a row group kept; whether that was done. Raises OriginError, DataError.

        hurry: whether there is no time to leave it to somebody who yields to all others.
        """
        process = None if hurry() else self._running()
        if process is None or not process.ready.is_set():
            return False
        since = perf_counter()
        done = process.make(group, hurry)
        if done is None:
            return False
        waited(since, done.making, instead=done.making.longest())
        if done.error is not None:
            raise done.error
        return True

    def counts(self) -> Counter[str]:
        """What the caches of its processes have counted; see `RowBlobs.counts`."""
        process = self._process
        return self._counted_before + (Counter() if process is None else process.counted)

    def end(self) -> None:
        """Its process has ended when this returns; the next one starts when something is to be made again."""
        with self._mutex:
            if self._process is not None:
                self._process.end()

    def _running(self) -> _Process | None:
        with self._mutex:
            if self._process is not None and self._process.gone.is_set():
                self._failures += self._process.end() != 0
                self._counted_before += self._process.counted
                self._process = None
            if self._process is None and self._failures < MOST_FAILURES:
                try:
                    self._process = _Process(self._blobs, self.spent)
                except OSError as error:
                    self._failures = MOST_FAILURES
                    log.warning("row groups are decoded in this process, because no other can be started: %s", error)
                else:
                    weakref.finalize(self, self._process.end).atexit = False
            return self._process


class _Process:
    """A filling process, from the outside. spent: where what it spends its time on is added up, in seconds by cause.

    ready: it takes orders; gone: it takes no more.
    """

    def __init__(self, blobs: RowBlobs, spent: Counter[str]) -> None:
        self._spent = spent
        self._socket, theirs = socket.socketpair()
        with theirs:
            program = f"import sys; sys.path[:] = {sys.path}; from dataload.filler import fill; fill({theirs.fileno()})"
            self._popen = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the process that trains; of another session it would not yield to it
            )
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._mutex = threading.Lock()
        self._asked: dict[int, Future[_Done | None]] = {}
        self.ready, self.gone = threading.Event(), threading.Event()
        self.counted: Counter[str] = Counter()
        self._ends = False
        self._listener = threading.Thread(target=self._listen, args=(blobs,), name="dataload-filler", daemon=True)
        self._listener.start()
        atexit.register(self.end)

    def make(self, group: int, hurry: Callable[[], bool]) -> _Done | None:
        """What became of it; None when the process has died, or is not soon enough.

        Raises CancelledError when it is ended.
        """
        with self._mutex:
            asked = self._asked.get(group)
            if asked is None:
                asked = self._asked[group] = Future()
                with suppress(OSError):  # It is gone; then there is no answer.
                    self._connection.send(group)
        while not asked.done() and not hurry() and self._popen.poll() is None:
            wait([asked], LOOK_SECONDS)
        return asked.result() if asked.done() else None

    def end(self) -> int:
        """It has ended when this returns; how."""
        atexit.unregister(self.end)
        self._ends = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._popen.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._listener.join()
        self._connection.close()
        self._socket.close()
        return self._popen.wait()

    def let_go(self) -> None:
        """In a forked child: the process is the parent's, and should notice when that ends."""
        self._connection.close()
        self._socket.close()
        self._popen.returncode = 0

    def _listen(self, blobs: RowBlobs) -> None:
        with suppress(EOFError, OSError):
            self._connection.send(blobs)
            self._connection.recv()
            self.ready.set()
            while True:
                done: _Done = self._connection.recv()
                self.counted = Counter(done.counted)
                self._spent.update(done.making.spent())
                with self._mutex:
                    self._asked.pop(done.group).set_result(done)
        self._hang_up()

    def _hang_up(self) -> None:
        with self._mutex:
            self.gone.set()
            while self._asked:
                _, asked = self._asked.popitem()
                if self._ends:
                    asked.set_exception(CancelledError())
                else:
                    asked.set_result(None)


def fill(descriptor: int) -> None:
    """A filling process, from the inside. descriptor: of a socket, where the `RowBlobs` comes, and then row groups."""
    os.nice(NICENESS)
    connection, sending, parent = Connection(descriptor), threading.Lock(), os.getppid()
    blobs: RowBlobs = connection.recv()
    blobs.fetched = Allowance(FETCHED_BYTES)
    threads = Threads(AT_ONCE, "dataload-fill")

    def make(group: int) -> None:
        making, error = Timeline(), None
        try:
            with making.here():
                blobs.make(group)
        except Exception as caught:  # noqa: BLE001 (raised again by who asked)
            error = caught.with_traceback(None)
        with sending, suppress(OSError):
            connection.send(_Done(group, error, making.end(), blobs.counts()))

    with suppress(EOFError, OSError):
        connection.send("ready")
        idle = 0.0
        while os.getppid() == parent and idle < IDLE_SECONDS:
            if connection.poll(LOOK_SECONDS):
                threads.submit(make, connection.recv())
                idle = 0.0
            else:
                idle += LOOK_SECONDS

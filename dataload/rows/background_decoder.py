"""A process that fetches and decodes row groups for another one, whose training step it leaves alone."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from dataload.rows.row_group_cache import RowGroupCache
from dataload.runtime.counters import Counters, charged_to
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.filemap import libc
from dataload.runtime.forks import ForkAware
from dataload.runtime.memory_budget import MemoryBudget
from dataload.runtime.redact import redacted
from dataload.telemetry.wait_timeline import Timeline, waited

FETCHED_BYTES = 160 << 20  # of row groups: sixteen requests' worth
AT_ONCE = 24  # row groups; `RowBlobs` bounds their memory
NICENESS = 19  # beside a step that keeps the interpreter busy it leaves it nine tenths of its speed
IDLE_SECONDS = 60.0
LOOK_SECONDS = 0.2  # how often it is looked for what nobody tells: room in a hurry, and the death of a parent
SELDOM_SECONDS = 2.0  # that of a child; each look of each thread takes the interpreter from the training step
ENDING_SECONDS = 0.3  # then it is killed, which leaves a little to be swept up
MOST_FAILURES = 3
LEFT_ALONE_SECONDS = 30.0
# mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX. Few arenas, for one thread frees what another asked for.
MALLOC = {-1: 1 << 30, -3: 32 << 20, -8: 2}

log = logging.getLogger(__name__)

_program_ends = threading.Event()


class _Done(NamedTuple):
    """What became of a row group. kept: whether its blobs are; took: what was charged to it, see `Ledger`."""

    group: int
    kept: bool
    error: Exception | None
    making: Timeline
    took: dict[str, float]


class DemandSignal:
    """Whether somebody waits for row groups, so that none should be left to a process that yields to all others."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting = 0
        self._begun: Future[None] = Future()

    @property
    def now(self) -> bool:
        return self._waiting > 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits meanwhile."""
        with self._mutex:
            self._waiting += 1
            if self._waiting == 1:
                self._begun.set_result(None)
        try:
            yield
        finally:
            with self._mutex:
                self._waiting -= 1
                if not self._waiting:
                    self._begun = Future()

    def wait(self, future: Future[Any]) -> None:
        """Until it is done, or somebody begins to wait; or for a while, after which it is time to look again."""
        if self.now:
            wait([future], LOOK_SECONDS)
        else:
            wait([future, self._begun], SELDOM_SECONDS, return_when=FIRST_COMPLETED)


class BackgroundDecoder(ForkAware):
    """Has row groups' blobs made by a process of its own, started when there is first something to make.

    spent: on what making row groups has taken its time, in seconds by cause.

    Notes: may be called from any thread. It is an optimisation and no more: as long as its process is not ready, and
    when it has died, the work is left to whoever asks for it. That process never imports torch, yields to all others,
    is gone when nothing is asked of it for a while, and does not outlive this one, however that ends.
    """

    def __init__(self, blobs: RowGroupCache) -> None:
        self._blobs = blobs
        self._process: _Process | None = None
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        if self._process is not None:
            self._process.let_go()
        self._mutex = threading.Lock()
        self._process = None
        self._took = Counters()
        self._failures = 0
        self._left_alone_until = 0.0
        self.spent = Counters()

    def make(self, group: int, haste: DemandSignal | None = None, account: Counters | None = None) -> bool:
        """Have the blobs of a row group kept; whether that was done. Raises OriginError, DataError.

        It is not, where somebody is in haste and the process that asks has room for it. account: of the row group, see
        `Ledger`; what the process takes to make it is added there, even when the answer comes late.
        """
        if _program_ends.is_set():
            raise CancelledError
        haste = haste or DemandSignal()

        def hurry() -> bool:
            return haste.now and self._blobs.has_room(group)

        process = None if hurry() or monotonic() < self._left_alone_until else self._running()
        if process is None or not process.ready.is_set():
            return False
        since = perf_counter()
        done = process.make(group, haste, hurry, account or Counters())
        if done is None:
            return False
        waited(since, done.making, instead=done.making.longest())
        if done.error is not None:
            raise done.error
        if not done.kept:  # Whoever asked has to make them again: there is no room in the cache.
            self._left_alone_until = monotonic() + LEFT_ALONE_SECONDS
        return done.kept

    def counts(self) -> Counter[str]:
        """What its processes took to make row groups, in all; see `Ledger`."""
        return Counter(self._took.snapshot())

    def end(self) -> None:
        """Its process has ended when this returns; the next one starts when something is to be made again."""
        with self._mutex:
            if self._process is not None:
                self._process.end()

    def _running(self) -> _Process | None:
        with self._mutex:
            if self._process is not None and self._process.gone.is_set():
                self._failures += self._process.end() != 0 or not self._process.ready.is_set()
                if self._failures == MOST_FAILURES:
                    log.warning(
                        "row groups are decoded in this process: another that should have, failed %d times: %s",
                        MOST_FAILURES,
                        redacted(repr(self._process.error)),
                    )
                self._process = None
            if self._process is None and self._failures < MOST_FAILURES:
                try:
                    self._process = _Process(self._blobs, self.spent, self._took)
                except OSError as error:
                    self._failures = MOST_FAILURES
                    log.warning("row groups are decoded in this process, because no other can be started: %s", error)
                else:
                    weakref.finalize(self, self._process.end).atexit = False
            return self._process


class _Process:
    """A filling process, from the outside. spent: where what it spends its time on is added up, in seconds by cause.

    took: where what is charged to row groups is added up.
    ready: it takes orders; gone: it takes no more.
    """

    def __init__(self, blobs: RowGroupCache, spent: Counters, took: Counters) -> None:
        self._spent, self._took = spent, took
        self._socket, theirs = socket.socketpair()
        with theirs:
            path = [*map(str, sys.path)]
            run = f"from dataload.rows.background_decoder import fill; fill({theirs.fileno()})"
            program = f"import sys; sys.path[:] = {path}; {run}"
            self._popen = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the process that trains; of another session it would not yield to it
            )
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._mutex = threading.Lock()
        self._asked: dict[int, tuple[Future[_Done | None], Counters]] = {}  # with the accounts of the row groups
        self.ready, self.gone = threading.Event(), threading.Event()
        self._ends = False
        self.error: Exception | None = None  # why it is gone
        self._listener = threading.Thread(target=self._listen, args=(blobs,), name="dataload-filler", daemon=True)
        self._listener.start()
        atexit.register(self._end_with_program)

    def make(self, group: int, haste: DemandSignal, hurry: Callable[[], bool], account: Counters) -> _Done | None:
        """What became of it; None when the process has died, or is not soon enough.

        Raises CancelledError when it is ended.
        """
        with self._mutex:
            if self.gone.is_set():
                return None
            if group not in self._asked:
                self._asked[group] = Future(), account
                account.add(under_way=1, ordered=1)
                with suppress(OSError):  # It is gone, which the listener is about to hear of.
                    self._connection.send(group)
            asked, _ = self._asked[group]
        while not asked.done() and not hurry() and self._popen.poll() is None:
            haste.wait(asked)
        return asked.result() if asked.done() else None

    def end(self) -> int:
        """It has ended when this returns; how."""
        atexit.unregister(self._end_with_program)
        self._ends = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._popen.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        if self._listener is not threading.current_thread():  # The garbage collector runs in any thread.
            self._listener.join()
        self._connection.close()
        self._socket.close()
        return self._popen.wait()

    def _end_with_program(self) -> None:
        _program_ends.set()
        self.end()

    def let_go(self) -> None:
        """In a forked child: the process is the parent's, and should notice when that ends."""
        self._connection.close()
        self._socket.close()
        self._popen.returncode = 0

    def _listen(self, blobs: RowGroupCache) -> None:
        try:
            self._connection.send(blobs)
            self._connection.recv()
            self.ready.set()
            while True:
                done: _Done = self._connection.recv()
                self._spent.add(**done.making.spent())
                self._took.add(**done.took)
                with self._mutex:
                    asked, account = self._asked.pop(done.group)
                    account.add(**done.took)
                    account.add(under_way=-1, ordered=-1)
                    asked.set_result(done)
        except Exception as error:  # noqa: BLE001 (a filesystem that cannot be pickled may raise anything)
            self.error = error
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        with self._mutex:
            self.gone.set()
            while self._asked:
                _, (asked, account) = self._asked.popitem()
                account.add(under_way=-1, ordered=-1)
                if self._ends:
                    asked.set_exception(CancelledError())
                else:
                    asked.set_result(None)


def fill(descriptor: int) -> None:
    """A filling process, from the inside. descriptor: of a socket, where the `RowBlobs` comes, and then row groups."""
    _keep_memory()
    connection, sending, parent = Connection(descriptor), threading.Lock(), os.getppid()
    blobs: RowGroupCache = connection.recv()
    blobs.fetched = MemoryBudget(FETCHED_BYTES)
    threads = DaemonExecutor(AT_ONCE, "dataload-fill")

    def make(group: int) -> None:
        making, took, kept, error = Timeline(), Counters(), False, None
        try:
            with making.here(), charged_to(took):
                kept = blobs.make(group)
        except Exception as caught:  # noqa: BLE001 (raised again by who asked)
            error = _portable(caught)
        with sending, suppress(OSError):
            connection.send(_Done(group, kept, error, making.end(), took.snapshot()))

    with suppress(EOFError, OSError):
        os.nice(NICENESS)  # and not before: what is needed first waits for it to be ready
        connection.send("ready")
        under_way: list[Future[None]] = []
        idle = 0.0
        while os.getppid() == parent and idle < IDLE_SECONDS:
            idle = 0.0 if under_way else idle + LOOK_SECONDS
            if connection.poll(LOOK_SECONDS):
                under_way.append(threads.submit(make, connection.recv()))
            under_way = [one for one in under_way if not one.done()]


def _keep_memory() -> None:
    """Have malloc keep what is freed: memory that is had anew for each row group costs as much as decoding it."""
    with suppress(AttributeError):  # musl's has nothing to be set.
        for option, value in MALLOC.items():
            libc().mallopt(option, value)


def _portable(error: Exception) -> Exception | None:
    """The error as it arrives elsewhere; None when it would not, and who asked has to meet it again."""
    try:
        portable: Exception = pickle.loads(pickle.dumps(error.with_traceback(None)))  # noqa: S301 (ours)
    except Exception:  # noqa: BLE001 (whatever its class does)
        return None
    return portable

"""The training process's side of the background decoder."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic, perf_counter
from typing import Any

from dataload.errors import ConfigError, DataError, ObjectChanged, OriginNotFound
from dataload.rows.background_decoder import worker
from dataload.rows.background_decoder.worker import LOOK_SECONDS, Done
from dataload.rows.row_groups import RowGroups
from dataload.runtime.child_process import Child
from dataload.runtime.counters import Counters
from dataload.runtime.forks import ForkAware
from dataload.runtime.redact import redacted
from dataload.telemetry.wait_timeline import waited

SELDOM_SECONDS = 2.0  # between two checks for the worker's death; each takes the interpreter from the training step
BUSY_SECONDS = 1.0  # without a wait, until it is worth starting the worker, which takes a second of processor time
NICENESS = 19  # keeps a step that uses the interpreter all the time at nine tenths of its speed
MAX_FAILURES = 3
FORGIVEN_AFTER = 100  # row groups that a process made: its earlier failures and those of others no longer count
BACKOFF_SECONDS = 30.0  # after a row group that the process did not cache
MAX_REQUESTS = 64  # unanswered; more than the socket holds would block the caller while the process is stopped

log = logging.getLogger(__name__)

_program_exits = threading.Event()


class DemandSignal:
    """Records whether a thread waits for a row group. If so, the training process decodes it: the worker is slow."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: set[int] = set()  # threads; a set, because Ctrl-C may come at any point of `waiting`
        self._begun: Future[None] = Future()
        self._begin = self._last = perf_counter()  # of this record, and of the last wait
        self._waited = 0.0  # seconds, without the wait that has not ended

    @property
    def now(self) -> bool:
        """Whether a thread waits at this moment."""
        return bool(self._waiting)

    @property
    def mostly_waiting(self) -> bool:
        """Whether threads waited more than half of the time, or it is too early to tell."""
        with self._mutex:
            now = perf_counter()
            waited = self._waited + (now - self._last if self._waiting else 0)
            return now - self._begin - waited < max(waited, BUSY_SECONDS)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Signal demand for the duration of the block."""
        thread = threading.get_ident()
        try:
            with self._mutex:
                if not self._waiting:
                    self._last = perf_counter()
                self._waiting.add(thread)
                if not self._begun.done():
                    self._begun.set_result(None)
            yield
        finally:
            with self._mutex:
                if self._waiting == {thread}:
                    self._waited += perf_counter() - self._last
                    self._begun = Future()
                self._waiting.discard(thread)

    def wait(self, future: Future[Any]) -> None:
        """Wait until the future is done, demand begins, or the caller should check other conditions again."""
        if self.now:
            wait([future], LOOK_SECONDS)
        else:
            wait([future, self._begun], SELDOM_SECONDS, return_when=FIRST_COMPLETED)


class BackgroundDecoder(ForkAware):
    """Makes the blobs of row groups in a background process, which the first request starts.

    Args:
        row_groups: The row groups.

    Attributes:
        spent: Seconds that the process spent on row groups, by cause.

    Notes:
        Any thread may call it. It is only an optimisation: until the process is ready, and after it died, the caller
        makes the row groups. The process never imports torch, has the lowest priority, exits after an idle time, and
        does not outlive this process, however that ends.
    """

    def __init__(self, row_groups: RowGroups) -> None:
        self._row_groups = row_groups
        self._process: _Process | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None  # ends the process
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Leave the process to the parent."""
        if self._process is not None:
            self._process.disown()
        self._mutex = threading.Lock()
        self._process = None
        self._detach_finalizer()
        self._failures = 0
        self._paused_until = 0.0
        self.spent = Counters()

    def make(self, group: int, demand: DemandSignal, account: Counters) -> bool:
        """Cache the row group. Return whether the process did it.

        Args:
            group: The row group.
            demand: If a thread waits for row groups and this process has memory for one, return at once.
            account: Account of the row group, see `Accounts`. The cost is added to it even if the result comes late.

        Raises:
            OriginNotFound: The file does not exist.
            ObjectChanged: The file was replaced.
            DataError: The row group cannot be decoded.
            CancelledError: The program exits, or another thread ended the process.
        """
        if _program_exits.is_set():
            raise CancelledError

        size = 0

        def is_urgent() -> bool:  # It is asked again and again, and for 2,000 columns the size takes milliseconds.
            nonlocal size
            if not demand.now:
                return False
            if not size:
                cache, number = self._row_groups.of(group)
                size = cache.reservation(number)
            return self._row_groups.memory.held.fits(size)

        process = None if is_urgent() or monotonic() < self._paused_until else self._running()
        if process is None or not process.ready.is_set():
            return False
        since = perf_counter()
        done = process.make(group, demand, is_urgent, account)
        if done is None:
            return False
        waited(since, done.making, instead=done.making.longest())
        if isinstance(done.error, DataError | ObjectChanged | OriginNotFound):  # This process would raise it, too.
            raise done.error
        if not done.cached:  # The cache has no space, or the process has an error that this one may not have.
            self._paused_until = monotonic() + BACKOFF_SECONDS
        return done.cached

    def begin(self) -> None:
        """Start the process if it does not run. It makes later row groups, not those that threads wait for now."""
        if not _program_exits.is_set():
            self._running()

    @property
    def started(self) -> bool:
        """Whether this process has started a background process."""
        return self._process is not None

    def end(self) -> None:
        """End the process and wait until it has exited. The next request starts another."""
        with self._mutex:
            if self._process is not None:
                self._process.end()

    def _running(self) -> _Process | None:
        """Return the process, started if necessary, or None after too many failures."""
        with self._mutex:
            if self._process is not None and self._process.ended.is_set():
                self._count_failure(self._process)
                self._process = None
                self._detach_finalizer()
            if self._process is None and self._failures < MAX_FAILURES:
                try:
                    self._process = _Process(self._row_groups, self.spent)
                except (OSError, RuntimeError) as error:  # the latter at a limit of threads
                    self._failures = MAX_FAILURES
                    log.warning(
                        "row groups are decoded in the training process: no background process can be started: %s",
                        error,
                    )
                else:
                    self._finalizer = weakref.finalize(self, self._process.end)
                    self._finalizer.atexit = False
            return self._process

    def _count_failure(self, process: _Process) -> None:
        """Count and log the end of a process, unless it had nothing to do or was ended here."""
        if process.made >= FORGIVEN_AFTER:
            self._failures = 0
        reason = process.failure()
        if reason is None:
            return
        # A function that cannot be pickled reaches no other process either.
        self._failures = MAX_FAILURES if isinstance(process.error, ConfigError) else self._failures + 1
        is_last = self._failures >= MAX_FAILURES
        effect = "the training process makes them alone" if is_last else "another one will be started"
        log.warning("the background process that decodes row groups %s: %s", reason, effect)

    def _detach_finalizer(self) -> None:
        """Drop the finalizer of a process that has ended, or that belongs to the parent. It refers to the process."""
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None


class _Process:
    """A running background process, and the thread that listens to it.

    Args:
        row_groups: The row groups, sent to the process.
        spent: Counter of the seconds that the process spends, by cause.

    Attributes:
        ready: Set once the process accepts requests.
        ended: Set once the process accepts no more requests.
        error: Why it ended.
        made: Number of row groups that it made.
    """

    def __init__(self, row_groups: RowGroups, spent: Counters) -> None:
        self._spent = spent
        self._mutex = threading.Lock()
        self._requests: dict[int, tuple[Future[Done | None], Counters]] = {}  # with the row groups' accounts
        self.ready, self.ended = threading.Event(), threading.Event()
        self._stopping = False  # by `end`
        self.error: Exception | None = None
        self.made = 0
        self._listener = threading.Thread(
            target=self._listen, args=(row_groups,), name="dataload-decode-client", daemon=True
        )
        with ExitStack() as undo:  # if the system cannot start a thread
            self.child = Child(f"{worker.__name__}:run", SELDOM_SECONDS, NICENESS)
            undo.callback(self.child.close)
            undo.callback(self.child.stop)
            self._listener.start()
            undo.pop_all()
        atexit.register(self._end_with_program)

    def make(self, group: int, demand: DemandSignal, is_urgent: Callable[[], bool], account: Counters) -> Done | None:
        """Return the result of a row group, or None: the process is dead or busy, or the row group urgent.

        Raises:
            CancelledError: `end` was called.
        """
        with self._mutex:
            if self.ended.is_set():
                return None
            if group not in self._requests:
                if len(self._requests) >= MAX_REQUESTS:
                    return None
                self._requests[group] = Future(), account
                account.add(under_way=1, ordered=1)
                with suppress(OSError):  # The process died; the listener notices next.
                    self.child.connection.send(group)
            result, _ = self._requests[group]
        while not result.done() and not is_urgent() and self.child.process.poll() is None:
            demand.wait(result)
        return result.result() if result.done() else None

    def end(self) -> int:
        """End the process, wait until it has exited, and return its exit status."""
        atexit.unregister(self._end_with_program)
        self._stopping = True
        status = self.child.stop()
        if self._listener is not threading.current_thread():  # The garbage collector runs in any thread.
            self._listener.join()
        self.child.close()
        return status

    def failure(self) -> str | None:
        """Wait until the process has exited. Return how it failed; None if it was idle or ended by `end`."""
        was_ended, status = self._stopping, self.end()
        if was_ended or (self.ready.is_set() and (status == 0 or self.child.killed)):
            return None
        if status < 0 and not self.child.killed:
            name = signal.Signals(-status).name
            return f"was killed by {name}" + ", perhaps because memory ran out" * (status == -signal.SIGKILL)
        return f"failed with exit status {status}: {redacted(repr(self.error))}"

    def disown(self) -> None:
        """Close the connection in a forked child, so that the process notices the end of its parent."""
        self.child.disown()

    def _end_with_program(self) -> None:
        _program_exits.set()
        self.end()

    def _listen(self, row_groups: RowGroups) -> None:
        try:
            self.child.connection.send(row_groups)
            self.child.connection.recv()
            self.ready.set()
            while True:
                done: Done = self.child.connection.recv()
                self._spent.add(**done.spent)
                self.made += done.error is None
                with self._mutex:
                    result, account = self._requests.pop(done.group)
                    account.add(**done.account)
                    account.add(under_way=-1, ordered=-1)
                    result.set_result(done)
        except Exception as error:  # noqa: BLE001 (a filesystem that cannot be pickled may raise anything)
            self.error = error.with_traceback(None)  # which would keep the row groups of its frames
        finally:
            self._fail_requests()

    def _fail_requests(self) -> None:
        with self._mutex:
            self.ended.set()
            while self._requests:
                _, (result, account) = self._requests.popitem()
                account.add(under_way=-1, ordered=-1)
                if self._stopping:
                    result.set_exception(CancelledError())
                else:
                    result.set_result(None)

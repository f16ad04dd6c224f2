"""The background process that fetches and decodes row groups. It yields the processor to the training process."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from dataload.errors import DataloadError, as_sent
from dataload.rows.making import pipeline
from dataload.rows.making.load_queue import LoadQueue, Result, Work
from dataload.rows.row_group_load import RowGroupLoad
from dataload.rows.row_groups import RowGroups
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.filemap import is_file_map, libc
from dataload.telemetry.wait_timeline import Timeline

ROW_GROUPS_IN_FLIGHT = 24  # threads; the budget of the row groups bounds their memory
IDLE_SECONDS = 60.0  # without a request, until the process exits
LOOK_SECONDS = 0.2  # between two checks for conditions that nothing signals: free memory, an idle time
# mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX. Few arenas, because one thread frees the memory that
# another allocates.
MALLOC_OPTIONS = {-1: 1 << 30, -3: 32 << 20, -8: 2}


class Done(NamedTuple):
    """The result of a request.

    Attributes:
        group: The row group.
        cached: Whether the cache has its blobs.
        error: The error of the worker, or its text if it cannot be pickled.
        making: Timeline of the thread that made the blobs.
        spent: Seconds by cause that the thread has spent since its last result.
        account: The entries to add to the row group's account, see `Accounts`.
    """

    group: int
    cached: bool
    error: Exception | None
    making: Timeline
    spent: dict[str, float]
    account: dict[str, float]


def run(descriptor: int) -> None:
    """Run the background process until the parent closes the connection, or requests nothing for a while.

    Args:
        descriptor: A socket. The client sends a pickled `RowGroups` through it first, then row groups.
    """
    _keep_freed_memory()
    connection = Connection(descriptor)
    try:
        worker = _Worker(connection, connection.recv())
    except EOFError:  # The client cannot pickle them, and logs why.
        return
    with suppress(EOFError, OSError):  # The client is gone.
        worker.run()


class _Worker:
    """Makes row groups as the client requests them.

    Args:
        connection: The client. It receives "ready", then a `Done` for each request.
        row_groups: The row groups.
    """

    def __init__(self, connection: Connection, row_groups: RowGroups) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._row_groups = row_groups
        self._threads = DaemonExecutor(ROW_GROUPS_IN_FLIGHT, "dataload-decode")
        self._queue = LoadQueue(self._threads, row_groups.memory)
        row_groups.memory.use_decoder_share()

    def run(self) -> None:
        """Serve the client as long as `run` of the module says."""
        self._connection.send("ready")
        idle = 0.0
        while idle < IDLE_SECONDS:
            idle = idle + LOOK_SECONDS if self._threads.idle else 0.0
            if self._connection.poll(LOOK_SECONDS):
                self.add(self._connection.recv())

    def add(self, group: int) -> None:
        """Queue a row group."""
        load = RowGroupLoad(group, *self._row_groups.of(group), span=(0, 0))
        self._queue.add(load, Work(pipeline.make, self._answer))

    def _answer(self, load: RowGroupLoad, result: Result) -> None:
        """Tell the client whether the cache has a row group, or why it cannot be made."""
        error = None
        if isinstance(result, BaseException):
            sent = as_sent(result) if isinstance(result, Exception) else None
            error = sent or DataloadError(repr(result))
        is_cached = not isinstance(result, BaseException) and all(map(is_file_map, result))
        making = load.timeline.end()
        done = Done(load.group, is_cached, error, making, making.unreported(), load.account.snapshot())
        with self._sending, suppress(OSError):
            self._connection.send(done)


def _keep_freed_memory() -> None:
    """Make malloc keep freed memory: fresh memory for each row group costs as much time as decoding it."""
    with suppress(AttributeError):  # musl has no mallopt.
        for option, value in MALLOC_OPTIONS.items():
            libc().mallopt(option, value)

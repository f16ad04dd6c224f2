"""The background process that fetches and decodes row groups. It yields the processor to the training process."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from dataload.errors import DataloadError, as_sent
from dataload.rows.row_group_life import RowGroupLife
from dataload.rows.row_groups import RowGroups
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.filemap import libc
from dataload.telemetry.wait_timeline import Timeline

ROW_GROUPS_IN_FLIGHT = 24  # threads; the budget of `RowGroupMaker` bounds their memory
IDLE_SECONDS = 60.0  # without a request, until the process exits
LOOK_SECONDS = 0.2  # between two checks for conditions that nothing signals: free memory, the death of the parent
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
        account: The entries to add to the row group's account, see `Ledger`.
    """

    group: int
    cached: bool
    error: Exception | None
    making: Timeline
    account: dict[str, float]


def run(descriptor: int) -> None:
    """Run the background process until the parent dies, closes the connection, or requests nothing for a while.

    Args:
        descriptor: A socket. The client sends a pickled `RowGroups` through it first, then row groups.
    """
    _keep_freed_memory()
    connection, sending, parent = Connection(descriptor), threading.Lock(), os.getppid()
    try:
        blobs: RowGroups = connection.recv()
    except EOFError:  # The client cannot pickle them, and logs why.
        return
    blobs.memory.use_decoder_share()
    threads = DaemonExecutor(ROW_GROUPS_IN_FLIGHT, "dataload-decode")

    def make(group: int) -> None:
        life, cached, error = RowGroupLife(), False, None
        try:
            with life.charged():
                cached = blobs.make(group, life)
        except BaseException as caught:  # noqa: BLE001 (the client raises it, or makes the row group itself)
            sent = as_sent(caught) if isinstance(caught, Exception) else None
            error = sent or DataloadError(repr(caught))
        with sending, suppress(OSError):
            connection.send(Done(group, cached, error, life.timeline.end(), life.account.snapshot()))

    with suppress(EOFError, OSError):
        connection.send("ready")
        running: list[Future[None]] = []
        idle = 0.0
        while os.getppid() == parent and idle < IDLE_SECONDS:
            idle = 0.0 if running else idle + LOOK_SECONDS
            if connection.poll(LOOK_SECONDS):
                running.append(threads.submit(make, connection.recv()))
            running = [future for future in running if not future.done()]


def _keep_freed_memory() -> None:
    """Make malloc keep freed memory: fresh memory for each row group costs as much time as decoding it."""
    with suppress(AttributeError):  # musl has no mallopt.
        for option, value in MALLOC_OPTIONS.items():
            libc().mallopt(option, value)

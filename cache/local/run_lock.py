"""A lock on a folder, so that two runs never write into the same one."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, Protocol

from dataload.cache.local.key_locks import set_lock
from dataload.runtime.forks import ForkAware, close_copies

log = logging.getLogger(__name__)

LOCK = ".lock"
SECONDS = 10.0  # how long a run that is about to end may hold the folder
LEASE_SECONDS = 120.0  # the same of a run on another host: NFS ends a dead node's lock with its lease, usually of 90 s


class Holder(NamedTuple):
    """The process that holds a lock; unknown as long as it has not said so."""

    pid: int | None = None
    host: str | None = None

    def __str__(self) -> str:
        return "another process" if self.host is None else f"process {self.pid} on host {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether the process runs on this host."""
        return self.host == socket.gethostname()


class FolderLock(Protocol):
    """A lock of a folder that one process of all hosts holds: a `RunLock`, or a `Lease` in an object store.

    Attributes:
        pause: Seconds between two tries to acquire it.
    """

    pause: float

    def acquire(self) -> Holder | None:
        """Acquire the lock. Return None, or the process that holds it. Raises OSError."""

    def patience(self, holder: Holder, /) -> float:
        """Return for how many seconds to wait for the end of the holder."""


Attempt = tuple[str, float] | None  # the holder, and for how many seconds it may go on; None: there is none


def wait_for(
    lock: FolderLock, taken: str, once: Callable[[Callable[[], Attempt]], Attempt] = lambda attempt: attempt()
) -> str | None:
    """Acquire a lock. A holder that is about to end has some time. Return None, or the holder that goes on.

    Args:
        lock: The lock.
        taken: Says in a warning whose the folder is, as in "FOLDER is that of another run".
        once: Makes each try for all processes that call this together, and returns its result to each.
    """
    began, told = monotonic(), False

    def attempt() -> Attempt:
        nonlocal told
        if (holder := lock.acquire()) is None:
            return None
        seconds = began + lock.patience(holder) - monotonic()
        if seconds > 0 and not told:
            told = True
            log.warning("%s, %s: waiting for its end, up to %.0f s", taken, holder, seconds)
        return str(holder), seconds

    while (held := once(attempt)) is not None:
        holder, seconds = held
        if seconds <= 0:
            return holder
        sleep(lock.pause)
    return None


class RunLock(ForkAware):
    """The lock of a folder, which one process of all hosts holds.

    It is a lock of the file's open description, which ends with its holder. That of a node that dies ends on NFS only
    with the lease of that node. Children of the holder do not hold it. The file stays.

    Args:
        folder: The folder, which exists.
    """

    pause = 0.1

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor: int | None = None
        super().__init__()

    def after_fork_in_child(self) -> None:
        if self._descriptor is not None:
            self._descriptor = None
            close_copies(self._path)  # Close, never unlock: the lock belongs to the parent.

    def acquire(self) -> Holder | None:
        """Acquire the lock. Return None, or the process that holds it. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            held = set_lock(descriptor, 0, fcntl.F_WRLCK)
        except OSError as error:
            log.warning("%s: this filesystem has no locks (%s): let no other run use it", self._path.parent, error)
            held = True
        if not held:
            with os.fdopen(descriptor, encoding="utf-8") as file, suppress(ValueError, TypeError):
                return Holder(**json.load(file))
            return Holder()
        self._descriptor = descriptor
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        return None

    def patience(self, holder: Holder) -> float:
        """Return for how many seconds to wait for the end of the holder."""
        return SECONDS if holder.is_here else LEASE_SECONDS

    def check(self) -> None:
        """Do nothing: the lock lasts as long as this process."""

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor is not None:
            with suppress(OSError):  # no locks here
                set_lock(self._descriptor, 0, fcntl.F_UNLCK)
            os.close(self._descriptor)
            self._descriptor = None

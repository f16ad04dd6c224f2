"""A lock on a checkpoint_dir, so that two runs never save into the same one."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from dataload.cache.local.key_locks import set_lock
from dataload.runtime.forks import ForkAware, close_copies

log = logging.getLogger(__name__)

LOCK = ".lock"


class RunLock(ForkAware):
    """The lock of a folder, which one process of all hosts holds.

    It is a lock of the file's open description: the kernel, or the server of a network filesystem, releases it when its
    holder dies. Its children do not hold it.

    Args:
        folder: The folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor: int | None = None
        super().__init__()

    def after_fork_in_child(self) -> None:
        if self._descriptor is not None:
            self._descriptor = None
            close_copies(self._path)  # Close, never unlock: the lock belongs to the parent.

    def acquire(self) -> str | None:
        """Acquire the lock. Return None, or the process that holds it. Raises OSError."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                held = set_lock(descriptor, 0, fcntl.F_WRLCK)
            except OSError as error:
                log.warning("%s: this filesystem has no locks (%s): let no other run use it", self._path.parent, error)
                held = True
            if not held:
                with os.fdopen(descriptor, encoding="utf-8") as file, suppress(ValueError, KeyError, TypeError):
                    return "process {pid} on host {host}".format(**json.load(file))
                return "another process"
            self._descriptor = descriptor
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    break
            self._close()  # The holder before has removed this file.
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        return None

    def release(self) -> None:
        """Remove the file and release the lock, if this process holds it."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # no locks here
                set_lock(self._descriptor, 0, fcntl.F_UNLCK)
            os.close(self._descriptor)
            self._descriptor = None

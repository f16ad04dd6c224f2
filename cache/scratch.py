"""A process's own folder for files being written, proven alive by a lock that the kernel drops with the process."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
import weakref
from pathlib import Path

from dataload.cache.forks import ForkAware


class Scratch(ForkAware):
    """The folder `tmp/<start>-<random>` of this process; file names are the digests of the blobs being filled.

    The lock on the folder (flock(2)) says that its owner lives, across containers with process numbers of their own
    too. Whoever locks another's folder has found a dead one.
    """

    def __init__(self, parent: Path) -> None:
        self._path = parent / f"{time.time_ns():020d}-{secrets.token_hex(8)}"
        self._path.mkdir(mode=0o700)
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.close = weakref.finalize(self, _close, os.getpid(), self._path, self._descriptor)
        super().__init__()

    def after_fork_in_child(self) -> None:
        os.close(self._descriptor)
        self.close.detach()

    def draft(self, digest: bytes) -> Path:
        """Path for writing the blob `digest`: at most one filler of a blob is at work on a host."""
        return self._path / f"{digest.hex()}-{secrets.token_hex(4)}"


def oldest_start(parent: Path) -> int:
    """When the oldest process that is, or lately was, at work in this cache started, in ns since the Unix epoch."""
    starts = (folder.name.partition("-")[0] for folder in parent.iterdir())
    return min((int(start) for start in starts if start.isdecimal()), default=time.time_ns())


def sweep(parent: Path) -> list[bytes]:
    """Remove the folders of dead processes; the digests of the blobs they were filling. Call it under a lock."""
    unfinished = []
    for folder in parent.iterdir():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):  # Its owner has just ended; or it is no folder of ours.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            unfinished += [bytes.fromhex(draft.name.partition("-")[0]) for draft in folder.iterdir()]
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
    return unfinished


def _close(owner: int, path: Path, descriptor: int) -> None:
    if os.getpid() != owner:
        return
    shutil.rmtree(path, ignore_errors=True)  # The whole cache may be gone by now.
    os.close(descriptor)

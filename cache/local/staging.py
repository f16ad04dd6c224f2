"""A process's own folder for files being written, proven alive by a lock that the kernel drops with the process."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dataload.runtime.forks import ForkAware, close_copies

DIGEST = re.compile(r"[0-9a-f]{64}")
_SWEPT = "-swept"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StagingFolder(ForkAware):
    """The folder `tmp/<start>-<random>` of this process; file names are the digests of the blobs it is filling, or
    whose files it is removing.

    The lock on the folder (flock(2)) says that its owner lives, across containers with process numbers of their own
    too. Whoever locks another's folder has found a dead one.
    """

    def __init__(self, parent: Path) -> None:
        self._path = parent / f"{time.time_ns():020d}-{secrets.token_hex(8)}"
        self._path.mkdir(mode=0o700)
        super().__init__()
        descriptor = os.open(self._path, _FOLDER)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        self.close = weakref.finalize(self, _close, os.getpid(), self._path, descriptor)

    def after_fork_in_child(self) -> None:
        close_copies(self._path)

    def draft(self, digest: bytes) -> Path:
        """Path for writing the blob `digest`: at most one filler of a blob is at work on a host."""
        return self._path / f"{digest.hex()}-{secrets.token_hex(4)}"

    def mark(self, digest: bytes) -> Path:
        """An empty file that has whoever sweeps up after us look at the row of this blob, whose file is to go."""
        path = self.draft(digest)
        with suppress(OSError):  # On a full disk it must be possible to evict, too.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return path


def drafts(parent: Path, digest: bytes) -> list[Path]:
    """The files of living and dead processes for one blob."""
    ours = f"{digest.hex()}-"
    return [file for folder in _listed(parent) for file in _listed(folder) if file.name.startswith(ours)]


def oldest_start(parent: Path) -> int:
    """When the oldest process that is, or lately was, at work in this cache started, in ns since the Unix epoch."""
    starts = (folder.name.partition("-")[0] for folder in parent.iterdir())
    return min((int(start) for start in starts if start.isdecimal()), default=time.time_ns())


def sweep(parent: Path) -> dict[Path, set[bytes]]:
    """The folders of dead processes and the blobs at work in each, whose files are replaced by empty ones.

    Call it under a lock, then look at the rows of these blobs, then remove the folders: killed in between, whoever
    comes next finds them again.
    """
    found: dict[Path, set[bytes]] = {}
    for folder in parent.iterdir():
        with _locked(folder) as dead:
            if dead:
                drafts = [draft for draft in _listed(folder) if DIGEST.fullmatch(draft.name.partition("-")[0])]
                found[folder] = {bytes.fromhex(draft.name.partition("-")[0]) for draft in drafts}
                for digest in found[folder]:
                    with suppress(OSError):  # On a full disk, what is swept makes room.
                        (folder / f"{digest.hex()}{_SWEPT}").touch(mode=0o600)
                for draft in drafts:
                    if not draft.name.endswith(_SWEPT):
                        draft.unlink(missing_ok=True)  # A living filler of this blob may clear it just now.
    return found


def living(parent: Path) -> bool:
    """Whether a process is at work in this cache."""
    for folder in parent.iterdir():
        with _locked(folder) as dead:
            if dead is False:
                return True
    return False


def _listed(folder: Path) -> list[Path]:
    """What is in a folder: nothing, when its owner has just ended, or when it is no folder of ours."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Hold the lock of a folder in `tmp/`; yields False when its owner does, None when there is no such folder."""
    try:
        descriptor = os.open(folder, _FOLDER)
    except (FileNotFoundError, NotADirectoryError):  # Its owner has just ended; or it is no folder of ours.
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _close(owner: int, path: Path, descriptor: int) -> None:
    if os.getpid() != owner:
        return
    with suppress(OSError):
        path.rmdir()  # What is left in it, of a fill that was cut off, names rows that whoever sweeps up has to drop.
    os.close(descriptor)

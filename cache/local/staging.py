"""The staging folder of a process for files it is writing, locked as long as the process runs."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dataload.cache.blob_file import FILE_NAME
from dataload.cache.local.key_locks import attempts
from dataload.runtime.forks import ForkAware, close_copies

_SWEPT = "-swept"
_NOTE = "note-"  # begins the names of files that `show` writes
LOOK_SECONDS = 1.0  # within which a process that looks for running ones gives a lock back
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # flags of open(2)


class StagingFolder(ForkAware):
    """The folder `tmp/<start>-<process number>@<host>-<random>` of this process.

    File names begin with the digests of the blobs that the process is filling or removing. The owner holds a lock on
    the folder (flock(2)), and the kernel releases it when the owner dies. So a process that acquires the lock of
    another folder knows that its owner is dead, across containers too.

    Args:
        parent: The folder `tmp/` of the cache.
        start: Start time of the process, in ns since the Unix epoch.
    """

    def __init__(self, parent: Path, start: int) -> None:
        self._path = parent / f"{start:020d}-{os.getpid()}@{socket.gethostname()}-{secrets.token_hex(8)}"
        self._path.mkdir(mode=0o700)
        super().__init__()
        descriptor = os.open(self._path, OPEN_FOLDER)
        try:
            _lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        # By name, and by folder: what `read` has found, and the inode, time and size of its file.
        self._found: dict[str, dict[Path, tuple[tuple[int, int, int], bytes]]] = {}
        self.close = weakref.finalize(self, _close, os.getpid(), self._path, descriptor)

    def after_fork_in_child(self) -> None:
        close_copies(self._path)

    def show(self, name: str, content: bytes) -> None:
        """Show some content to other processes, under a name, as long as this one runs."""
        draft = self._path / f"{_note(name)}-draft"
        draft.write_bytes(content)
        draft.rename(self._path / _note(name))

    def read(self, name: str) -> list[tuple[str, bytes]]:
        """Return what other running processes show under a name, each with the name of its process.

        Files that have not changed since the last call are not read again.
        """
        known = self._found.get(name, {})
        same = {content: content for _, content in known.values()}  # Ranks of a job show the same: it is held once.
        found, shown = {}, []
        for folder in _listed(self._path.parent):
            with suppress(OSError):  # It shows nothing, or its process just ends.
                if folder != self._path:
                    status = (file := folder / _note(name)).stat()
                    version = (status.st_ino, status.st_mtime_ns, status.st_size)
                    old, content = known.get(folder, (None, b""))
                    if old != version:
                        content = file.read_bytes()
                    with _locked(folder) as dead:
                        if dead is False:
                            found[folder] = version, same.setdefault(content, content)
                            shown.append((_process(folder), found[folder][1]))
        self._found[name] = found
        return shown

    def draft(self, digest: bytes) -> str:
        """Return a new path for writing the blob `digest`."""
        return f"{self._path}/{digest.hex()}-{secrets.token_hex(4)}"

    def mark(self, digest: bytes) -> str:
        """Create an empty file that makes a sweep after a kill check the row of this blob. Return its path."""
        path = self.draft(digest)
        with suppress(OSError):  # Evictions must work on a full disk, too.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return path


def clear_drafts(parent: Path, digest: bytes, keep: str) -> None:
    """Remove the staged files for one blob, except `keep`.

    The caller holds the lock of the blob, so the other files are those of dead processes. `keep` leads a sweep to the
    row of the blob until the caller has dropped the row.
    """
    prefix = f"{digest.hex()}-"
    for folder in _listed(parent):
        for file in _listed(folder):
            if file.name.startswith(prefix) and str(file) != keep:
                remove(str(file))


def remove(path: str) -> bool:
    """Remove a file. Return whether it existed."""
    try:
        os.unlink(path)  # noqa: PTH108 (a tenth of the time of a Path)
    except FileNotFoundError:
        return False
    return True


def oldest_start(parent: Path) -> int:
    """Return the start time of the oldest running process with a staging folder, in ns since the Unix epoch."""
    for folder in sorted(parent.iterdir()):  # Their names begin with the start.
        start = folder.name.partition("-")[0]
        with _locked(folder) as dead:
            if dead is False and start.isdecimal():
                return int(start)
    return time.time_ns()


def users(cache: Path) -> str:
    """Return the other processes that have a cache open, for a message; those that are known to be stopped first."""
    found, host = [], socket.gethostname()
    for folder in _listed(cache / "tmp"):
        with _locked(folder) as dead:
            pid, its_host = _owner(folder)
            if dead is False and (pid, its_host) != (str(os.getpid()), host):
                found.append((not (its_host == host and _is_stopped(pid)), _process(folder)))
    names = [f"{name}{'' if runs else ' (stopped)'}" for runs, name in sorted(found)]
    return f"the cache is open in {', '.join(names) or 'no other process'}"


def _note(name: str) -> str:
    return _NOTE + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _owner(folder: Path) -> tuple[str, str]:
    """Return the process number and the host of a staging folder's owner."""
    pid, _, host = folder.name.partition("-")[2].rpartition("-")[0].partition("@")
    return pid, host


def _process(folder: Path) -> str:
    pid, host = _owner(folder)
    return f"process {pid} of {host}"


def _is_stopped(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def swept_mark(folder: Path, digest: bytes) -> str:
    """Return the path of the empty file that replaces the swept files of a blob in the folder of a dead process."""
    return f"{folder}/{digest.hex()}{_SWEPT}"


def sweep(parent: Path) -> dict[Path, set[bytes]]:
    """Replace the staged files of dead processes by empty ones. Return their folders, with the digests in each.

    The caller holds the set-up lock. It then checks the rows of these digests, and removes the folders last. After a
    kill in between, the next sweep finds the same digests.
    """
    found: dict[Path, set[bytes]] = {}
    for folder in parent.iterdir():
        with _locked(folder) as dead:
            if dead:
                drafts = [draft for draft in _listed(folder) if FILE_NAME.fullmatch(draft.name.partition("-")[0])]
                found[folder] = {bytes.fromhex(draft.name.partition("-")[0]) for draft in drafts}
                for digest in found[folder]:
                    with suppress(OSError):  # The disk may be full; the unlinks below free space.
                        Path(swept_mark(folder, digest)).touch(mode=0o600)
                for draft in drafts:
                    if not draft.name.endswith(_SWEPT):
                        draft.unlink(missing_ok=True)  # A running writer of this blob may remove it first.
    return found


def living(parent: Path) -> bool:
    """Return whether a process has the cache open."""
    for folder in parent.iterdir():
        with _locked(folder) as dead:
            if dead is False:
                return True
    return False


def _listed(folder: Path) -> list[Path]:
    """Return the files of a folder; none if its owner has just removed it, or if it is not a folder."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Share the lock of a folder in `tmp/`. Yield False if its owner holds it, None if there is no such folder.

    Processes that look at a dead one at the same time do not take each other for its owner.
    """
    try:
        descriptor = os.open(folder, OPEN_FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
        for file in path.glob(f"{_NOTE}*"):
            file.unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()  # Fails if drafts are left: the next sweep needs them to drop their rows.
    os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock the own folder. A process that looks which others run may hold the lock of a new one for a moment."""
    for _ in attempts(time.monotonic() + LOOK_SECONDS):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    raise BlockingIOError(errno.EAGAIN, "another process holds the lock of a new folder")

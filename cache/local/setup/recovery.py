"""Recovery of a cache after kills, crashes of the machine, and damage to the index.

LMDB without syncs survives crashes of processes, not of the machine. So a file beside it, `index/state`, records its
state. It is read before LMDB opens the index, because opening a torn index can crash the process.

    <boot id>   opened since this boot of the machine, and not closed
    closed      closed by its last process, and synced to disk
    (missing)   being created, or in doubt: a part of the folder was removed while processes ran, or LMDB reported
                damage

An index is trusted if it was closed, or if it was opened since this boot. Otherwise it is rebuilt from the footers of
the blobs.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dataload.cache import blob_file
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import Index, Row
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.lmdb_file import DAMAGED
from dataload.cache.local.staging import clear_drafts, living, sweep, swept_mark
from dataload.errors import CorruptEntry
from dataload.runtime.durable_file import write_durably
from dataload.runtime.executor import DaemonExecutor

FOOTER_READS = 32  # footers of blobs that are read at the same time
FILES_AT_ONCE = 1024
_CLOSED = "closed"

log = logging.getLogger(__name__)


def recover(path: Path, index: Index, locks: KeyLocks, *, detectable: bool) -> int | None:
    """Remove the files and rows that dead processes left. Rebuild the index if it is lost, damaged or not trusted.

    The caller holds the set-up lock.

    Args:
        path: The cache folder.
        index: The index of this process.
        locks: The key locks of this process.
        detectable: Whether other running processes can be detected. If not, the index is not rebuilt.

    Returns:
        The bytes of all blobs; None if a stopped process holds the index.

    Raises:
        OSError: The disk fails, or other processes use a damaged index.
        lmdb.Error: LMDB fails.
    """
    step("recover: locked")
    swept = sweep(path / "tmp")
    step("recover: swept")
    used = _open_index(path, index, exclusive=detectable and not living(path / "tmp"))
    forgotten = [] if used is None else _forget(path, index, locks, swept)
    used = index.used_bytes() if forgotten else used
    step("recover: forgotten")
    for dead in forgotten:
        shutil.rmtree(dead, ignore_errors=True)  # A running writer may be removing these files, too.
    if not detectable:
        doubt(path / "index")
    return used


def _open_index(path: Path, index: Index, *, exclusive: bool) -> int | None:
    """Open the index, or rebuild it. Return the bytes of all blobs; None if a stopped process holds the index."""
    lost, used = exclusive and not trusted(path / "index"), None
    if not lost:
        try:
            used = index.used_bytes()
        except (FileNotFoundError, *DAMAGED) as error:
            log.debug("cache %s: the index cannot be read: %s", path, error)
            lost = True
        except TimeoutError:  # A stopped process holds the index lock. Cached blobs are readable without the index.
            pass
    if lost:
        if not exclusive:  # Other processes may still use the old index: two indexes would allow twice the limit.
            reason = "the index is lost or damaged, and in use by other processes; it is rebuilt once they exit"
            raise OSError(errno.EBUSY, reason, str(path / "index"))
        _rebuild(index, path / "index", path / "blobs")
        used = index.used_bytes()
    if exclusive:
        note_open(path / "index")
    return used


def _forget(path: Path, index: Index, locks: KeyLocks, swept: dict[Path, set[bytes]]) -> list[Path]:
    """Drop rows without files that dead processes left. Return the staging folders that can be removed.

    The first timeout of the index ends the work. The next process that opens the cache does the rest.
    """
    done: list[Path] = []
    with suppress(TimeoutError):
        for dead, digests in swept.items():
            if all(_forget_one(path, index, locks, digest, swept_mark(dead, digest)) for digest in digests):
                done.append(dead)
    return done


def _forget_one(path: Path, index: Index, locks: KeyLocks, digest: bytes, mark: str) -> bool:
    """Drop the row of a blob that has no file. Return False while another process fills or evicts the blob."""
    with locks.hold(digest, timeout=0) as held:
        if held and not Path(blob_file.path_in(path / "blobs", digest)).exists():
            clear_drafts(path / "tmp", digest, keep=mark)  # A process may have died since the sweep.
            index.drop(digest)
        return held


def _rebuild(index: Index, path: Path, blobs: Path) -> None:
    """Drop the index at `path`, enter a row for each intact file below `blobs`, and remove the other files.

    Only footers are read, by many threads: after a reboot they are not in the page cache. Damage to a payload is
    detected when it is first read. The caller holds the set-up lock and is the only process in the folder. After a kill
    the index stays untrusted.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, exist_ok=True)
    step("rebuild: dropped")
    index.make()
    folders = sorted(folder for folder in blobs.iterdir() if folder.is_dir() and not folder.is_symlink())
    if found := sum(len(os.listdir(folder)) for folder in folders):  # noqa: PTH208 (there may be millions)
        log.warning("cache %s: the index was lost or not trusted; rebuilding it from %d blobs", path.parent, found)
    readers = DaemonExecutor(FOOTER_READS, "dataload-blocks-rebuild")
    files = (file for folder in folders for file in folder.iterdir())
    while some := list(islice(files, FILES_AT_ONCE)):
        index.enter(row for row in readers.map(_row, some) if row is not None)
    step("rebuild: entered")
    if found:
        log.info("cache %s: rebuilt the index", path.parent)


def _row(file: Path) -> Row | None:
    """Return the row of a blob. Remove a file that is none."""
    try:
        footer, name, status = blob_file.read_footer(file)
        if blob_file.path_in(file.parent.parent, footer.digest) != str(file):
            raise CorruptEntry(f"{file} holds another blob")
    except FileNotFoundError:
        return None
    except OSError as error:
        if not isinstance(error, CorruptEntry) and error.errno not in (errno.EIO, errno.EISDIR):
            raise
        with suppress(IsADirectoryError):
            file.unlink(missing_ok=True)  # Safe: only caches write to blobs/.
        return None
    return Row(footer.digest, name, blob_file.allocated(status.st_size), min(time.time_ns(), status.st_mtime_ns))


def remove_a_blob(blobs: Path) -> list[bytes]:
    """Remove the largest file of a folder of blobs. Return its digest; none if that failed or there is no blob."""
    with suppress(OSError):  # Another process may remove it first.
        for folder in blobs.iterdir():
            if files := [file for file in folder.iterdir() if blob_file.FILE_NAME.fullmatch(file.name)]:
                victim = max(files, key=lambda file: file.lstat().st_size)
                victim.unlink()
                return [bytes.fromhex(victim.name)]
    return []


def boot_id() -> str:
    """Return the ID of this boot of the machine; "" if the kernel provides none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def trusted(index: Path) -> bool:
    """Return whether the index at this path can be trusted. Raises OSError."""
    state = _state(index)
    return state == _CLOSED or state == boot_id() != ""


def note_open(index: Path) -> None:
    """Record durably that the index is open and valid until the end of this boot. Raises OSError."""
    if _state(index) != boot_id():
        write_durably(index / "state", boot_id())


def note_closed(index: Path) -> None:
    """Record that the index is synced and no process has it open. A state in doubt stays. Raises OSError."""
    if _state(index) == boot_id() != "":
        write_durably(index / "state", _CLOSED)


def doubt(index: Path) -> None:
    """Make the next process that has the folder to itself rebuild the index."""
    with suppress(OSError):
        (index / "state").unlink(missing_ok=True)


def _state(index: Path) -> str | None:
    try:
        return (index / "state").read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return None

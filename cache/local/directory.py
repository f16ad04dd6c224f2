"""The cache folder: its layout, its format, and the index, locks and staging folder of this process."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import lmdb

from dataload.cache import blob_file
from dataload.cache.division import Division
from dataload.cache.local.eviction import Eviction, release, release_if_enough
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import AFTER_ALL, Index, Row, RowExistsError
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.lmdb_file import LOCK_SECONDS
from dataload.cache.local.recent_uses import RecentUses
from dataload.cache.local.setup import cache_format, default_limit, preflight, recovery
from dataload.cache.local.setup.recovery import recover
from dataload.cache.local.staging import OPEN_FOLDER, StagingFolder, clear_drafts, living, oldest_start, remove, users
from dataload.errors import ConfigError

T = TypeVar("T")

SETUP_SECONDS = 60.0
CLOSE_SECONDS = 1.0
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})  # errors of a full disk
EXHAUSTED = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})  # this process has too many maps or files
ADMIT_ATTEMPTS = 16  # Other processes may take the space that an eviction freed.
_SETUP = b"\xff" * 32  # key of the lock for creating, opening, sweeping and closing a folder
# Errors that the user must fix. The tier handles all others (full disk, failing disk, too many open files) itself.
_WRONG_FOLDER = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)


class CacheFolder:
    """A cache folder, open in this process.

        FORMAT   version and identity, as JSON      locks    one byte per key, never unlinked
        index/   LMDB and its shutdown state        tmp/     one staging folder per running process
        blobs/   a/<digest>                         LIMIT    the default limit in bytes

    Opening creates a missing folder with mode 0700 and removes the partial files of dead processes. It rebuilds the
    index from the blobs if the index is lost, damaged or not trusted (`recovery`). Only a process that has the folder
    to itself rebuilds; while other processes use the folder, opening fails instead.

    If the folder or a part of it is removed while processes run, existing views stay valid. Each process notices at its
    next fill at the latest, closes the folder and reopens it. Until then its blobs may be missing from the index, so
    the total may exceed the limit. The limit holds again after the next rebuild.

    Args:
        path: The cache folder.
        allow_network_filesystem: Open the folder on any filesystem.

    Attributes:
        uses: The uses of blobs that are not in the index yet.
        default_limit: Byte limit of tiers that have none of their own.

    Raises:
        ConfigError: The user must fix the folder: it holds something other than a cache of this format, has another
            owner, is not writable, or is on a filesystem that is not known to be local.
        OSError: The disk fails, or the index is unusable at the moment.
        lmdb.Error: LMDB fails.
    """

    def __init__(self, path: Path, *, allow_network_filesystem: bool = False) -> None:
        self.path = path
        self._blobs, self._tmp = str(path / "blobs"), path / "tmp"
        self.closed = False
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            preflight.check(path, allow_network_filesystem=allow_network_filesystem)
            # Without these files, running processes cannot be detected.
            detectable = not (path / "index").exists() or ((path / "locks").exists() and self._tmp.exists())
            _touch(path / "locks")
            self.locks = KeyLocks(str(path / "locks"))
            with self.locks.hold(_SETUP, SETUP_SECONDS) as held:
                if not held:
                    reason = f"another process has held the set-up lock for {SETUP_SECONDS:.0f} s; {users(path)}"
                    raise TimeoutError(errno.ETIMEDOUT, reason)
                cache_format.check(path)
                preflight.check_private(path, allow_network_filesystem=allow_network_filesystem)
                for name in ("tmp", "blobs", "index"):
                    (path / name).mkdir(mode=0o700, exist_ok=True)
                self.index = Index(path / "index")
                try:
                    self._recover(detectable=detectable)
                except BaseException:
                    self.index.shut()
                    raise
        except OSError as error:
            if error.errno not in _WRONG_FOLDER:
                raise
            cause = error.strerror or error
            way = "name one you may write to by cache_dir or DATALOAD_CACHE_DIR, or read without a cache by cache=False"
            raise ConfigError(f"cache_dir {path} cannot be used ({cause}): {way}") from error
        self._eviction, self.uses = Eviction(self.index), RecentUses(self.index)
        self.ended = threading.Event()  # set once everything is closed and the process may reopen the folder
        self._close = weakref.finalize(
            self, _close, os.getpid(), path, self.index, self.uses, self.staging, self.locks, self.ended
        )

    def _recover(self, *, detectable: bool) -> None:
        """Recover the folder and enter it. On a full disk, remove a blob first: a warm cache must open."""
        removed: list[bytes] = []

        def enter() -> None:
            used = recover(self.path, self.index, self.locks, detectable=detectable)
            self.default_limit = default_limit.fix(self.path, used)
            self.staging = StagingFolder(self._tmp, self.index.start())

        def make_room(_: OSError) -> bool:
            removed.extend(recovery.remove_a_blob(self.path / "blobs"))
            return bool(removed)

        with_room(enter, make_room)
        if removed:
            with suppress(OSError, lmdb.Error):  # Else the row stays until it is the least recently used.
                self.remove(removed)

    @property
    def released(self) -> bool:
        """Whether the folder is closed, or the process ends: daemon threads run a little longer."""
        return not self._close.alive

    def close(self) -> None:
        """Close the folder, as the end of the process does. The last process to close it syncs the index to disk."""
        self.closed = True
        self._close()

    def doubt(self) -> None:
        """Close a folder that lost files or has a damaged index, and schedule a rebuild of the index."""
        recovery.doubt(self.path / "index")
        self.close()

    def path_of(self, digest: bytes) -> Path:
        """Return the path of a blob's file."""
        return Path(self.file_of(digest))

    def file_of(self, digest: bytes) -> str:
        """Return `path_of` as a string, in a tenth of the time."""
        return blob_file.path_in(self._blobs, digest)

    def publish(self, draft: str, digest: bytes) -> None:
        """Move a sealed draft to its final path.

        Raises:
            OSError: The file cannot be moved.
        """
        folder, name = os.path.split(self.file_of(digest))
        try:
            parent = os.open(folder, OPEN_FOLDER)
        except FileNotFoundError:
            with_room(partial(Path(folder).mkdir, mode=0o700, parents=True, exist_ok=True), self._evict_a_blob)
            parent = os.open(folder, OPEN_FOLDER)
        try:
            os.rename(draft, name, dst_dir_fd=parent)
        finally:
            os.close(parent)

    def unlink(self, digest: bytes) -> bool:
        """Remove a blob's file. Return whether it existed."""
        return remove(self.file_of(digest))

    def discard(self, digest: bytes, draft: str | None = None, timeout: float = LOCK_SECONDS) -> None:
        """Remove a blob or its draft, the file before the row. The caller holds its lock."""
        mark = self.staging.mark(digest)
        if draft is None:
            self.unlink(digest)
            clear_drafts(self._tmp, digest, mark)  # Drafts of a dead writer, not swept yet: the row accounts for them.
            step("discard: unlinked")
        else:
            remove(draft)
        if draft is None or not os.path.exists(self.file_of(digest)):  # noqa: PTH110 (a str)
            self.index.drop(digest, timeout=timeout)  # The row of a file that is there belongs to that file.
        remove(mark)

    def reserve(self, row: Row, draft: str, limit: int, division: Division, *, pin: bool) -> bool:
        """Enter a row, evicting as many blobs as it takes. Return whether it fits.

        The caller holds the lock of the row's key. A row that does not fit is not entered, and nothing is evicted.
        Files of an earlier writer of the blob are removed.

        Args:
            row: The blob to admit.
            draft: The file that the caller writes the blob to. It leads a later sweep to the row after a kill.
            limit: Most bytes on disk.
            division: How loaders share the cache. A blob that cannot be pinned replaces the oldest of those.
            pin: Evict only blobs that no running process has used since it started, and those above their share.
        """
        index, allow_transient = self.index, False
        _remove_damaged(self.file_of(row.digest), row.digest)
        for _ in range(ADMIT_ATTEMPTS):
            try:
                if index.admit(row, limit=limit, region=division.region, allow_transient=allow_transient) is None:
                    return True
            except RowExistsError:  # of the corrupt blob, or of drafts of a dead writer that are not swept yet
                clear_drafts(self._tmp, row.digest, draft)
                step("discard: unlinked")
                index.drop(row.digest)
                continue
            self._flush_uses()
            before = oldest_start(self._tmp) if pin else AFTER_ALL
            for choice in self._eviction.choices(row, limit, division, before):
                if release_if_enough(choice.missing, choice.victims, self.remove):
                    allow_transient = not choice.pinned
                    break
            else:
                return False
        return False

    def evict(self, keep_bytes: int, *, pin: bool = False) -> None:
        """Evict blobs, the least recently used first, until at most `keep_bytes` remain.

        Args:
            keep_bytes: Most bytes that remain.
            pin: Keep pinned blobs that a running process has used since the oldest one started.
        """

        def over() -> int:
            return self.index.used_bytes() - keep_bytes

        before = oldest_start(self._tmp) if pin else AFTER_ALL
        release(over, chain(self.index.transient(), self.index.pinned(before)), self.remove)

    def _evict_a_blob(self, _: OSError) -> bool:
        self.evict(self.index.used_bytes() - 1)
        return True

    def _flush_uses(self) -> None:
        """Write the uses to the index. A full disk has no space for them, and an eviction makes some."""
        try:
            self.uses.flush()
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise

    def remove(self, digests: Iterable[bytes]) -> int:
        """Remove a few blobs, files before rows, except blobs that are being filled. Return the bytes that were freed.

        The key locks are held from the first file to the last row. So no blob is refilled in between, and no row of a
        new blob is dropped. If the process is killed in between, its marks lead the next sweep to the rows.
        """
        marks: dict[bytes, str] = {}
        with ExitStack() as stack:
            for digest in digests:
                if stack.enter_context(self.locks.hold_to_evict(digest)):
                    mark = marks[digest] = self.staging.mark(digest)
                    if not self.unlink(digest):
                        clear_drafts(self._tmp, digest, mark)  # Drafts of a dead writer: the row accounts for them.
            step("evict: unlinked")
            freed = self.index.drop(*marks) if marks else 0
            step("evict: dropped")
            for mark in marks.values():  # Not reached if the drop failed: the rows still need their marks.
                remove(mark)
        return freed


def with_room(write: Callable[[], T], make_room: Callable[[OSError], bool]) -> T:
    """Call `write`. If the disk is full, call it once more after `make_room`, unless that returns False."""
    try:
        return write()
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS or not make_room(error):
            raise
    return write()


def _remove_damaged(path: str, digest: bytes) -> None:
    """Remove the file of a blob that could not be read. Raise OSError if it is this process that cannot read it."""
    try:
        blob_file.open_map(path, digest, blob_file.VerifiedSegments(), (0, 0))
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
    remove(path)


def _touch(path: Path) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _close(
    owner: int,
    path: Path,
    index: Index,
    uses: RecentUses,
    staging: StagingFolder,
    locks: KeyLocks,
    ended: threading.Event,
) -> None:
    if os.getpid() != owner:
        return
    try:
        with suppress(OSError, lmdb.Error), locks.hold(_SETUP, CLOSE_SECONDS) as held:
            with suppress(OSError, lmdb.Error):  # such as a full disk
                uses.flush(timeout=0)
            staging.close()
            if held and not living(path / "tmp"):
                index.shut(sync=True)
                step("close: synced")
                recovery.note_closed(path / "index")
        staging.close()
        index.shut()
    finally:
        ended.set()

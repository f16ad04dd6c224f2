"""The folder of a cache: its layout, its format, and what a process needs open to work in it."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import lmdb

from dataload.cache.local import default_limit, preflight, trust
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import DAMAGED, LOCK_SECONDS, Index, Row
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.recovery import rebuild
from dataload.cache.local.staging import StagingFolder, drafts, living, oldest_start, sweep
from dataload.errors import ConfigError

FORMAT = 3
SETUP_SECONDS = 60.0
CLOSE_SECONDS = 1.0
EVICTED_AT_ONCE = 32  # blobs whose locks are held together, a descriptor each
ADMIT_ATTEMPTS = 16  # Other processes may take the room that was made.
_SETUP = b"\xff" * 32  # the lock under which a folder is made, opened, swept and closed
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What a person must mend. All else (a full disk, a failing one, too many open files) is the tier's own trouble.
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
    }
)

log = logging.getLogger(__name__)


class CacheFolder:
    """A cache folder, open in this process.

        FORMAT   version and identity, as JSON      locks    one byte a key, never unlinked
        index/   LMDB, and how it was left          tmp/     a folder for each running process
        blobs/   ab/<digest>                        LIMIT    the default limit in bytes

    Made when missing, with mode 0700. What dead processes left half-written is removed on opening. The index is made
    anew from the blobs when it is lost, damaged, or not to be believed (`trust`), by a process that is alone in the
    folder: as long as others live that have it open, opening fails instead.

    When the folder, or a part of it, is removed under living processes: views that were handed out stay valid; each
    process notices at its next fill at the latest, lets go, and opens the folder anew, made again if need be. Until
    then what it keeps may be in no index, so the limit may be exceeded by it; it holds again once a process has opened
    the folder alone, which makes the index anew.

    allow_network_filesystem: open the folder whatever filesystem it is on.

    rebuilt: whether this opening made the index anew. default_limit: bytes that a tier without a limit may keep here.

    Raises ConfigError when a person must mend it: it holds something that is not a cache of this format, belongs to
    somebody else, may not be written, is on a filesystem that is not known to be local. Raises OSError and lmdb.Error
    when the disk fails, and when the index cannot be used just now.
    """

    def __init__(self, path: Path, *, allow_network_filesystem: bool = False) -> None:
        self.path = path
        self._blobs = str(path / "blobs")
        self.closed = False
        self.rebuilt = False
        self._index_held = False  # by a process that was stopped, when this one opened the folder
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            preflight.check(path, allow_network_filesystem=allow_network_filesystem)
            # Whoever removed these under living processes took from us how to tell that they live.
            known = not (path / "index").exists() or ((path / "locks").exists() and (path / "tmp").exists())
            _touch(path / "locks")
            self.locks = KeyLocks(str(path / "locks"))
            with self.locks.hold(_SETUP, SETUP_SECONDS) as held:
                if not held:
                    raise TimeoutError(errno.ETIMEDOUT, f"others have been opening it for {SETUP_SECONDS:.0f} s")
                self._check_format()
                for name in ("tmp", "blobs", "index"):
                    (path / name).mkdir(mode=0o700, exist_ok=True)
                self.index = Index(path / "index")
                try:
                    self._set_up(known=known)
                except BaseException:
                    self.index.shut()
                    raise
        except OSError as error:
            if error.errno not in _WRONG_FOLDER:
                raise
            reason = error.strerror or error
            raise ConfigError(f"cache_dir {path} cannot be used ({reason}): name a folder you may write to") from error
        self.ended = threading.Event()  # closed, all of it: from here on the process may open it again
        self._close = weakref.finalize(
            self, _close, os.getpid(), path, self.index, self.scratch, self.locks, self.ended
        )

    def _set_up(self, *, known: bool) -> None:
        step("recover: locked")
        swept = sweep(self.path / "tmp")
        step("recover: swept")
        alone = known and not living(self.path / "tmp")
        self._open_index(alone=alone)
        forgotten = self._forget(swept)
        step("recover: forgotten")
        for dead in forgotten:
            shutil.rmtree(dead, ignore_errors=True)  # A living filler may be clearing them, too.
        self.default_limit = default_limit.fix(self.path, self._used_bytes)
        if not known:
            trust.doubt(self.path / "index")
        self.scratch = StagingFolder(self.path / "tmp")

    def close(self) -> None:
        """Let go of the folder, as the end of the process does: an index that nobody has open is put on the disk."""
        self.closed = True
        self._close()

    def doubt(self) -> None:
        """Let go of a folder of which something was removed or damaged; its index is to be made anew."""
        trust.doubt(self.path / "index")
        self.close()

    def check_place(self) -> None:
        """Raises OSError when the index that this process has open is no longer what others find here."""
        self.index.check_place()

    def path_of(self, digest: bytes) -> Path:
        return Path(self.file_of(digest))

    def file_of(self, digest: bytes) -> str:
        """`path_of` as text, which takes a tenth of the time."""
        name = digest.hex()
        return f"{self._blobs}/{name[:2]}/{name}"

    def publish(self, draft: Path, digest: bytes) -> str:
        """Give a sealed draft its name; the path it now has. Raises OSError."""
        target = self.file_of(digest)
        folder, name = os.path.split(target)
        try:
            parent = os.open(folder, _FOLDER)
        except FileNotFoundError:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            parent = os.open(folder, _FOLDER)
        try:
            os.rename(draft, name, dst_dir_fd=parent)
        finally:
            os.close(parent)
        return target

    def unlink(self, digest: bytes) -> bool:
        """Remove a blob's file; whether there was one."""
        try:
            self.path_of(digest).unlink()
        except FileNotFoundError:
            return False
        return True

    def clear(self, digest: bytes, own: Path) -> None:
        """Remove what there is of a blob on the disk, but for `own`. Its lock must be held.

        own: the file in our scratch folder by which a sweep finds the row, should we be killed.
        """
        self.unlink(digest)
        if self.index.size_of(digest) is not None:
            self._clear_drafts(digest, own)  # Of a dead filler that nobody has swept: its row stands for them.
        step("discard: unlinked")

    def discard(self, digest: bytes, draft: Path | None = None, timeout: float = LOCK_SECONDS) -> None:
        """Remove a blob, or the draft of one, file before row. Its lock must be held."""
        mark = self.scratch.mark(digest)
        if draft is None:
            self.clear(digest, mark)
        else:
            draft.unlink(missing_ok=True)
        self.index.drop(digest, timeout=timeout)
        mark.unlink(missing_ok=True)

    def reserve(self, row: Row, *, limit: int, region: int, evict_before: Callable[[], int]) -> bool:
        """Enter a row in place of one it may have, evicting as many blobs as it takes. Return whether it fits.

        The caller holds the lock of the row's key. A row that does not fit is not entered, and nothing is evicted.

        Args:
            row: The blob to admit.
            limit: Most bytes on disk.
            region: Bytes of the limit for blobs that pass through. A blob that cannot stay takes the place of the
                oldest of them.
            evict_before: Called only when the cache is full: blobs that stay but were last used before this time (ns)
                may be evicted.
        """
        index = self.index
        for _ in range(ADMIT_ATTEMPTS):
            missing = index.admit(row, limit=limit, region=region, may_pass=False)
            if missing is None:
                return True
            before = evict_before()
            if self._evict(max(missing), partial(index.staying, before)):
                continue
            # Blobs that stay fill the region too when another process, without a region, kept them.
            overfull = region and missing.staying > row.size
            victims = partial(index.staying, time.time_ns()) if overfull else partial(index.evictable, before)
            if missing.total > 0 and not self._evict(missing.total, victims):
                return False
            if index.admit(row, limit=limit, region=region, may_pass=True) is None:
                return True
        return False

    def evict(self, keep_bytes: int) -> None:
        """Evict blobs, the least recently used first, until at most `keep_bytes` remain."""
        over = self.index.used_bytes() - keep_bytes
        if over > 0:
            self._release_some(over, self.index.evictable(time.time_ns()))

    def _evict(self, size: int, victims: Callable[[], Iterator[Row]]) -> bool:
        """Evict some of these blobs, in their order, until `size` bytes are free. Return whether they are.

        Nothing is evicted when all of them would not do.
        """
        return any(total >= size for total in accumulate(row.size for row in victims())) and (
            self._release_some(size, victims()) <= 0
        )

    def _release_some(self, size: int, victims: Iterator[Row]) -> int:
        """Release blobs until `size` bytes are free or there are no more. Return the bytes that are still missing."""
        some: list[Row] = []
        for row in victims:
            some.append(row)
            if len(some) == EVICTED_AT_ONCE or sum(row.size for row in some) >= size:
                size -= self._release(some)
                some = []
                if size <= 0:
                    return size
        return size - self._release(some)

    def _release(self, rows: list[Row]) -> int:
        """Remove blobs, files before rows; those that are being filled stay. Return the bytes that were freed.

        The locks of the keys are held from the first file to the last row: nobody fills one of them in between, so no
        row of a new blob is dropped. Killed in between, this process leaves marks by which the rows are found.
        """
        marks: dict[bytes, Path] = {}
        with ExitStack() as stack:
            for row in rows:
                if stack.enter_context(self.locks.hold_to_evict(row.digest)):
                    mark = marks[row.digest] = self.scratch.mark(row.digest)
                    if not self.unlink(row.digest):
                        self._clear_drafts(row.digest, mark)  # Of a dead filler: its row stands for them.
            step("evict: unlinked")
            freed = self.index.drop(*marks) if marks else 0
            step("evict: dropped")
            for mark in marks.values():  # Where an error kept the rows, the marks stay, too.
                mark.unlink(missing_ok=True)
        return freed

    def _clear_drafts(self, digest: bytes, own: Path) -> None:
        for draft in drafts(self.path / "tmp", digest):
            if draft != own:
                draft.unlink(missing_ok=True)

    def oldest_process(self) -> int:
        """When the oldest process at work here started, in ns since the Unix epoch."""
        return oldest_start(self.path / "tmp")

    def _check_format(self) -> None:
        file = self.path / "FORMAT"
        if not file.exists():
            preflight.make_private(self.path)
            trust.write_durably(file, json.dumps({"format": FORMAT, "uuid": str(uuid.uuid4())}))
            return
        try:
            found = json.loads(file.read_text())["format"]
        except (ValueError, KeyError, TypeError):
            found = "unreadable"
        if found != FORMAT:
            raise ConfigError(
                f"cache_dir {self.path} has format {found}, this version reads {FORMAT}: remove it or name another"
            )

    def _open_index(self, *, alone: bool) -> None:
        path = self.path / "index"
        if (alone and not trust.trusted(path)) or not self._readable():
            if not alone:  # Others may go on with what they have open: two indexes would keep twice the limit.
                raise OSError(errno.EBUSY, "its index is lost or damaged, and others have it open", str(path))
            rebuild(self.index, path, self.path / "blobs")
            self.rebuilt = True
        if alone:
            trust.note_open(path)

    def _readable(self) -> bool:
        try:
            self.index.used_bytes()
        except (FileNotFoundError, *DAMAGED) as error:
            log.debug("cache %s: its index cannot be read: %s", self.path, error)
            return False
        except TimeoutError:  # A process that was stopped is inside. What is kept can be read without the index.
            self._index_held = True
        return True

    def _used_bytes(self) -> int | None:
        return None if self._index_held else self.index.used_bytes()

    def _forget(self, swept: dict[Path, set[bytes]]) -> list[Path]:
        """Drop the rows without files that dead processes left. Return the folders of those that are done with.

        The index is waited for once: what it does not answer for now is left to the next process that opens the cache.
        """
        done: list[Path] = []
        if not self._index_held:
            with suppress(TimeoutError):
                for dead, digests in swept.items():
                    if all(map(self._forget_one, digests)):
                        done.append(dead)
        return done

    def _forget_one(self, digest: bytes) -> bool:
        """Drop the row of a blob that has no file. Return False where that cannot be told just now."""
        with self.locks.hold(digest, timeout=0) as alone:
            if not alone:  # It is being filled or evicted.
                return False
            if not self.path_of(digest).exists():
                self.index.drop(digest)
            return True


def _touch(path: Path) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _close(
    owner: int, path: Path, index: Index, scratch: StagingFolder, locks: KeyLocks, ended: threading.Event
) -> None:
    if os.getpid() != owner:
        return
    try:
        with suppress(OSError, lmdb.Error), locks.hold(_SETUP, CLOSE_SECONDS) as held:
            scratch.close()
            if held and not living(path / "tmp"):
                index.sync()
                step("close: synced")
                trust.note_closed(path / "index")
        scratch.close()
        index.shut()
    finally:
        ended.set()

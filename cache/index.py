"""The index of a local tier: which blobs are kept, how large, when last used, and the bytes they take in all."""

from __future__ import annotations

import errno
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from dataload.cache.forks import ForkAware
from dataload.cache.steps import step

MAP_BYTES = 64 << 30  # Address space, not disk: 300 million rows.
SMALL_MAP_BYTES = 1 << 30
READERS = 1000  # processes that may have it open at a time
_LOCK_BYTES = 128 << 10  # 64 a reader, and room to spare
_TABLES = (b"rows", b"order", b"accounts")
_ROW = struct.Struct(">QQ")  # bytes on disk, time of last use; the name follows
_STAMP = struct.Struct(">Q")

DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
"""What LMDB raises when its file is not what it wrote: damaged, or a new one where there was one with tables."""

Release = Callable[[bytes], bool]
"""Removes a blob's file; whether its row may go too. It may not while somebody is filling the blob."""


@dataclass(frozen=True)
class Row:
    """One blob of the index.

    size: bytes it takes on disk.
    used_at: when it was last used, in ns since the Unix epoch, up to the delay with which uses are written down.
    """

    digest: bytes
    name: str
    size: int
    used_at: int = field(default_factory=time.time_ns)


class Index(ForkAware):
    """Rows in LMDB, shared by all processes of a host.

    A row is written before its file appears and removed after its file is gone, so the index always covers at least
    what is on the disk: the sum of its sizes is the bound that the byte limit holds.

    Notes: a lookup takes 1-2 µs, a write transaction about 10 µs. One thread of a process is inside at a time. The
    environment is closed before every fork and opened again by whoever needs it, in parent and child (LMDB must not
    cross a fork, and a process must not open a path twice).

    Every method raises lmdb.Error, of the kinds `DAMAGED` when the index must be made anew, and OSError (ESTALE) once
    it is shut.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gate = threading.RLock()
        self._environment: Any = None
        self._file: tuple[int, int] | None = None
        self._shut = False
        super().__init__()

    def before_fork(self) -> None:
        self._gate.acquire()
        self.close()

    def after_fork_in_parent(self) -> None:
        self._gate.release()

    def after_fork_in_child(self) -> None:
        self._gate.release()

    def close(self) -> None:
        with self._gate:
            if self._environment is not None:
                self._environment.close()
                self._environment = None

    def shut(self) -> None:
        """Close it for good: whoever still uses it, in another thread, hears so."""
        with self._gate:
            self._shut = True
            self.close()

    def sync(self) -> None:
        """Have everything on the disk."""
        with self._transaction():
            self._environment.sync(True)

    def make(self) -> None:
        """Make the tables of a new index in an empty folder. Raises OSError when there is no room for it."""
        # LMDB writes to its lock file through a map: on a full disk that would be a SIGBUS.
        descriptor = os.open(self._path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _LOCK_BYTES)
        finally:
            os.close(descriptor)
        with self._gate:
            self.close()
            self._open(create=True)

    def check_place(self) -> None:
        """Raises OSError when the file this process has open is no longer the one that others find."""
        status = (self._path / "data.mdb").stat()
        with self._gate:
            if self._file not in (None, (status.st_dev, status.st_ino)):
                raise FileNotFoundError(errno.ENOENT, "the index was replaced", str(self._path))

    def size_of(self, digest: bytes) -> int | None:
        """Bytes on disk of a blob that has a row, else None."""
        with self._gate, self._ready().begin() as txn:
            row = txn.get(digest, db=self._rows)
        try:
            return None if row is None else _ROW.unpack_from(row)[0]
        except struct.error as error:
            raise _damage(error) from error

    def rows(self) -> list[Row]:
        """All rows, those used longest ago first; a snapshot."""
        with self._transaction() as txn:
            found = [self._row(txn, key[_STAMP.size :]) for key in txn.cursor(self._order).iternext(values=False)]
        return [row for row in found if row is not None]

    def used_bytes(self) -> int:
        with self._transaction() as txn:
            return self._used(txn)

    def owed_bytes(self) -> int:
        """What `used_bytes` is off from the sum of the rows; 0 when the accounts are right."""
        with self._transaction() as txn:
            return self._used(txn) - self._sum(txn)

    def balance(self) -> None:
        """Set the accounts right."""
        with self._transaction(write=True) as txn:
            self._set_used(txn, self._sum(txn))

    def enter(self, rows: Iterable[Row]) -> None:
        """Enter rows of files that are there, whatever the limit."""
        with self._transaction(write=True) as txn:
            for row in rows:
                self._drop(txn, row.digest)
                self._put(txn, row)

    def reserve(self, row: Row, *, limit: int, evict_before: Callable[[], int], release: Release) -> bool:
        """Enter a row in place of one it may have, first evicting as many others as `limit` (bytes) demands.

        False when it cannot fit; then it has none.

        evict_before: asked only when the cache is full: rows last used before this time (ns) may go.
        """
        with self._transaction(write=True) as txn:
            self._drop(txn, row.digest)
            used = self._used(txn)
            if used + row.size > limit:
                used = self._evict(txn, limit - row.size, evict_before(), release)
            if used + row.size > limit:
                return False
            self._put(txn, row)
            return True

    def evict(self, keep_bytes: int, release: Release) -> None:
        """Evict blobs, those used longest ago first, until at most `keep_bytes` remain."""
        with self._transaction(write=True) as txn:
            self._evict(txn, keep_bytes, time.time_ns(), release)

    def settled(self, check: Callable[[], bool]) -> bool:
        """What `check` finds while nobody enters, evicts or drops rows."""
        with self._transaction(write=True):
            return check()

    def drop(self, digest: bytes, unless: Callable[[], bool] = lambda: False) -> None:
        """Drop a row, if there is one. unless: asked while nobody enters, evicts or drops rows."""
        with self._transaction(write=True) as txn:
            if not unless():
                self._drop(txn, digest)

    def touch(self, digests: Iterable[bytes]) -> None:
        """Note that these blobs were used just now; those without a row are passed over."""
        with self._transaction(write=True) as txn:
            for digest in digests:
                row = self._row(txn, digest)
                if row is not None:
                    self._drop(txn, digest)
                    self._put(txn, Row(digest, row.name, row.size))

    def _evict(self, txn: Any, keep_bytes: int, evict_before: int, release: Release) -> int:
        """Evict down to `keep_bytes` if the rows last used before `evict_before` allow it; the bytes then in use."""
        used = self._used(txn)
        sizes = itertools.accumulate(row.size for row in self._oldest(txn, evict_before))
        if not any(used - size <= keep_bytes for size in sizes):
            return used
        released = []
        for row in self._oldest(txn, evict_before):
            if used <= keep_bytes:
                break
            # The file goes first. Killed before the commit, we leave a row that covers nothing, which is released like
            # any other; the other order would leave a file that nobody counts.
            if release(row.digest):
                step("evict: unlinked")
                released.append(row.digest)
                used -= row.size
        for digest in released:
            self._drop(txn, digest)
        step("evict: dropped")
        return used

    def _oldest(self, txn: Any, before: int) -> Iterator[Row]:
        """The rows last used before `before`, those used longest ago first."""
        for key in txn.cursor(self._order).iternext(values=False):
            row = self._row(txn, key[_STAMP.size :])
            if row is None or row.used_at >= before:
                return
            yield row

    def _row(self, txn: Any, digest: bytes) -> Row | None:
        value = txn.get(digest, db=self._rows)
        if value is None:
            return None
        size, used_at = _ROW.unpack_from(value)
        return Row(digest, value[_ROW.size :].decode(), size, used_at)

    def _put(self, txn: Any, row: Row) -> None:
        txn.put(row.digest, _ROW.pack(row.size, row.used_at) + row.name.encode(), db=self._rows)
        txn.put(_STAMP.pack(row.used_at) + row.digest, b"", db=self._order)
        self._set_used(txn, self._used(txn) + row.size)

    def _drop(self, txn: Any, digest: bytes) -> None:
        row = self._row(txn, digest)
        if row is not None:
            txn.delete(digest, db=self._rows)
            txn.delete(_STAMP.pack(row.used_at) + digest, db=self._order)
            self._set_used(txn, self._used(txn) - row.size)

    def _used(self, txn: Any) -> int:
        return int.from_bytes(txn.get(b"used", b"", db=self._accounts), "big")

    def _sum(self, txn: Any) -> int:
        return sum(_ROW.unpack_from(value)[0] for value in txn.cursor(self._rows).iternext(keys=False))

    def _set_used(self, txn: Any, used: int) -> None:
        txn.put(b"used", used.to_bytes(8, "big"), db=self._accounts)

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Any]:
        try:
            with self._gate, self._ready().begin(write=write) as txn:
                yield txn
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise _damage(error) from error

    def _ready(self) -> Any:
        if self._shut:
            raise OSError(errno.ESTALE, "the cache was closed", str(self._path))
        if self._environment is None:
            self._open()
        return self._environment

    def _open(self, *, create: bool = False) -> None:
        # sync=False survives the death of processes, not of the machine. lib_version: 3.x links two formats.
        options: dict[str, Any] = {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
        options |= {"max_dbs": len(_TABLES), "mode": 0o600, "sync": False, "max_readers": READERS, "create": False}
        if not create:
            (self._path / "data.mdb").stat()  # LMDB would make a new one.
        try:
            environment = lmdb.open(str(self._path), map_size=MAP_BYTES, **options)
        except lmdb.MemoryError:  # ulimit -v
            environment = lmdb.open(str(self._path), map_size=SMALL_MAP_BYTES, **options)
        try:
            environment.reader_check()
            self._fill_up((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])
            # Never made here but by `make`: a file that somebody removed would come back empty.
            self._rows, self._order, self._accounts = (environment.open_db(name, create=create) for name in _TABLES)
            status = (self._path / "data.mdb").stat()
        except (lmdb.Error, OSError):
            environment.close()
            raise
        self._environment = environment
        self._file = (status.st_dev, status.st_ino)

    def _fill_up(self, size: int) -> None:
        """Put zeros, which LMDB calls damage, where somebody cut the file short: to read past its end is a SIGBUS."""
        file = self._path / "data.mdb"
        if file.stat().st_size < size:
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)


def _damage(error: Exception) -> lmdb.CorruptedError:
    """Values that make no sense are damage of the index, which is then made anew."""
    return lmdb.CorruptedError(f"a value in the index makes no sense: {error}")

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
from dataclasses import dataclass, field, replace
from functools import partial
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
_USED, _PASSING = b"used", b"passing"  # accounts: bytes of all rows, and of those that pass through
_ROW = struct.Struct(">QQ")  # bytes on disk, stamp; the name follows
_STAMP = struct.Struct(">Q")
_KEPT = 1 << 63  # in a stamp, beside the time of last use: those that pass through come first in their order

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
    used_at: when it was last used, in ns since the Unix epoch, up to the delay with which uses are written down; of one
        that passes through, when it came.
    kept: whether it stays; else it passes through the region for what does not fit.
    """

    digest: bytes
    name: str
    size: int
    used_at: int = field(default_factory=time.time_ns)
    kept: bool = True

    @property
    def stamp(self) -> int:
        return self.used_at | _KEPT * self.kept


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

    def stay(self, digests: Iterable[bytes]) -> bool:
        """Whether all of these have a row, and stay."""
        with self._transaction() as txn:
            return all((row := self._row(txn, digest)) is not None and row.kept for digest in digests)

    def rows(self) -> list[Row]:
        """All rows, those used longest ago first; a snapshot."""
        with self._transaction() as txn:
            found = [self._row(txn, key[_STAMP.size :]) for key in txn.cursor(self._order).iternext(values=False)]
        return [row for row in found if row is not None]

    def used_bytes(self) -> int:
        with self._transaction() as txn:
            return self._account(txn, _USED)

    def owed_bytes(self) -> int:
        """What `used_bytes` is off from the sum of the rows; 0 when the accounts are right."""
        with self._transaction() as txn:
            return sum(abs(self._account(txn, name) - total) for name, total in self._sums(txn).items())

    def balance(self) -> None:
        """Set the accounts right."""
        with self._transaction(write=True) as txn:
            for name, total in self._sums(txn).items():
                self._set_account(txn, name, total)

    def enter(self, rows: Iterable[Row]) -> None:
        """Enter rows of files that are there, whatever the limit."""
        with self._transaction(write=True) as txn:
            for row in rows:
                self._drop(txn, row.digest)
                self._put(txn, row)

    def reserve(self, row: Row, *, limit: int, region: int, evict_before: Callable[[], int], release: Release) -> bool:
        """Enter a row in place of one it may have, first evicting as many others as `limit` (bytes) demands.

        False when it cannot fit; then it has none.

        region: of the limit, bytes that are not for those that stay. What cannot stay passes through there: it takes
            the place of whatever came there first.
        evict_before: asked only when the cache is full: those that stay, but were last used before this time (ns), may
            go.
        """
        with self._transaction(write=True) as txn:
            self._drop(txn, row.digest)
            used = self._account(txn, _USED) + row.size
            over, too_many = used - limit, used - self._account(txn, _PASSING) - (limit - region)
            if max(over, too_many) > 0:
                before = evict_before()
                if self._evict(txn, max(over, too_many), partial(self._kept, txn, before), release):
                    over, too_many = 0, 0
            rows = partial(self._all, txn, before) if over > 0 else None
            if region and too_many > row.size:  # What stays fills the region, too: somebody kept it who had none.
                rows = partial(self._kept, txn, time.time_ns())
            if over > 0 and rows and not self._evict(txn, over, rows, release):
                return False
            self._put(txn, replace(row, kept=too_many <= 0 or not region))
            return True

    def evict(self, keep_bytes: int, release: Release) -> None:
        """Evict blobs, those used longest ago first, until at most `keep_bytes` remain."""
        with self._transaction(write=True) as txn:
            over = self._account(txn, _USED) - keep_bytes
            self._evict(txn, over, partial(self._all, txn, time.time_ns()), release)

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
        """Note that these blobs were used just now; those without a row, and those passing through, are passed over."""
        with self._transaction(write=True) as txn:
            for digest in digests:
                row = self._row(txn, digest)
                if row is not None and row.kept:
                    self._drop(txn, digest)
                    self._put(txn, Row(digest, row.name, row.size))

    def _evict(self, txn: Any, over: int, rows: Callable[[], Iterator[Row]], release: Release) -> bool:
        """Evict some of these, in their order, so that `over` bytes are free; whether they are.

        None of them, when all would not do.
        """
        sizes = itertools.accumulate(row.size for row in rows())
        if over > 0 and not any(size >= over for size in sizes):
            return False
        released = []
        for row in rows():
            if over <= 0:
                break
            # The file goes first. Killed before the commit, we leave a row that covers nothing, which is released like
            # any other; the other order would leave a file that nobody counts.
            if release(row.digest):
                step("evict: unlinked")
                released.append(row.digest)
                over -= row.size
        for digest in released:
            self._drop(txn, digest)
        step("evict: dropped")
        return over <= 0

    def _all(self, txn: Any, before: int) -> Iterator[Row]:
        """The rows that may go: those that pass through, and of those that stay the ones last used before then."""
        yield from itertools.takewhile(lambda row: not row.kept, self._from(txn, 0))
        yield from self._kept(txn, before)

    def _kept(self, txn: Any, before: int) -> Iterator[Row]:
        """The rows that stay, but were last used before then; those used longest ago first."""
        return itertools.takewhile(lambda row: row.used_at < before, self._from(txn, _KEPT))

    def _from(self, txn: Any, stamp: int) -> Iterator[Row]:
        cursor = txn.cursor(self._order)
        if cursor.set_range(_STAMP.pack(stamp)):
            for key in cursor.iternext(values=False):
                row = self._row(txn, key[_STAMP.size :])
                if row is None:
                    return
                yield row

    def _row(self, txn: Any, digest: bytes) -> Row | None:
        value = txn.get(digest, db=self._rows)
        if value is None:
            return None
        size, stamp = _ROW.unpack_from(value)
        return Row(digest, value[_ROW.size :].decode(), size, stamp & ~_KEPT, bool(stamp & _KEPT))

    def _put(self, txn: Any, row: Row) -> None:
        txn.put(row.digest, _ROW.pack(row.size, row.stamp) + row.name.encode(), db=self._rows)
        txn.put(_STAMP.pack(row.stamp) + row.digest, b"", db=self._order)
        self._count(txn, row, row.size)

    def _drop(self, txn: Any, digest: bytes) -> None:
        row = self._row(txn, digest)
        if row is not None:
            txn.delete(digest, db=self._rows)
            txn.delete(_STAMP.pack(row.stamp) + digest, db=self._order)
            self._count(txn, row, -row.size)

    def _count(self, txn: Any, row: Row, size: int) -> None:
        for name in (_USED,) if row.kept else (_USED, _PASSING):
            self._set_account(txn, name, self._account(txn, name) + size)

    def _account(self, txn: Any, name: bytes) -> int:
        return int.from_bytes(txn.get(name, b"", db=self._accounts), "big")

    def _set_account(self, txn: Any, name: bytes, total: int) -> None:
        txn.put(name, total.to_bytes(8, "big"), db=self._accounts)

    def _sums(self, txn: Any) -> dict[bytes, int]:
        """What the accounts should say."""
        sums = {_USED: 0, _PASSING: 0}
        for size, stamp in (_ROW.unpack_from(value) for value in txn.cursor(self._rows).iternext(keys=False)):
            sums[_USED] += size
            sums[_PASSING] += 0 if stamp & _KEPT else size
        return sums

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

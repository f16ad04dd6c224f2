"""The index of a local tier: which blobs are kept, how large, when last used, and the bytes they take in all."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from dataload.cache.local.key_locks import FIRST_WAIT, LONGEST_WAIT, set_lock
from dataload.runtime.forks import ForkAware

MAP_BYTES = 64 << 30  # Address space, not disk: 300 million rows.
SMALL_MAP_BYTES = 1 << 30
LOCK_SECONDS = 2.0  # A transaction takes milliseconds; a process that holds the lock for longer has been stopped.
BATCH_ROWS = 256  # at most, in one transaction
SUM_ATTEMPTS = 3
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


class Shortage(NamedTuple):
    """Bytes that are missing to admit a row; 0 or less: none.

    total: under the limit. staying: under the part of the limit that is for rows that stay.
    """

    total: int
    staying: int


class Index(ForkAware):
    """Rows in LMDB, shared by all processes of a host, also by processes of different containers.

    A row is written before its file appears and removed after its file is gone, so the index always covers at least
    what is on the disk: the sum of its sizes is the bound that the byte limit holds.

    LMDB's own locks exclude processes with equal process numbers (it locks the byte at offset PID), so LMDB is opened
    without them. Every transaction, reading or writing, holds one open-file-description lock on LMDB's file instead. A
    transaction handles at most `BATCH_ROWS` rows and touches no other file, so the lock is held for milliseconds.

    Args:
        path: The folder of LMDB's file.

    Notes:
        A lookup takes 5 us, a write transaction 15 us. One thread of a process is inside at a time. The file is
        closed before every fork and opened again on use, in parent and child. A caller that enters or drops a row holds
        the lock of its key.

    Every method raises TimeoutError when another process holds the lock for `LOCK_SECONDS` (it has been stopped),
    lmdb.Error, of the kinds `DAMAGED` when the index must be made anew, and OSError (ESTALE) once it is shut.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gate = threading.RLock()
        self._environment: Any = None
        self._descriptor: int | None = None  # of LMDB's file, for the lock
        self._file: tuple[int, int] | None = None
        self._shut = False
        super().__init__()

    def before_fork(self) -> None:
        self._gate.acquire()
        self.close()  # lmdb does not close in a child what its parent opened.

    def after_fork_in_parent(self) -> None:
        self._gate.release()

    def after_fork_in_child(self) -> None:
        self._gate.release()

    def close(self) -> None:
        with self._gate:
            if self._environment is not None:
                self._environment.close()
                self._environment = None
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

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
        with self._gate:
            self.close()
            with self._transaction(create=True):
                pass

    def check_place(self) -> None:
        """Raises OSError when the file this process has open is no longer the one that others find."""
        status = (self._path / "data.mdb").stat()
        with self._gate:
            if self._file not in (None, (status.st_dev, status.st_ino)):
                raise FileNotFoundError(errno.ENOENT, "the index was replaced", str(self._path))

    def size_of(self, digest: bytes) -> int | None:
        """Bytes on disk of a blob that has a row, else None."""
        with self._transaction() as txn:
            row = txn.get(digest, db=self._rows)
            return None if row is None else _ROW.unpack_from(row)[0]

    def stay(self, digests: Iterable[bytes]) -> bool:
        """Whether all of these have a row, and stay."""
        with self._transaction() as txn:
            return all((row := self._row(txn, digest)) is not None and row.kept for digest in digests)

    def rows(self) -> list[Row]:
        """Return all rows, the least recently used first. A row that changes meanwhile may be missing or outdated."""
        return list({row.digest: row for row in self._scan(0)}.values())

    def staying(self, before: int) -> Iterator[Row]:
        """Yield the rows that stay but were last used before a time (ns), the least recently used first."""
        return itertools.takewhile(lambda row: row.used_at < before, self._scan(_KEPT))

    def evictable(self, before: int) -> Iterator[Row]:
        """Yield the rows that pass through, the oldest first, and then those of `staying`."""
        yield from itertools.takewhile(lambda row: not row.kept, self._scan(0))
        yield from self.staying(before)

    def used_bytes(self) -> int:
        with self._transaction() as txn:
            return self._account(txn, _USED)

    def owed_bytes(self) -> int:
        """What the accounts are off from the sums of the rows; 0 also when the rows change too fast to be added up."""
        sums, txnid = self._sums()
        with self._transaction() as txn:
            if txn.id() != txnid:
                return 0
            return sum(abs(self._account(txn, name) - total) for name, total in sums.items())

    def balance(self) -> None:
        """Set the accounts right, unless the rows change too fast to be added up."""
        sums, txnid = self._sums()
        with self._transaction(write=True) as txn:
            if txn.id() == txnid + 1:
                for name, total in sums.items():
                    self._set_account(txn, name, total)

    def enter(self, rows: Iterable[Row]) -> None:
        """Enter rows of files that are there, whatever the limit."""
        for some in _batches(rows):
            with self._transaction(write=True) as txn:
                for row in some:
                    self._drop(txn, row.digest)
                    self._put(txn, row)

    def admit(self, row: Row, *, limit: int, region: int, may_pass: bool) -> Shortage | None:
        """Enter a row in place of one it may have, if it fits. Return None, or else what is missing; then it has none.

        Args:
            row: The row to enter.
            limit: Most bytes of all rows.
            region: Bytes of the limit that are for rows that pass through.
            may_pass: Whether to enter it as one that passes through when it cannot stay.
        """
        with self._transaction(write=True) as txn:
            self._drop(txn, row.digest)
            used = self._account(txn, _USED) + row.size
            missing = Shortage(used - limit, used - self._account(txn, _PASSING) - (limit - region))
            if missing.total > 0 or (missing.staying > 0 and not may_pass):
                return missing
            self._put(txn, replace(row, kept=missing.staying <= 0))
            return None

    def drop(self, *digests: bytes, timeout: float = LOCK_SECONDS) -> int:
        """Drop the rows that there are of these, at most `BATCH_ROWS`. Return the bytes that they stood for."""
        with self._transaction(write=True, timeout=timeout) as txn:
            return sum(self._drop(txn, digest) for digest in digests)

    def touch(self, digests: Iterable[bytes], timeout: float = LOCK_SECONDS) -> list[bytes]:
        """Note that these blobs were used just now, unless they pass through. Return those that have no row."""
        strays = []
        for some in _batches(digests):
            with self._transaction(write=True, timeout=timeout) as txn:
                for digest in some:
                    row = self._row(txn, digest)
                    if row is None:
                        strays.append(digest)
                    elif row.kept:
                        self._drop(txn, digest)
                        self._put(txn, Row(digest, row.name, row.size))
        return strays

    def _scan(self, stamp: int) -> Iterator[Row]:
        """Yield the rows from a stamp on, in the order of their stamps, read in short transactions."""
        start, count = _STAMP.pack(stamp), 8
        while True:
            with self._transaction() as txn:
                cursor = txn.cursor(self._order)
                found = cursor.set_range(start)
                keys = list(itertools.islice(cursor.iternext(values=False), count)) if found else []
                rows = [self._row(txn, key[_STAMP.size :]) for key in keys]
            if not keys:
                return
            yield from (row for row in rows if row is not None)
            start, count = keys[-1] + b"\0", min(2 * count, BATCH_ROWS)

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

    def _drop(self, txn: Any, digest: bytes) -> int:
        row = self._row(txn, digest)
        if row is None:
            return 0
        txn.delete(digest, db=self._rows)
        txn.delete(_STAMP.pack(row.stamp) + digest, db=self._order)
        self._count(txn, row, -row.size)
        return row.size

    def _count(self, txn: Any, row: Row, size: int) -> None:
        for name in (_USED,) if row.kept else (_USED, _PASSING):
            self._set_account(txn, name, self._account(txn, name) + size)

    def _account(self, txn: Any, name: bytes) -> int:
        return int.from_bytes(txn.get(name, b"", db=self._accounts), "big")

    def _set_account(self, txn: Any, name: bytes, total: int) -> None:
        txn.put(name, total.to_bytes(8, "big"), db=self._accounts)

    def _sums(self) -> tuple[dict[bytes, int], int]:
        """Return what the accounts should say, and the number of the transaction after which they should."""
        for _ in range(SUM_ATTEMPTS):
            with self._transaction() as txn:
                txnid = txn.id()
            sums = {_USED: 0, _PASSING: 0}
            for row in self._scan(0):
                sums[_USED] += row.size
                sums[_PASSING] += 0 if row.kept else row.size
            with self._transaction() as txn:
                if txn.id() == txnid:
                    return sums, txnid
        return {}, -1

    @contextmanager
    def _transaction(
        self, *, write: bool = False, create: bool = False, timeout: float = LOCK_SECONDS
    ) -> Iterator[Any]:
        deadline, wait = time.monotonic() + timeout, FIRST_WAIT
        while True:
            with self._gate:
                descriptor = self._lock_file(create=create)
                try:
                    if set_lock(descriptor, 0, fcntl.F_WRLCK):
                        with self._ready(create=create).begin(write=write) as txn:
                            yield txn
                        return
                except (struct.error, UnicodeDecodeError, OverflowError) as error:
                    raise _damage(error) from error
                finally:  # Also after a Ctrl-C between the lock and the transaction.
                    if self._descriptor == descriptor:  # else closed, and unlocked by that
                        set_lock(descriptor, 0, fcntl.F_UNLCK)
            if time.monotonic() >= deadline:
                reason = f"another process has held the index for {timeout:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(self._path))
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _lock_file(self, *, create: bool) -> int:
        """Return a descriptor of LMDB's file, which is never made here but by `make`."""
        if self._shut:
            raise OSError(errno.ESTALE, "the cache was closed", str(self._path))
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT * create
            self._descriptor = os.open(self._path / "data.mdb", flags, 0o600)
        return self._descriptor

    def _ready(self, *, create: bool) -> Any:
        """Return the environment, opened if need be. The lock is held."""
        if self._environment is None:
            try:
                self._open(create=create)
            except (lmdb.Error, OSError):
                self.close()  # The next one finds the file that is there then.
                raise
        return self._environment

    def _open(self, *, create: bool) -> None:
        # sync=False survives the death of processes, not of the machine. lib_version: 3.x links two formats.
        options: dict[str, Any] = {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
        options |= {"max_dbs": len(_TABLES), "mode": 0o600, "sync": False, "lock": False, "create": False}
        opened = os.fstat(self._lock_file(create=create))
        try:
            environment = lmdb.open(str(self._path), map_size=MAP_BYTES, **options)
        except lmdb.MemoryError:  # ulimit -v
            environment = lmdb.open(str(self._path), map_size=SMALL_MAP_BYTES, **options)
        try:
            self._fill_up((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])
            # Never made here but by `make`: a file that somebody removed would come back empty.
            self._rows, self._order, self._accounts = (environment.open_db(name, create=create) for name in _TABLES)
            self._file = (opened.st_dev, opened.st_ino)
            self.check_place()  # The file that is locked is the one that LMDB has open.
        except (lmdb.Error, OSError):
            environment.close()
            raise
        self._environment = environment

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


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(items)
    while some := list(itertools.islice(remaining, BATCH_ROWS)):
        yield some

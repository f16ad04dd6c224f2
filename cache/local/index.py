"""The index of a local tier: cached blobs, their sizes, their times of last use, and the bytes used in total."""

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

MAP_BYTES = 64 << 30  # address space, not disk; enough for 300 million rows
SMALL_MAP_BYTES = 1 << 30
LOCK_SECONDS = 2.0  # A transaction takes milliseconds. A process that holds the lock for longer was stopped.
BATCH_ROWS = 256  # most rows of one transaction
SUM_ATTEMPTS = 3
_TABLES = (b"rows", b"order", b"accounts")
_USED, _TRANSIENT = b"used", b"passing"  # accounts: bytes of all rows, and of transient rows
_ROW = struct.Struct(">QQ")  # bytes on disk, stamp; followed by the name
_STAMP = struct.Struct(">Q")
_PINNED = 1 << 63  # the bit of a pinned row in its stamp, above the time: transient rows sort first

DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
"""Errors of LMDB for a file that is damaged, or that was replaced by an empty one."""


@dataclass(frozen=True)
class Row:
    """One blob of the index.

    Attributes:
        digest: Digest of the blob's key.
        name: Name of the blob.
        size: Bytes on disk.
        used_at: Time of last use in ns since the Unix epoch, accurate to the delay of batched writes. For a transient
            row, the time of its admission.
        pinned: Whether the blob is pinned. Otherwise it is transient, in the region for blobs that do not fit.
    """

    digest: bytes
    name: str
    size: int
    used_at: int = field(default_factory=time.time_ns)
    pinned: bool = True

    @property
    def stamp(self) -> int:
        """The position of the row in the eviction order."""
        return self.used_at | _PINNED * self.pinned


class Shortage(NamedTuple):
    """Bytes that must be freed to admit a row; 0 or less: none.

    Attributes:
        total: Bytes over the limit.
        pinned: Bytes over the part of the limit that is for pinned rows.
    """

    total: int
    pinned: int


class Index(ForkAware):
    """Rows in LMDB, shared by all processes of a host, across containers too.

    A row is written before its file appears and removed after its file. So the index always covers every file on disk,
    and the byte limit is enforced on the sum of the sizes in the index.

    LMDB's own locks fail for processes with equal process numbers (it locks the byte at offset PID), so LMDB is opened
    without them. Every transaction, read or write, holds one open-file-description lock on LMDB's file instead. A
    transaction handles at most `BATCH_ROWS` rows and touches no other file, so the lock is held for milliseconds.

    One thread of a process is in a transaction at a time. The file is closed before every fork, and parent and child
    reopen it on use. A lookup takes 5 us, a write transaction 15 us. A caller that enters or drops a row holds the lock
    of its key.

    Args:
        path: The folder of LMDB's file.

    Raises:
        TimeoutError: Any method: another process holds the lock for `LOCK_SECONDS`, so it was probably stopped.
        lmdb.Error: Any method; one of `DAMAGED` if the index must be rebuilt.
        OSError: Any method: ESTALE after `shut`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gate = threading.RLock()
        self._environment: Any = None
        self._descriptor: int | None = None  # of LMDB's file; holds the lock
        self._file: tuple[int, int] | None = None  # device and inode
        self._shut = False
        super().__init__()

    def before_fork(self) -> None:
        self._gate.acquire()
        self.close()  # In a child, lmdb does not close an environment of the parent.

    def after_fork_in_parent(self) -> None:
        self._gate.release()

    def after_fork_in_child(self) -> None:
        self._gate.release()

    def close(self) -> None:
        """Close the file; the next use reopens it."""
        with self._gate:
            if self._environment is not None:
                self._environment.close()
                self._environment = None
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def shut(self) -> None:
        """Close the index for good: later uses, in any thread, raise OSError (ESTALE)."""
        with self._gate:
            self._shut = True
            self.close()

    def sync(self) -> None:
        """Write all changes to disk."""
        with self._transaction():
            self._environment.sync(True)

    def make(self) -> None:
        """Create the tables of a new index in an empty folder.

        Raises:
            OSError: The disk is full.
        """
        with self._gate:
            self.close()
            with self._transaction(create=True):
                pass

    def check_place(self) -> None:
        """Check that the file that this process has open is still the one at the path.

        Raises:
            OSError: The file was replaced or removed.
        """
        status = (self._path / "data.mdb").stat()
        with self._gate:
            if self._file not in (None, (status.st_dev, status.st_ino)):
                raise FileNotFoundError(errno.ENOENT, "the index was replaced", str(self._path))

    def size_of(self, digest: bytes) -> int | None:
        """Return the bytes on disk of a blob, or None if it has no row."""
        with self._transaction() as txn:
            row = txn.get(digest, db=self._rows)
            return None if row is None else _ROW.unpack_from(row)[0]

    def stay(self, digests: Iterable[bytes]) -> bool:
        """Return whether all of these have a row and are pinned."""
        with self._transaction() as txn:
            return all((row := self._row(txn, digest)) is not None and row.pinned for digest in digests)

    def rows(self) -> list[Row]:
        """Return all rows, least recently used first. A row that changes meanwhile may be missing or outdated."""
        return list({row.digest: row for row in self._scan(0)}.values())

    def pinned(self, before: int) -> Iterator[Row]:
        """Yield the pinned rows last used before a time (ns), least recently used first."""
        return itertools.takewhile(lambda row: row.used_at < before, self._scan(_PINNED))

    def evictable(self, before: int) -> Iterator[Row]:
        """Yield the transient rows, oldest first, and then the rows of `pinned`."""
        yield from itertools.takewhile(lambda row: not row.pinned, self._scan(0))
        yield from self.pinned(before)

    def used_bytes(self) -> int:
        """Return the bytes of all rows."""
        with self._transaction() as txn:
            return self._account(txn, _USED)

    def owed_bytes(self) -> int:
        """Return the difference in bytes between the accounts and the sums of the rows.

        The result is 0 if the rows change too fast to be summed.
        """
        sums, txnid = self._sums()
        with self._transaction() as txn:
            if txn.id() != txnid:
                return 0
            return sum(abs(self._account(txn, name) - total) for name, total in sums.items())

    def balance(self) -> None:
        """Correct the accounts, unless the rows change too fast to be summed."""
        sums, txnid = self._sums()
        with self._transaction(write=True) as txn:
            if txn.id() == txnid + 1:
                for name, total in sums.items():
                    self._set_account(txn, name, total)

    def enter(self, rows: Iterable[Row]) -> None:
        """Enter rows of existing files, whatever the limit."""
        for batch in _batches(rows):
            with self._transaction(write=True) as txn:
                for row in batch:
                    self._drop(txn, row.digest)
                    self._put(txn, row)

    def admit(self, row: Row, *, limit: int, region: int, allow_transient: bool) -> Shortage | None:
        """Enter or replace a row if it fits. Otherwise drop the old row and return the shortage.

        Args:
            row: The row to enter.
            limit: Most bytes of all rows.
            region: Bytes of the limit that are for transient rows.
            allow_transient: Whether to enter the row as transient if it cannot be pinned.
        """
        with self._transaction(write=True) as txn:
            self._drop(txn, row.digest)
            used = self._account(txn, _USED) + row.size
            missing = Shortage(used - limit, used - self._account(txn, _TRANSIENT) - (limit - region))
            if missing.total > 0 or (missing.pinned > 0 and not allow_transient):
                return missing
            self._put(txn, replace(row, pinned=missing.pinned <= 0))
            return None

    def drop(self, *digests: bytes, timeout: float = LOCK_SECONDS) -> int:
        """Drop at most `BATCH_ROWS` rows; missing ones are skipped. Return the bytes of the dropped rows."""
        with self._transaction(write=True, timeout=timeout) as txn:
            return sum(self._drop(txn, digest) for digest in digests)

    def touch(self, digests: Iterable[bytes], timeout: float = LOCK_SECONDS) -> list[bytes]:
        """Set the time of last use of pinned blobs to now. Return the digests that have no row."""
        strays = []
        for batch in _batches(digests):
            with self._transaction(write=True, timeout=timeout) as txn:
                for digest in batch:
                    row = self._row(txn, digest)
                    if row is None:
                        strays.append(digest)
                    elif row.pinned:
                        self._drop(txn, digest)
                        self._put(txn, Row(digest, row.name, row.size))
        return strays

    def _scan(self, stamp: int) -> Iterator[Row]:
        """Yield the rows from a stamp on, in stamp order, read in short transactions."""
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
        return Row(digest, value[_ROW.size :].decode(), size, stamp & ~_PINNED, bool(stamp & _PINNED))

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
        for name in (_USED,) if row.pinned else (_USED, _TRANSIENT):
            self._set_account(txn, name, self._account(txn, name) + size)

    def _account(self, txn: Any, name: bytes) -> int:
        return int.from_bytes(txn.get(name, b"", db=self._accounts), "big")

    def _set_account(self, txn: Any, name: bytes, total: int) -> None:
        txn.put(name, total.to_bytes(8, "big"), db=self._accounts)

    def _sums(self) -> tuple[dict[bytes, int], int]:
        """Return the correct accounts, and the ID of the transaction at which they are correct."""
        for _ in range(SUM_ATTEMPTS):
            with self._transaction() as txn:
                txnid = txn.id()
            sums = {_USED: 0, _TRANSIENT: 0}
            for row in self._scan(0):
                sums[_USED] += row.size
                sums[_TRANSIENT] += 0 if row.pinned else row.size
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
                    if self._descriptor == descriptor:  # Otherwise it was closed, which released the lock.
                        set_lock(descriptor, 0, fcntl.F_UNLCK)
            if time.monotonic() >= deadline:
                reason = f"another process has held the index for {timeout:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(self._path))
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _lock_file(self, *, create: bool) -> int:
        """Return a descriptor of LMDB's file. Only `make` creates the file."""
        if self._shut:
            raise OSError(errno.ESTALE, "the cache was closed", str(self._path))
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT * create
            self._descriptor = os.open(self._path / "data.mdb", flags, 0o600)
        return self._descriptor

    def _ready(self, *, create: bool) -> Any:
        """Return the environment, opened on first use. The caller holds the lock."""
        if self._environment is None:
            try:
                self._open(create=create)
            except (lmdb.Error, OSError):
                self.close()  # The next transaction opens the file that is at the path then.
                raise
        return self._environment

    def _open(self, *, create: bool) -> None:
        # sync=False is safe for crashes of processes, not of the machine. lib_version: 3.x links two formats.
        options: dict[str, Any] = {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
        options |= {"max_dbs": len(_TABLES), "mode": 0o600, "sync": False, "lock": False, "create": False}
        opened = os.fstat(self._lock_file(create=create))
        try:
            environment = lmdb.open(str(self._path), map_size=MAP_BYTES, **options)
        except lmdb.MemoryError:  # ulimit -v
            environment = lmdb.open(str(self._path), map_size=SMALL_MAP_BYTES, **options)
        try:
            self._fill_up((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])
            # Only `make` creates tables: a removed file must not come back as an empty index.
            self._rows, self._order, self._accounts = (environment.open_db(name, create=create) for name in _TABLES)
            self._file = (opened.st_dev, opened.st_ino)
            self.check_place()  # The locked file must be the one that LMDB has open.
        except (lmdb.Error, OSError):
            environment.close()
            raise
        self._environment = environment

    def _fill_up(self, size: int) -> None:
        """Extend a truncated file with zeros, which LMDB reports as damage; a read past its end is a SIGBUS."""
        file = self._path / "data.mdb"
        if file.stat().st_size < size:
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)


def _damage(error: Exception) -> lmdb.CorruptedError:
    return lmdb.CorruptedError(f"the index holds an invalid value: {error}")


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(items)
    while some := list(itertools.islice(remaining, BATCH_ROWS)):
        yield some

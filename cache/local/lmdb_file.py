"""LMDB without its own locks: short transactions that exclude each other among all processes of a host."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from dataload.cache.local.key_locks import attempts, set_lock
from dataload.cache.local.staging import users
from dataload.runtime.forks import ForkAware

MAP_BYTES = 64 << 30  # address space, not disk; enough for 300 million rows
SMALL_MAP_BYTES = 1 << 30
FULL_BYTES = 64 << 10  # A disk with less free space is full.
LOCK_SECONDS = 2.0  # A transaction takes milliseconds. A process that holds the lock for longer was stopped.

DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
"""Errors of LMDB for a file that is damaged, or that was replaced by an empty one."""


class LmdbFile(ForkAware):
    """Tables in LMDB, shared by all processes of a host, across containers too.

    LMDB's own locks fail for processes with equal process numbers (it locks the byte at offset PID), so LMDB is opened
    without them. Every transaction, read or write, holds one open-file-description lock on LMDB's file instead.
    Transactions are short and touch no other file, so the lock is held for milliseconds.

    One thread of a process is in a transaction at a time. The file is closed before every fork, and parent and child
    reopen it on use.

    Args:
        path: The folder of LMDB's file.
        tables: Names of the tables.

    Raises:
        TimeoutError: Any method: another process holds the lock for `LOCK_SECONDS`, so it was probably stopped.
        lmdb.Error: Any method; one of `DAMAGED` if the file must be rebuilt.
        OSError: Any method: ESTALE after `shut`, ENOSPC on a full disk or quota.
    """

    def __init__(self, path: Path, tables: tuple[bytes, ...]) -> None:
        self._path = path
        self._file_path = str(path / "data.mdb")
        self._names = tables
        self._tables: dict[bytes, Any] = {}
        self._gate = threading.RLock()
        self._environment: Any = None
        self._descriptor: int | None = None  # of LMDB's file; holds the lock
        self._file: tuple[int, int] | None = None  # device and inode
        self._file_bytes = 0  # at the last transaction
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

    def shut(self, *, sync: bool = False) -> None:
        """Close the file for good: later uses, in any thread, raise OSError (ESTALE).

        Args:
            sync: First write all changes to disk. No thread changes anything in between.
        """
        with self._gate:
            try:
                if sync:
                    self.sync()
            finally:
                self._shut = True
                self.close()

    def sync(self) -> None:
        """Write all changes to disk."""
        with self._transaction():
            self._environment.sync(True)

    def make(self) -> None:
        """Create the tables in an empty folder.

        Raises:
            OSError: The disk is full.
        """
        with self._gate:
            self.close()
            with self._transaction(create=True):
                pass

    def check_not_replaced(self) -> None:
        """Check that the file that this process has open is still the one at the path.

        Raises:
            OSError: The file was replaced or removed.
        """
        status = os.stat(self._file_path)  # noqa: PTH116 (a tenth of the time of a Path)
        with self._gate:
            if self._file not in (None, (status.st_dev, status.st_ino)):
                raise FileNotFoundError(errno.ENOENT, "the index was replaced", str(self._path))

    @contextmanager
    def _transaction(
        self, *, write: bool = False, create: bool = False, timeout: float = LOCK_SECONDS
    ) -> Iterator[Any]:
        for _ in attempts(time.monotonic() + timeout):
            with self._gate:
                descriptor = self._lock_file(create=create)
                try:
                    if set_lock(descriptor, 0, fcntl.F_WRLCK):
                        self._check_not_cut(descriptor)
                        with self._ready(create=create).begin(write=write) as txn:
                            yield txn
                        return
                except lmdb.Error as error:
                    if self._lacks_space(error):
                        raise OSError(errno.ENOSPC, f"no space for the index: {error}", str(self._path)) from error
                    raise
                except (struct.error, ValueError, OverflowError) as error:
                    raise lmdb.CorruptedError(f"the index holds an invalid value: {error}") from error
                finally:  # Also after a Ctrl-C between the lock and the transaction.
                    if self._descriptor == descriptor:  # Otherwise it was closed, which released the lock.
                        set_lock(descriptor, 0, fcntl.F_UNLCK)
        holders = f"; {users(self._path.parent)}" if timeout else ""  # It takes longer than a transaction.
        reason = f"another process has held the index for {timeout:g} s{holders}"
        raise TimeoutError(errno.ETIMEDOUT, reason, str(self._path))

    def _check_not_cut(self, descriptor: int) -> None:
        """Raise lmdb.CorruptedError if the file has become shorter: a read past its end would be a SIGBUS."""
        size = os.fstat(descriptor).st_size
        if size < self._file_bytes and self._environment is not None:
            self.close()  # The next one to open the file extends it, see `_fill_up`.
            raise lmdb.CorruptedError(f"the index was cut from {self._file_bytes} bytes to {size}")
        self._file_bytes = size

    def _lacks_space(self, error: lmdb.Error) -> bool:
        """Return whether a full disk or quota caused an error. LMDB calls a short write an input/output error."""
        if type(error) is lmdb.Error:  # py-lmdb has no class for a full quota, and gives no error number.
            return os.strerror(errno.EDQUOT) in str(error) or shutil.disk_usage(self._path).free < FULL_BYTES
        return isinstance(error, lmdb.DiskError)

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
        options |= {"max_dbs": len(self._names), "mode": 0o600, "sync": False, "lock": False, "create": False}
        opened = os.fstat(self._lock_file(create=create))
        try:
            environment = lmdb.open(os.fsencode(self._path), map_size=MAP_BYTES, **options)
        except lmdb.MemoryError:  # ulimit -v
            environment = lmdb.open(os.fsencode(self._path), map_size=SMALL_MAP_BYTES, **options)
        try:
            self._fill_up((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])
            # Only `make` creates tables: a removed file must not come back as an empty index.
            self._tables = {name: environment.open_db(name, create=create) for name in self._names}
            self._file = (opened.st_dev, opened.st_ino)
            self.check_not_replaced()  # The locked file must be the one that LMDB has open.
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

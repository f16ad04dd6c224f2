"""The index of a local tier: which blobs are kept, how large, when last used, and the bytes they take in all."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lmdb

from dataload.cache.forks import ForkAware

MAP_BYTES = 64 << 30  # Address space, not disk: 300 million rows.
SMALL_MAP_BYTES = 1 << 30
_ROW = struct.Struct(">QQ")  # bytes on disk, time of last use; the name follows
_STAMP = struct.Struct(">Q")

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
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._gate = threading.RLock()
        self._environment: Any = None
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

    def size_of(self, digest: bytes) -> int | None:
        """Bytes on disk of a blob that has a row, else None."""
        with self._transaction() as txn:
            row = txn.get(digest, db=self._rows)
        return None if row is None else _ROW.unpack_from(row)[0]

    def rows(self) -> list[Row]:
        """All rows, those used longest ago first; a snapshot."""
        with self._transaction() as txn:
            found = [self._row(txn, key[_STAMP.size :]) for key in txn.cursor(self._order).iternext(values=False)]
        return [row for row in found if row is not None]

    def used_bytes(self) -> int:
        with self._transaction() as txn:
            return self._used(txn)

    def reserve(self, row: Row, *, limit: int, evict_before: Callable[[], int], release: Release) -> bool:
        """Enter a row, first evicting as many others as `limit` (bytes) demands; False when it cannot fit.

        evict_before: asked only when the cache is full: rows last used before this time (ns) may go.
        """
        with self._transaction(write=True) as txn:
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

    def drop(self, digest: bytes) -> None:
        with self._transaction(write=True) as txn:
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
                released.append(row.digest)
                used -= row.size
        for digest in released:
            self._drop(txn, digest)
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

    def _set_used(self, txn: Any, used: int) -> None:
        txn.put(b"used", used.to_bytes(8, "big"), db=self._accounts)

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Any]:
        with self._gate:
            if self._environment is None:
                self._open()
            with self._environment.begin(write=write) as txn:
                yield txn

    def _open(self) -> None:
        # sync=False survives the death of processes, not of the machine. lib_version: 3.x links two formats.
        options: dict[str, Any] = {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
        options |= {"max_dbs": 3, "mode": 0o600, "sync": False}
        try:
            environment = lmdb.open(self._path, map_size=MAP_BYTES, **options)
        except lmdb.MemoryError:  # ulimit -v
            environment = lmdb.open(self._path, map_size=SMALL_MAP_BYTES, **options)
        try:
            environment.reader_check()
            self._rows, self._order, self._accounts = map(environment.open_db, (b"rows", b"order", b"accounts"))
        except lmdb.Error:
            environment.close()
            raise
        self._environment = environment

"""The index of a local tier: cached blobs, their sizes, their times of last use, and the bytes used in total."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dataload.cache.local.lmdb_file import LOCK_SECONDS, LmdbFile
from dataload.cache.tier import group_number

BATCH_ROWS = 256  # most rows of one transaction
SUM_ATTEMPTS = 3
_ROWS, _ORDER, _ACCOUNTS = b"rows", b"order", b"accounts"  # tables
_USED, _TRANSIENT = b"used", b"passing"  # accounts: bytes of all rows, and of transient rows
_LAST_USE = b"last use"  # account: the latest time of use, in ns
_ROW = struct.Struct(">QQ")  # bytes on disk, stamp; followed by the name
_STAMP = struct.Struct(">Q")
AFTER_ALL = 1 << 63  # a time in ns after all uses
_PINNED = 1 << 63  # the bit of a pinned row in its stamp, above the time: transient rows sort first


@dataclass(frozen=True)
class Row:
    """One blob of the index.

    Attributes:
        digest: Digest of the blob's key.
        name: Name of the blob.
        size: Bytes on disk.
        used_at: Time of last use in ns since the Unix epoch, accurate to the delay of batched writes. For a transient
            row, the time of its admission. The index sets it, and it never runs back, as the clock may.
        pinned: Whether the blob is pinned. Otherwise it is transient, in the region for blobs that do not fit.
    """

    digest: bytes
    name: str
    size: int
    used_at: int = 0
    pinned: bool = True

    @property
    def group(self) -> int:
        """Number of the blob's group, see `group_number`."""
        return group_number(self.digest)

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

    @classmethod
    def of(cls, size: int, *, used: int, transient: int, limit: int, region: int) -> Shortage:
        """Return the shortage for a row of `size` bytes, by the bytes in use and those of transient rows."""
        return cls(used + size - limit, used + size - transient - (limit - region))


class RowExistsError(Exception):
    """The blob to admit has a row already."""


class Index(LmdbFile):
    """One row for each blob, and the sums of their sizes, shared by all processes of a host.

    A row is written before its file appears and removed after its file. So the index always covers every file on disk,
    and the byte limit is enforced on the sum of the sizes in the index.

    A transaction handles at most `BATCH_ROWS` rows. A lookup takes 5 us, a write transaction 15 us. A caller that
    enters or drops a row holds the lock of its key.

    Args:
        path: The folder of LMDB's file.

    Raises:
        TimeoutError: As for `LmdbFile`.
        lmdb.Error: As for `LmdbFile`.
        OSError: As for `LmdbFile`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, (_ROWS, _ORDER, _ACCOUNTS))
        self._started = 0

    def start(self) -> int:
        """Return the time now, in ns. It is later than all uses so far, and earlier than those of this process."""
        self._started = time.time_ns()
        with suppress(TimeoutError), self._transaction() as txn:  # A stopped process holds the index.
            self._started = max(self._started, self._account(txn, _LAST_USE) + 1)
        return self._started

    def size_of(self, digest: bytes) -> int | None:
        """Return the bytes on disk of a blob, or None if it has no row."""
        with self._transaction() as txn:
            row = txn.get(digest, db=self._tables[_ROWS])
            return None if row is None else _ROW.unpack_from(row)[0]

    def all_pinned(self, digests: Iterable[bytes]) -> bool:
        """Return whether all of these have a row and are pinned."""
        with self._transaction() as txn:
            return all((row := self._row(txn, digest)) is not None and row.pinned for digest in digests)

    def rows(self) -> list[Row]:
        """Return all rows, least recently used first. A row that changes meanwhile may be missing or outdated."""
        return list({row.digest: row for row in self._scan(0)}.values())

    def pinned(self, before: int = AFTER_ALL) -> Iterator[Row]:
        """Yield the pinned rows, or those last used before a time (ns), least recently used first."""
        return itertools.takewhile(lambda row: row.used_at < before, self._scan(_PINNED))

    def transient(self) -> Iterator[Row]:
        """Yield the transient rows, in the order of their admission."""
        return itertools.takewhile(lambda row: not row.pinned, self._scan(0))

    def used_bytes(self) -> int:
        """Return the bytes of all rows."""
        with self._transaction() as txn:
            return self._account(txn, _USED)

    def shortage(self, size: int, *, limit: int, region: int) -> Shortage:
        """Return the bytes that must be freed now to admit a row of `size` bytes, see `admit`."""
        with self._transaction() as txn:
            return self._shortage(txn, size, limit=limit, region=region)

    def owed_bytes(self, *, repair: bool = False) -> int:
        """Return the difference in bytes between the accounts and the sums of the rows.

        The result is 0 if the rows change too fast to be summed.

        Args:
            repair: Correct the accounts.
        """
        for _ in range(SUM_ATTEMPTS):
            with self._transaction() as txn:
                before = txn.id()
            sums = {_USED: 0, _TRANSIENT: 0}
            for row in self._scan(0):
                sums[_USED] += row.size
                sums[_TRANSIENT] += 0 if row.pinned else row.size
            with self._transaction(write=repair) as txn:
                if txn.id() == (before + 1 if repair else before):  # A write gets the next ID.
                    owed = sum(abs(self._account(txn, name) - total) for name, total in sums.items())
                    for name, total in sums.items() if repair else ():
                        self._set_account(txn, name, total)
                    return owed
        return 0

    def enter(self, rows: Iterable[Row]) -> None:
        """Enter rows of existing files, whatever the limit."""
        for batch in _batches(rows):
            with self._transaction(write=True) as txn:
                for row in batch:
                    self._drop(txn, row.digest)
                    self._put(txn, row)

    def admit(self, row: Row, *, limit: int, region: int, allow_transient: bool) -> Shortage | None:
        """Enter a row if it fits. Otherwise return the shortage.

        Args:
            row: The row to enter, pinned.
            limit: Most bytes of all rows.
            region: Bytes of the limit that are for transient rows.
            allow_transient: Whether to enter the row as transient if it cannot be pinned.

        Raises:
            RowExistsError: The blob has a row, which accounts for files of an earlier writer.
        """
        with self._transaction(write=True) as txn:
            if txn.get(row.digest, db=self._tables[_ROWS]) is not None:
                raise RowExistsError(row.name)
            missing = self._shortage(txn, row.size, limit=limit, region=region)
            if missing.total > 0 or (missing.pinned > 0 and not allow_transient):
                return missing
            # The time is of this transaction: no older row appears after a younger one.
            self._put(txn, replace(row, pinned=missing.pinned <= 0, used_at=self._now(txn)))
            return None

    def admit_all(self, rows: Sequence[Row], *, limit: int, region: int) -> bool:
        """Enter at most `BATCH_ROWS` rows if all of them are new and can be pinned. Otherwise enter none of them.

        Returns:
            Whether the rows were entered. If not, `admit` tells what is missing for each.
        """
        size = sum(row.size for row in rows)
        with self._transaction(write=True) as txn:
            missing = self._shortage(txn, size, limit=limit, region=region)
            if max(missing) > 0 or any(txn.get(row.digest, db=self._tables[_ROWS]) is not None for row in rows):
                return False
            now = self._now(txn)
            for row in rows:
                self._put_row(txn, replace(row, used_at=now))
            self._count(txn, size)
            return True

    def drop(self, *digests: bytes, timeout: float = LOCK_SECONDS) -> int:
        """Drop at most `BATCH_ROWS` rows; missing ones are skipped. Return the bytes of the dropped rows."""
        with self._transaction(write=True, timeout=timeout) as txn:
            return sum(self._drop(txn, digest) for digest in digests)

    def touch(self, digests: Iterable[bytes], timeout: float = LOCK_SECONDS) -> None:
        """Set the time of last use of pinned blobs to now."""
        for batch in _batches(digests):
            with self._transaction(write=True, timeout=timeout) as txn:
                now = self._now(txn)
                for digest in batch:
                    row = self._row(txn, digest)
                    if row is not None and row.pinned:
                        self._drop(txn, digest)
                        self._put(txn, replace(row, used_at=now))

    def _shortage(self, txn: Any, size: int, *, limit: int, region: int) -> Shortage:
        used, transient = self._account(txn, _USED), self._account(txn, _TRANSIENT)
        return Shortage.of(size, used=used, transient=transient, limit=limit, region=region)

    def _scan(self, stamp: int) -> Iterator[Row]:
        """Yield the rows from a stamp on, in stamp order, read in short transactions."""
        start, count = _STAMP.pack(stamp), 8
        while True:
            with self._transaction() as txn:
                cursor = txn.cursor(self._tables[_ORDER])
                found = cursor.set_range(start)
                keys = list(itertools.islice(cursor.iternext(values=False), count)) if found else []
                rows = [self._row(txn, key[_STAMP.size :]) for key in keys]
            if not keys:
                return
            yield from (row for row in rows if row is not None)
            start, count = keys[-1] + b"\0", min(2 * count, BATCH_ROWS)

    def _row(self, txn: Any, digest: bytes) -> Row | None:
        value = txn.get(digest, db=self._tables[_ROWS])
        if value is None:
            return None
        size, stamp = _ROW.unpack_from(value)
        return Row(digest, value[_ROW.size :].decode(), size, stamp & ~_PINNED, bool(stamp & _PINNED))

    def _put(self, txn: Any, row: Row) -> None:
        self._put_row(txn, row)
        self._count(txn, row.size, pinned=row.pinned)

    def _put_row(self, txn: Any, row: Row) -> None:
        """Enter a row without counting its bytes."""
        txn.put(row.digest, _ROW.pack(row.size, row.stamp) + row.name.encode(), db=self._tables[_ROWS])
        txn.put(_STAMP.pack(row.stamp) + row.digest, b"", db=self._tables[_ORDER])

    def _drop(self, txn: Any, digest: bytes) -> int:
        row = self._row(txn, digest)
        if row is None:
            return 0
        txn.delete(digest, db=self._tables[_ROWS])
        txn.delete(_STAMP.pack(row.stamp) + digest, db=self._tables[_ORDER])
        self._count(txn, -row.size, pinned=row.pinned)
        return row.size

    def _now(self, txn: Any) -> int:
        """Return the time of a use in this transaction, in ns. The clock may have been set back."""
        now = max(time.time_ns(), self._account(txn, _LAST_USE) + 1, self._started)
        self._set_account(txn, _LAST_USE, now)
        return now

    def _count(self, txn: Any, size: int, *, pinned: bool = True) -> None:
        for name in (_USED,) if pinned else (_USED, _TRANSIENT):
            self._set_account(txn, name, self._account(txn, name) + size)

    def _account(self, txn: Any, name: bytes) -> int:
        return int.from_bytes(txn.get(name, b"", db=self._tables[_ACCOUNTS]), "big")

    def _set_account(self, txn: Any, name: bytes, total: int) -> None:
        txn.put(name, total.to_bytes(8, "big"), db=self._tables[_ACCOUNTS])


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(items)
    while some := list(itertools.islice(remaining, BATCH_ROWS)):
        yield some

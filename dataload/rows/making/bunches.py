"""Makes many small row groups at once: one reservation of memory, concurrent requests, one index transaction."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from dataload.cache.blocks.reader import cancel_if_failed
from dataload.cache.buffer_pool import blob_buffers
from dataload.cache.tier import BlobKey, BulkTier, Draft
from dataload.errors import DamagedError, DataError, DataloadError
from dataload.formats.base import SHARED_BYTES, TINY_BYTES, RowGroupReader
from dataload.rows import row_block
from dataload.rows.columns import Column, Dense, Ragged, rows_of
from dataload.rows.making.compute_lock import computing
from dataload.rows.making.row_group_maker import DECODED_COPIES, INLINE_BYTES
from dataload.rows.row_group_life import Lives, RowGroupLife, State
from dataload.runtime.counters import charged_to
from dataload.telemetry.wait_timeline import doing

if TYPE_CHECKING:
    from dataload.rows.row_group_cache import RowGroupCache
    from dataload.rows.row_groups import RowGroups

MOST_ROWS = 16384  # of a row group with values of varying size, which footers may hide
POOLED_BYTES = 128 << 10  # of a blob; malloc keeps less without a map of its own
CACHED_AT_ONCE = 8 << 20  # bytes of blobs
LATE_SECONDS = 0.2  # Row groups whose bytes come later do not hold up the others of their bunch.


Made = list[memoryview] | Exception | None
"""The blobs of a row group, or why it cannot be made. None: it has to be loaded alone."""


class Member:
    """A row group of a bunch.

    Args:
        blobs: The cached row groups of its dataset.
        number: Its number in the dataset.
        life: Its life in this process.

    Attributes:
        group: Its place in a file.
        key: The key of its only blob.
        opened: Holds it open until it is decoded.
        lock: Releases its lock, if this process makes it.
        reader: Decodes it.
        table: Its rows, if it is decoded together with others.
        made: Its blob, or why it cannot be made. None: not yet, or not in this bunch.
        num_bytes: Bytes of memory that making it takes.
    """

    reader: RowGroupReader

    def __init__(self, blobs: RowGroupCache, number: int, life: RowGroupLife) -> None:
        self.blobs, self.number, self.life = blobs, number, life
        self.group = blobs.manifest.row_groups[number]
        self.key = blobs.keys(number)[0]
        self.opened, self.lock = ExitStack(), ExitStack()
        self.table: pa.Table | None = None
        self.made: Made = None
        self.num_bytes = blobs.maker.decoding_bytes(number) + self.group.bytes

    @property
    def is_fetched(self) -> bool:
        """Whether all its bytes are there, or it cannot be made."""
        return self.made is not None or all(fetch.done() for fetch in self.reader.fetches)

    @property
    def tier(self) -> BulkTier:
        """The cache of its blob, as its dataset opened it."""
        tier = self.blobs.blocks.tier.bulk
        assert tier is not None
        return tier

    def read(self) -> pa.Table:
        """Return its rows, once it is fetched."""
        with self.opened:
            self.reader.wait()
            self.life.account.add(decoded=1)
            [table] = self.reader.tables(self.group.rows)
            return table

    def decoded(self) -> dict[str, Column]:
        """Return its columns, once it is fetched."""
        table = self.read() if self.table is None else self.table
        self.table = None
        return self.blobs.maker.decoded_table(table, self.number, self.group.rows)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep an error of the block, which concerns this row group alone."""
        try:
            with charged_to(self.life.account):
                yield
        except Exception as error:  # noqa: BLE001 (raised where the row group is awaited)
            self.made = error


class _PooledDraft(Draft):
    """A blob in memory, which is used again if the blob is not tiny and is cached. See `Draft`."""

    def __init__(self, key: BlobKey) -> None:
        super().__init__(key)
        self.size = 0
        self._buffer: mmap.mmap | None = None

    def memory_for(self, size: int) -> memoryview:
        self.size = size
        if size < POOLED_BYTES:
            return super().memory_for(size)
        try:
            self._buffer = blob_buffers.take(size)
        except OSError:  # The process has too many memory maps.
            return super().memory_for(size)
        return memoryview(self._buffer)[:size]

    def give_back(self) -> None:
        """Let other blobs use the memory, unless a view of it remains because the blob is not cached."""
        self.payload = None
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            blob_buffers.give_back(buffer)


def bunched_bytes(blobs: RowGroupCache, number: int) -> int:
    """Return the bytes that a row group takes in a bunch, or 0 if it is to be made alone. Arguments: see `Member`."""
    plan, group, maker = blobs.plan, blobs.manifest.row_groups[number], blobs.maker
    most_rows = int(plan.blob_rows[number])
    if plan.layout.ragged:
        most_rows = min(most_rows, MOST_ROWS)
    if (
        blobs.blocks.tier.bulk is None
        or blobs.is_mapped
        or not 0 < group.rows <= most_rows
        or group.bytes > INLINE_BYTES
        or (size := maker.decoding_bytes(number)) > DECODED_COPIES * INLINE_BYTES
        or _shares_blocks(blobs, number)
    ):
        return 0
    return size + group.bytes


def _shares_blocks(blobs: RowGroupCache, number: int) -> bool:
    """Return whether a row group of a remote file shares cached blocks with its neighbours. It waits for these."""
    groups = blobs.manifest.row_groups
    if blobs.blocks.origin.is_local or groups[number].bytes >= SHARED_BYTES:
        return False
    around = groups[max(0, number - 1) : number + 2]
    return sum(group.file == groups[number].file for group in around) > 1


def make_together(members: Sequence[Member], late: Callable[[], None]) -> Iterator[Member]:
    """Make row groups that are not cached, each with a blob of its own. Yield each once it is `made` or found.

    They may be of several datasets in one cache, whose makers share one memory. The blobs have the same values
    as those that `RowGroupCache.load` makes. Row groups that another process makes now, and others that are to be
    loaded alone, are yielded without a blob.

    Args:
        members: The row groups.
        late: Called when nothing has arrived for a while. Row groups that still wait keep this thread and their memory.

    Raises:
        ReservationCancelled: All lives were cancelled before the memory was reserved.
    """
    size = sum(member.num_bytes for member in members)
    with (
        members[0].blobs.memory.hold(size, lambda: all(member.life.is_cancelled() for member in members)) as give_back,
        members[0].tier.lock_together([member.blobs.lock_key(member.number) for member in members]) as locked,
        ExitStack() as stack,
    ):
        missing = []
        for member, lock in zip(members, locked, strict=True):
            if lock is not None and _is_missing(member):
                missing.append(member)
                member.lock = lock
                continue
            if lock is not None:
                lock.close()
            give_back(member.num_bytes)
            yield member
        for member in missing:
            stack.callback(member.opened.close)
            _open(member)
        while missing:
            fetches = [fetch for member in missing if member.made is None for fetch in member.reader.fetches]
            with doing("origin"):
                wait(fetches, LATE_SECONDS)
            for member in missing:
                if member.made is None:
                    cancel_if_failed(member.reader.fetches)
            fetched = [member for member in missing if member.is_fetched]
            missing = [member for member in missing if member not in fetched]
            for member in _made(fetched):
                member.lock.close()  # Another process may wait for it.
                give_back(member.num_bytes)
                yield member
            if missing and not fetched:
                late()


def load_together(row_groups: RowGroups, lives: Lives, late: Callable[[], None]) -> Iterator[tuple[int, Made]]:
    """Yield row groups with their blobs, their error, or None. See `make_together`."""
    by_cache: dict[tuple[str, int], dict[Member, int]] = {}
    for group, life in lives.items():
        cache, number = row_groups.of(group)
        by_cache.setdefault((cache.tier.location, cache.tier.limit), {})[Member(cache, number, life)] = group
    for groups in by_cache.values():
        try:
            for member in make_together([*groups], late):
                yield groups.pop(member), member.made
        except Exception as error:  # noqa: BLE001 (raised where the row groups of this cache are awaited)
            for group in groups.values():
                yield group, error


def _is_missing(member: Member) -> bool:
    """Return whether a row group must be fetched, and can be fetched at the same time as others.

    The blob of a cached one is noted.
    """
    number, group, blobs = member.number, member.group, member.blobs
    try:
        is_open_at_once = blobs.maker.footer(group).opens_at_once(group.number, member.blobs.blocks)
    except DataloadError:  # It concerns this row group alone. The thread that loads it by itself raises it.
        return False
    if not is_open_at_once or not blobs.plan.stored(group):
        return False
    with doing("disk"), charged_to(member.life.account):
        member.made = blobs.get_all([member.key])
        if member.made is not None:
            member.life.hit()
            return False
        return blobs.columns_of_wider(number) is None


def _open(member: Member) -> None:
    """Start to fetch a row group."""
    member.life.enter(State.FETCHING)
    with member.catching():
        group, columns = member.group, member.blobs.plan.stored(member.group)
        opening = member.blobs.maker.footer(group).open_row_group(
            group.file, group.number, columns, member.blobs.blocks, member.blobs.memory.held.total
        )
        member.reader = member.opened.enter_context(opening)


def _made(members: Sequence[Member]) -> Iterator[Member]:
    """Decode and cache row groups that are fetched. Yield each."""
    with computing(), doing("decode"):
        for member in members:
            if member.made is None:
                member.life.enter(State.DECODING)
        together = _decoded_together([member for member in members if member.made is None])
    packed: list[tuple[Member, _PooledDraft]] = []
    for member in members:
        if member.made is None:
            with member.catching(), computing(), doing("decode"):
                packed.append((member, _pack(member, together.get(member) or member.decoded())))
        if isinstance(member.made, DamagedError):  # Loaded alone, it is fetched again.
            member.made = None
            member.life.enter(State.PLANNED)
            yield member
        elif member.made is not None:
            yield member
        elif sum(draft.size for _, draft in packed) >= CACHED_AT_ONCE:
            yield from _cached(packed)
            packed = []
    yield from _cached(packed)


def _cached(packed: Sequence[tuple[Member, _PooledDraft]]) -> Iterator[Member]:
    """Cache the blob of each row group. The tier of its own dataset does it, and counts the miss. Yield each."""
    with computing():
        for tier in dict.fromkeys(member.tier for member, _ in packed):
            own = [(member, draft) for member, draft in packed if member.tier == tier]
            found = tier.put_together([(member.key, draft.publish()) for member, draft in own])
            for (member, draft), blob in zip(own, found, strict=True):
                with member.catching():
                    member.made = [blob]
                    member.life.enter(State.CACHED)
                    draft.give_back()
                    member.blobs.note_kept(member.number, [blob])
                    member.blobs.discard_source_blocks(member.number)
    yield from (member for member, _ in packed)


def _pack(member: Member, columns: dict[str, Column]) -> _PooledDraft:
    draft, layout = _PooledDraft(member.key), member.blobs.plan.layout
    row_block.pack(columns, member.group.rows, layout, member.key.digest, member.group.name, draft.allocate)
    member.blobs.maker.note_size(member.number, draft.size)
    return draft


def _is_joinable(members: Sequence[Member]) -> bool:
    """Return whether decoding row groups as one table gives the same blobs as decoding each alone."""
    return (
        # Files have dictionaries of text of their own.
        all(field.kind in ("dense", "mask", "list") for field in members[0].blobs.plan.layout.fields)
        and len({(member.blobs.plan.digest, member.group.constants) for member in members}) == 1
    )


def _decoded_together(members: Sequence[Member]) -> Mapping[Member, dict[str, Column]]:
    """Return the columns of those row groups that are decoded as one table, which takes less time if they are tiny."""
    plans = ((member, member.blobs.plan) for member in members)
    tiny = [
        member
        for member, plan in plans
        if plan.bytes_of(member.number) <= TINY_BYTES and not plan.zeroes_nulls(member.number)
    ]
    if len(tiny) < 2 or not _is_joinable(tiny):
        return {}
    for member in tiny:
        with member.catching():
            member.table = member.read()
    read = [(member, member.table) for member in tiny if member.table is not None]
    if not read or any(member.group.rows != len(table) for member, table in read):
        return {}
    first = read[0][0]
    try:
        table = pa.concat_tables([table for _, table in read])
        columns = first.blobs.maker.decoded_table(table, first.number, len(table), where="small row groups")
    except (DataError, pa.ArrowException):  # One has nulls, or their schemas differ: decode each alone.
        return {}
    starts = list(accumulate((member.group.rows for member, _ in read), initial=0))
    return {
        member: {name: _rows_of(column, start, stop) for name, column in columns.items()}
        for (member, _), (start, stop) in zip(read, pairwise(starts), strict=True)
    }


def _rows_of(column: Column, start: int, stop: int) -> Column:
    assert isinstance(column, Dense | Ragged)
    return rows_of(column, start, stop)

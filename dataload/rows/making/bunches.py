"""Makes many small row groups at once: one reservation of memory, concurrent requests, one index transaction."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from dataload.cache.buffer_pool import blob_buffers
from dataload.cache.tier import BlobKey, BulkTier, Draft
from dataload.errors import DataError, DataloadError
from dataload.formats.base import RowGroupReader
from dataload.rows import row_block
from dataload.rows.columns import Column, Dense, Ragged, rows_of
from dataload.rows.making.row_group_maker import DECODED_COPIES, INLINE_BYTES
from dataload.rows.row_group_life import RowGroupLife, State
from dataload.runtime.baton import computing
from dataload.runtime.counters import charged_to
from dataload.telemetry.wait_timeline import doing

if TYPE_CHECKING:
    from dataload.rows.row_group_cache import RowGroupCache

MOST_ROWS = 16384  # of a row group with values of varying size, which footers may hide
JOINED_BYTES = 64 << 10  # of the records of a row group; decoding more takes longer than joining them saves
POOLED_BYTES = 128 << 10  # of a blob; malloc keeps less without a map of its own


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
        reader: Decodes it.
        table: Its rows, if it is decoded together with others.
        made: Its blob, or why it cannot be made. None: another process makes it, or it should be made by itself.
    """

    reader: RowGroupReader

    def __init__(self, blobs: RowGroupCache, number: int, life: RowGroupLife) -> None:
        self.blobs, self.number, self.life = blobs, number, life
        self.group = blobs.manifest.row_groups[number]
        self.key = blobs.keys(number)[0]
        self.opened = ExitStack()
        self.table: pa.Table | None = None
        self.made: list[memoryview] | Exception | None = None

    @property
    def tier(self) -> BulkTier:
        """The cache of its blob, as its dataset opened it."""
        tier = self.blobs.blocks.tier.bulk
        assert tier is not None
        return tier

    def read(self) -> pa.Table:
        """Return its rows, once it is fetched."""
        with self.opened:
            self.life.account.add(decoded=1)
            [table] = self.reader.tables(self.group.rows)
            return table

    def decoded(self) -> dict[str, Column]:
        """Return its columns, once it is fetched."""
        table = self.read() if self.table is None else self.table
        self.table = None
        return self.blobs.maker.decoded_table(table, self.group.rows, self.group)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep an error of the block, which concerns this row group alone."""
        try:
            with charged_to(self.life.account):
                yield
        except Exception as error:  # noqa: BLE001 (raised where the row group is awaited)
            self.made = error


class _PooledDraft(Draft):
    """A blob in memory that is used again. See `Draft`."""

    def __init__(self, key: BlobKey) -> None:
        super().__init__(key)
        self._buffer: mmap.mmap | None = None

    def memory_for(self, size: int) -> memoryview:
        if size < POOLED_BYTES:
            return super().memory_for(size)
        self._buffer = blob_buffers.take(size)
        return memoryview(self._buffer)[:size]

    def give_back(self) -> None:
        """Let other blobs use the memory, unless a view of it remains because the blob is not cached."""
        self.payload = None
        if self._buffer is not None:
            blob_buffers.give_back(self._buffer)


def bunched_bytes(blobs: RowGroupCache, number: int) -> int:
    """Return the bytes that a row group takes in a bunch, or 0 if it is too large. Arguments are those of `Member`."""
    plan, group = blobs.plan, blobs.manifest.row_groups[number]
    most_rows = int(plan.blob_rows[number])
    if plan.layout.ragged:
        most_rows = min(most_rows, MOST_ROWS)
    is_worth_it = (
        blobs.blocks.tier.bulk is not None
        and not blobs.is_mapped
        and 0 < group.rows <= most_rows
        and group.bytes <= INLINE_BYTES
        and plan.bytes_of(number) <= INLINE_BYTES
    )
    return DECODED_COPIES * plan.bytes_of(number) + group.bytes if is_worth_it else 0


def make_together(members: Sequence[Member]) -> None:
    """Make row groups that are not cached, each with a blob of its own, and set what is `made` of each.

    They may be of several datasets in one cache, whose makers share one memory. The blobs have the same values
    as those that `RowGroupCache.load` makes.

    Raises:
        ReservationCancelled: All lives were cancelled before the memory was reserved.
    """
    tier = members[0].tier
    size = sum(bunched_bytes(member.blobs, member.number) for member in members)
    with (
        members[0].blobs.memory.hold(size, lambda: all(member.life.is_cancelled() for member in members)),
        tier.lock_together([member.blobs.lock_key(member.number) for member in members]) as locked,
    ):
        free = [member for member, is_locked in zip(members, locked, strict=True) if is_locked]
        missing = [member for member in free if _is_missing(member)]
        with ExitStack() as stack:
            for member in missing:
                stack.callback(member.opened.close)
                _open(member)
            _wait(missing)
            with computing():
                _cache(_packed(missing))
    for member in missing:
        if isinstance(member.made, list):
            with member.catching():
                member.blobs.discard_source_blocks(member.number)


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
            member.life.enter(State.CACHED)
            return False
        return blobs.columns_of_wider(number) is None


def _open(member: Member) -> None:
    """Start to fetch a row group."""
    member.life.enter(State.FETCHING)
    with member.catching():
        group, columns = member.group, member.blobs.plan.stored(member.group)
        opening = member.blobs.maker.footer(group).open_row_group(
            group.file, group.number, columns, member.blobs.blocks, member.group.bytes
        )
        member.reader = member.opened.enter_context(opening)


def _wait(members: Sequence[Member]) -> None:
    """Wait until the row groups that are open are fetched."""
    for member in reversed(members):  # The last request usually ends last, so this thread waits once.
        if member.made is None:
            with member.catching():
                member.reader.wait()


def _packed(members: Sequence[Member]) -> list[tuple[Member, _PooledDraft]]:
    """Decode the row groups that are fetched. Return the blob of each that can be decoded."""
    packed = []
    with doing("decode"):
        for member in members:
            member.life.enter(State.DECODING)
        together = _decoded_together([member for member in members if member.made is None])
        for member in members:
            if member.made is None:
                with member.catching():
                    columns = together.get(member) or member.decoded()
                    packed.append((member, _pack(member, columns)))
    return packed


def _cache(packed: Sequence[tuple[Member, _PooledDraft]]) -> None:
    """Cache the blob of each row group. The tier of its own dataset does it, and counts the miss."""
    for tier in dict.fromkeys(member.tier for member, _ in packed):
        own = [(member, draft) for member, draft in packed if member.tier == tier]
        found = tier.put_together([(member.key, draft.publish()) for member, draft in own])
        for (member, draft), blob in zip(own, found, strict=True):
            member.made = [blob]
            member.life.enter(State.CACHED)
            draft.give_back()


def _pack(member: Member, columns: dict[str, Column]) -> _PooledDraft:
    draft, layout = _PooledDraft(member.key), member.blobs.plan.layout
    row_block.pack(columns, member.group.rows, layout, member.group.name, draft.allocate)
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
    tiny = [member for member in members if member.blobs.plan.bytes_of(member.number) <= JOINED_BYTES]
    if len(tiny) < 2 or not _is_joinable(tiny):
        return {}
    for member in tiny:
        with member.catching():
            member.table = member.read()
    read = [(member, member.table) for member in tiny if member.table is not None]
    if not read or any(member.group.rows != len(table) for member, table in read):
        return {}
    first, maker = read[0][0].group, read[0][0].blobs.maker
    try:
        table = pa.concat_tables([table for _, table in read])
        columns = maker.decoded_table(table, len(table), first, "small row groups")
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

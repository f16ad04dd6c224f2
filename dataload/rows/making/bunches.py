"""Makes many small row groups at once: one reservation, concurrent requests, one decoding, one index transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from dataload.cache.tier import BulkTier, Draft
from dataload.errors import DataError, DataloadError
from dataload.formats.base import SHARED_BYTES, RowGroupReader
from dataload.rows import row_block
from dataload.rows.columns import Column, Dense, Ragged, rows_of
from dataload.rows.making.row_group_maker import DECODED_COPIES
from dataload.rows.row_group_life import RowGroupLife, State
from dataload.runtime.baton import computing
from dataload.runtime.counters import charged_to
from dataload.telemetry.wait_timeline import doing

if TYPE_CHECKING:
    from dataload.rows.row_group_cache import RowGroupCache

MOST_ROWS = 4096  # Footers may hide the size of values.
MOST_BYTES = 64 << 10  # of the records of a row group; decoding more takes longer than all that a bunch saves


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
        table: Its rows.
        made: Its blob, or why it cannot be made. None: another process makes it, or it should be made by itself.
    """

    reader: RowGroupReader
    table: pa.Table

    def __init__(self, blobs: RowGroupCache, number: int, life: RowGroupLife) -> None:
        self.blobs, self.number, self.life = blobs, number, life
        self.group = blobs.manifest.row_groups[number]
        self.key = blobs.keys(number)[0]
        self.opened = ExitStack()
        self.made: list[memoryview] | Exception | None = None

    @property
    def tier(self) -> BulkTier:
        """The cache of its blob, as its dataset opened it."""
        tier = self.blobs.blocks.tier.bulk
        assert tier is not None
        return tier

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that making it takes."""
        return DECODED_COPIES * self.blobs.bytes_of(self.number) + self.group.bytes

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep an error of the block, which concerns this row group alone."""
        try:
            with charged_to(self.life.account):
                yield
        except Exception as error:  # noqa: BLE001 (raised where the row group is awaited)
            self.made = error


def is_small(blobs: RowGroupCache, number: int) -> bool:
    """Return whether a row group is so small that it is worth a bunch. Arguments are those of `Member`."""
    plan, group = blobs.plan, blobs.manifest.row_groups[number]
    return (
        blobs.blocks.tier.bulk is not None
        and not blobs.is_mapped
        and 0 < group.rows <= min(MOST_ROWS, int(plan.blob_rows[number]))
        and group.bytes < SHARED_BYTES
        and plan.bytes_of(number) <= MOST_BYTES
    )


def make_together(members: Sequence[Member]) -> None:
    """Make row groups that are not cached, each with a blob of its own, and set what is `made` of each.

    They may be of several datasets in one cache, whose makers share one memory. The blobs have the same values
    as those that `RowGroupCache.load` makes.

    Raises:
        ReservationCancelled: All lives were cancelled before the memory was reserved.
    """
    tier = members[0].tier
    size = sum(member.reserved_bytes for member in members)
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
            group.file, group.number, columns, member.blobs.blocks, SHARED_BYTES
        )
        member.reader = member.opened.enter_context(opening)


def _wait(members: Sequence[Member]) -> None:
    """Wait until the row groups that are open are fetched."""
    for member in reversed(members):  # The last request usually ends last, so this thread waits once.
        if member.made is None:
            with member.catching():
                member.reader.wait()


def _packed(members: Sequence[Member]) -> list[tuple[Member, memoryview]]:
    """Decode the row groups that are fetched. Return the blob of each that can be decoded."""
    for member in members:
        if member.made is None:
            with member.catching(), member.opened:
                member.life.account.add(decoded=1)
                with doing("decode"):
                    [member.table] = member.reader.tables(member.group.rows)
    for member in members:
        member.life.enter(State.DECODING)
    readable, packed = [member for member in members if member.made is None], []
    with doing("decode"):
        every = _decoded_together(readable) if len(readable) > 1 else None
        for position, member in enumerate(readable):
            with member.catching():
                columns = every[position] if every else _decoded(member)
                packed.append((member, _pack(member, columns)))
    return packed


def _decoded(member: Member) -> dict[str, Column]:
    return member.blobs.maker.decoded_table(member.table, member.group.rows, member.group)


def _cache(packed: Sequence[tuple[Member, memoryview]]) -> None:
    """Cache the blob of each row group. The tier of its own dataset does it, and counts the miss."""
    for tier in dict.fromkeys(member.tier for member, _ in packed):
        own = [(member, blob) for member, blob in packed if member.tier == tier]
        found = tier.put_together([(member.key, blob) for member, blob in own])
        for (member, _), blob in zip(own, found, strict=True):
            member.made = [blob]
            member.life.enter(State.CACHED)


def _pack(member: Member, columns: dict[str, Column]) -> memoryview:
    draft, layout = Draft(member.key), member.blobs.plan.layout
    row_block.pack(columns, member.group.rows, layout, member.group.name, draft.allocate)
    return draft.publish()


def _is_joinable(members: Sequence[Member]) -> bool:
    """Return whether decoding row groups as one table gives the same blobs as decoding each alone."""
    return (
        # Files have dictionaries of text of their own.
        all(field.kind in ("dense", "mask", "list") for field in members[0].blobs.plan.layout.fields)
        and len({(member.blobs.plan.digest, member.group.constants) for member in members}) == 1
        and all(member.group.rows == len(member.table) for member in members)
    )


def _decoded_together(members: Sequence[Member]) -> list[dict[str, Column]] | None:
    """Return the columns of each row group, decoded as one table. Return None if each needs its own decoding."""
    if not _is_joinable(members):
        return None
    first, maker = members[0].group, members[0].blobs.maker
    try:
        table = pa.concat_tables([member.table for member in members])
        columns = maker.decoded_table(table, len(table), first, "small row groups")
    except (DataError, pa.ArrowException):  # One has nulls, or their schemas differ: decode each alone.
        return None
    starts = list(accumulate((member.group.rows for member in members), initial=0))
    return [
        {name: _rows_of(column, start, stop) for name, column in columns.items()} for start, stop in pairwise(starts)
    ]


def _rows_of(column: Column, start: int, stop: int) -> Column:
    assert isinstance(column, Dense | Ragged)
    return rows_of(column, start, stop)

"""Makes many small row groups at once: one reservation, concurrent requests, one decoding, one index transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks
from dataload.cache.tier import BlobKey, Draft
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import DataError, DataloadError
from dataload.formats.base import SHARED_BYTES, RowGroupReader
from dataload.rows import row_block
from dataload.rows.columns import Column, Dense, Ragged, rows_of
from dataload.rows.row_group_life import RowGroupLife, State
from dataload.rows.row_group_maker import DECODED_COPIES, location
from dataload.runtime.cached_property import cached_property
from dataload.runtime.counters import charged_to
from dataload.telemetry.wait_timeline import doing

if TYPE_CHECKING:
    from dataload.rows.row_group_cache import RowGroupCache

MOST_ROWS = 4096  # Footers may hide the size of values.
MOST_BYTES = 64 << 10  # of the records of a row group; decoding more takes longer than all that a bunch saves


class _Member:
    """A row group of a bunch.

    Attributes:
        number: The row group.
        group: Its place in the file.
        key: The key of its only blob.
        life: Its life in this process.
        opened: Holds it open until it is decoded.
        reader: Decodes it.
        table: Its rows.
        made: Its blob, or why it cannot be made.
    """

    reader: RowGroupReader
    table: pa.Table

    def __init__(self, number: int, group: RowGroup, key: BlobKey, life: RowGroupLife) -> None:
        self.number, self.group, self.key, self.life = number, group, key, life
        self.opened = ExitStack()
        self.made: list[memoryview] | Exception | None = None

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep an error of the block, which concerns this row group alone."""
        try:
            with charged_to(self.life.account):
                yield
        except Exception as error:  # noqa: BLE001 (raised where the row group is awaited)
            self.made = error


class BunchMaker:
    """A maker of many small row groups of a dataset at once, each with a blob of its own.

    Args:
        blobs: The cached row groups.
        manifest: The dataset.
        blocks: Reader of the dataset's files, and the cache.

    Notes:
        Any thread may call it. The blobs have the same values as those that `RowGroupCache.load` makes.
    """

    def __init__(self, blobs: RowGroupCache, manifest: Manifest, blocks: Blocks) -> None:
        self._blobs = blobs
        self._manifest = manifest
        self._blocks = blocks

    def takes(self, number: int) -> bool:
        """Return whether a row group is so small that it is worth a bunch."""
        group, plan = self._manifest.row_groups[number], self._blobs.plan
        return (
            self._blocks.tier.bulk is not None
            and not self._blobs.is_mapped
            and 0 < group.rows <= min(MOST_ROWS, int(plan.blob_rows[number]))
            and group.bytes < SHARED_BYTES
            and plan.bytes_of(number) <= MOST_BYTES
        )

    def make(self, lives: Mapping[int, RowGroupLife]) -> dict[int, list[memoryview] | Exception]:
        """Return the blobs or the error of row groups that are not cached, by number.

        A row group is missing if another process makes it, or if it should be made by itself.

        Raises:
            ReservationCancelled: All lives were cancelled before the memory was reserved.
        """
        tier, blobs, numbers = self._blocks.tier.bulk, self._blobs, list(lives)
        assert tier is not None
        size = sum(
            DECODED_COPIES * blobs.bytes_of(number) + self._manifest.row_groups[number].bytes for number in numbers
        )
        with (
            blobs.maker.reserve_bytes(size, lambda: all(life.is_cancelled() for life in lives.values())),
            tier.lock_together([blobs.lock_key(number) for number in numbers]) as locked,
        ):
            members = [
                _Member(number, self._manifest.row_groups[number], blobs.keys(number)[0], lives[number])
                for number, is_locked in zip(numbers, locked, strict=True)
                if is_locked
            ]
            missing = [member for member in members if self._is_missing(member)]
            with ExitStack() as stack:
                for member in missing:
                    stack.callback(member.opened.close)
                    self._open(member)
                packed = self._packed(missing)
                found = tier.put_together([(member.key, blob) for member, blob in packed]) if packed else []
                for (member, _), blob in zip(packed, found, strict=True):
                    member.made = [blob]
                    member.life.enter(State.CACHED)
        for member in missing:
            if isinstance(member.made, list):
                blobs.made(member.number)
        return {member.number: member.made for member in members if member.made is not None}

    def _is_missing(self, member: _Member) -> bool:
        """Return whether a row group must be fetched, and can be fetched at the same time as others.

        The blob of a cached one is noted.
        """
        number, group, blobs = member.number, member.group, self._blobs
        try:
            is_open_at_once = blobs.maker.footer(group).opens_at_once(group.number, self._blocks)
        except DataloadError:  # It concerns this row group alone. The thread that loads it by itself raises it.
            return False
        if not is_open_at_once or not blobs.plan.stored(group):
            return False
        with doing("disk"), charged_to(member.life.account):
            member.made = blobs.cached(blobs.keys(number))
            if member.made is not None:
                member.life.enter(State.CACHED)
                return False
            return blobs.columns_of_wider(number) is None

    def _open(self, member: _Member) -> None:
        """Start to fetch a row group."""
        member.life.enter(State.FETCHING)
        with member.catching():
            group, columns = member.group, self._blobs.plan.stored(member.group)
            opening = self._blobs.maker.footer(group).open_row_group(
                group.file, group.number, columns, self._blocks, SHARED_BYTES
            )
            member.reader = member.opened.enter_context(opening)

    def _packed(self, members: Sequence[_Member]) -> list[tuple[_Member, memoryview]]:
        """Decode the row groups that are open. Return the blob of each that can be decoded."""
        for member in reversed(members):  # The last request usually ends last, so this thread waits once.
            if member.made is None:
                with member.catching():
                    member.reader.wait()
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
            every = self._decoded_together(readable) if self._is_joinable and len(readable) > 1 else None
            for position, member in enumerate(readable):
                with member.catching():
                    columns = every[position] if every else self._decoded(member)
                    packed.append((member, self._pack(member, columns)))
        return packed

    def _decoded(self, member: _Member) -> dict[str, Column]:
        return self._blobs.maker.decoded_table(member.table, member.group.rows, member.group)

    def _pack(self, member: _Member, columns: dict[str, Column]) -> memoryview:
        draft = Draft(member.key)
        row_block.pack(columns, member.group.rows, self._blobs.plan.layout, location(member.group), draft.allocate)
        return draft.publish()

    @cached_property
    def _is_joinable(self) -> bool:
        """Whether decoding joined row groups gives the same blobs. Files have dictionaries of text of their own."""
        return all(field.kind in ("dense", "mask", "list") for field in self._blobs.plan.layout.fields)

    def _decoded_together(self, members: Sequence[_Member]) -> list[dict[str, Column]] | None:
        """Return the columns of each row group, decoded as one table. Return None if each needs its own decoding."""
        first, lengths = members[0].group, [member.group.rows for member in members]
        constants = {member.group.constants for member in members}
        if len(constants) > 1 or lengths != [len(member.table) for member in members]:
            return None
        try:
            table = pa.concat_tables([member.table for member in members])
            columns = self._blobs.maker.decoded_table(table, len(table), first, "small row groups")
        except (DataError, pa.ArrowException):  # One has nulls, or their schemas differ: decode each alone.
            return None
        starts = list(accumulate(lengths, initial=0))
        return [
            {name: _rows_of(column, start, stop) for name, column in columns.items()}
            for start, stop in pairwise(starts)
        ]


def _rows_of(column: Column, start: int, stop: int) -> Column:
    assert isinstance(column, Dense | Ragged)
    return rows_of(column, start, stop)

"""Makes row groups: fetches their byte ranges, decodes them, and packs them into blobs, within a memory budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks
from dataload.cache.tier import BlobKey, Span
from dataload.catalog.footer_cache import FooterReader
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import DamagedError
from dataload.formats.arrow_types import leaf_count
from dataload.formats.base import Footer
from dataload.formats.hive_partitions import with_constants
from dataload.rows import row_block
from dataload.rows.arrow_decode import decode
from dataload.rows.columns import Column
from dataload.rows.making.compute_lock import computing
from dataload.rows.making.row_group_memory import MemoryNeed, RowGroupMemory
from dataload.rows.row_group_life import RowGroupLife, State
from dataload.rows.row_group_plan import BLOB_BYTES, RowGroupPlan
from dataload.runtime.counters import charge
from dataload.telemetry.wait_timeline import Timeline, doing, waited

INLINE_BYTES = 2 << 20  # of records: the thread that loads fewer decodes them itself
COLUMN_BYTES = 1 << 20  # to hold of each column: Arrow reads it page by page, and a page is about as large
DECODED_COPIES = 3  # of a blob: Arrow has its columns, may copy them to join their parts, and they are packed


class RowGroupMaker:
    """Makes the blobs of row groups, within a memory budget.

    Args:
        manifest: The dataset.
        plan: Names, lengths and sizes of the blobs.
        schema: The columns to store.
        blocks: Reader of the dataset's files, and the cache.
        fill_null: Replacement of nulls, for all columns or, as a mapping, by column; or None.

    Attributes:
        memory: The memory in which it makes them. See `share`.

    Notes:
        Any thread may call it.
    """

    # While a small row group is packed.
    _computing: Callable[[], AbstractContextManager[None]] = staticmethod(computing)

    def __init__(
        self, manifest: Manifest, plan: RowGroupPlan, schema: pa.Schema, blocks: Blocks, fill_null: Any
    ) -> None:
        self._manifest = manifest
        self._plan = plan
        self._schema = schema
        self._blocks = blocks
        self._fill_null = fill_null
        self._growth = 1.0  # the largest ratio of the bytes of a row group to their estimate
        self._footers = FooterReader(blocks, manifest.chunks_of_a_file)
        self.memory = RowGroupMemory(self.need)

    def share(self, memory: RowGroupMemory) -> None:
        """Use a memory that bounds this maker and others together."""
        self.memory = memory

    @property
    def need(self) -> MemoryNeed:
        """The memory that these row groups need: one of them at a time, or `COLUMN_BYTES` of each stored column."""
        largest = max((group.bytes for group in self._manifest.row_groups), default=0)
        streamed = COLUMN_BYTES * sum(leaf_count(field.type) for field in self._schema)
        return MemoryNeed(min(largest, streamed), largest, DECODED_COPIES * BLOB_BYTES)

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        """Return the byte ranges to fetch for a row group, or for some of its columns. See `Footer.fetched`."""
        group = self._manifest.row_groups[number]
        stored = self._plan.stored(group) if columns is None else columns
        if not stored:
            return [], []
        return self.footer(group).fetched(group.number, stored, self.memory.held.total)

    def has_all(self, numbers: Sequence[int]) -> bool:
        """Return whether these row groups are all of one file."""
        return len(numbers) == len(self.footer(self._manifest.row_groups[numbers[0]]).lengths)

    def make(self, number: int, keys: list[BlobKey], life: RowGroupLife) -> list[memoryview]:
        """Fetch a row group and return its blobs, which are cached if there is space.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """
        charge(decoded=1)
        try:
            with self.opened(number, self._blocks) as columns:
                return self.pack(number, keys, columns, life)
        except DamagedError:
            # Other row groups would be made of the same bytes.
            self._blocks.remove_damaged(self._manifest.row_groups[number].file, itertools.chain(*self.sources(number)))
        life.enter(State.PLANNED)
        life.enter(State.FETCHING)
        with self.opened(number, self._blocks.past_the_cache()) as columns:
            return self.pack(number, keys, columns, life)

    @contextmanager
    def opened(self, number: int, blocks: Blocks) -> Iterator[Iterator[dict[str, Column]]]:
        """Fetch a row group, and yield an iterator that decodes the columns of one blob after the other.

        Args:
            number: The row group.
            blocks: Reader of its file.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """
        group = self._manifest.row_groups[number]
        stored = self._plan.stored(group)
        if not stored:
            yield self._decoded([pa.table({})] * len(self._plan.lengths(number)), number)
            return
        most = self.memory.held.total
        with self.footer(group).open_row_group(group.file, group.number, stored, blocks, most) as reader:
            reader.wait()
            yield self._decoded(reader.tables(int(self._plan.blob_rows[number])), number)

    def head(self, number: int, rows: int) -> Iterator[tuple[dict[str, Column], int]]:
        """Yield the columns of a row group and their rows, `rows` at a time. The first ones need few of its bytes.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """
        group = self._manifest.row_groups[number]
        stored, held = self._plan.stored(group), self.need.held
        if not stored:
            yield self.decoded_table(pa.table({}), number, group.rows), group.rows
            return

        def tables(blocks: Blocks) -> Iterator[pa.Table]:
            with self.footer(group).open_row_group(group.file, group.number, stored, blocks, held) as reader:
                yield from reader.tables(rows)

        def begun(blocks: Blocks) -> Iterator[pa.Table]:
            rest = tables(blocks)
            return itertools.chain([*itertools.islice(rest, 1)], rest)

        read, first = self._blocks.bypassing().undamaged, 0
        for table in read(begun, group.file, lambda: itertools.chain(*self.sources(number))):
            yield self.decoded_table(table, number, len(table), first), len(table)
            first += len(table)

    def pack(
        self, number: int, keys: list[BlobKey], columns: Iterator[dict[str, Column]], life: RowGroupLife
    ) -> list[memoryview]:
        """Return the blobs of a row group, each made of the next item of `columns`.

        A decoder thread makes large ones. Handing over a small one takes longer than decoding it.
        """
        life.enter(State.DECODING)
        expected = self._plan.bytes_of(number)
        if expected <= INLINE_BYTES:
            with doing("decode"), self.memory.decoding.reserve(self.decoding_bytes(number)), self._computing():
                blobs = self._pack(number, keys, columns)
        else:
            blobs = self._pack_in_thread(number, keys, columns)
        self.note_size(number, sum(map(len, blobs)))
        return blobs

    def note_size(self, number: int, made: int) -> None:
        """Learn from the bytes of a row group that was made how large others may be, if it is not a small one."""
        if made > INLINE_BYTES:
            self._growth = max(self._growth, made / max(1, self._plan.bytes_of(number)))

    def _pack_in_thread(
        self, number: int, keys: list[BlobKey], columns: Iterator[dict[str, Column]]
    ) -> list[memoryview]:
        since, decoding = perf_counter(), Timeline()

        def pack() -> list[memoryview]:
            with decoding.here(), doing("decode"), self.memory.decoding.reserve(self.decoding_bytes(number)):
                return self._pack(number, keys, columns)

        packed = self.memory.decoders.submit(pack)
        wait([packed])
        waited(since, decoding, instead=decoding.longest())
        return packed.result()

    def _pack(
        self, number: int, keys: list[BlobKey], columns_of_blobs: Iterator[dict[str, Column]]
    ) -> list[memoryview]:
        where, tier = self._manifest.row_groups[number].name, self._blocks.tier
        blobs = []
        if len(keys) > 1:  # A process may have died before it found out that it had packed damaged bytes.
            tier.retract(keys)
        try:
            for key, rows, columns in zip(keys, self._plan.lengths(number), columns_of_blobs, strict=True):
                fill = partial(row_block.pack, columns, rows, self._plan.layout, key.digest, where)
                blobs.append(tier.get_or_fill(key, fill))
        except BaseException:
            tier.retract(keys)  # The first blobs are of the same bytes as the one that cannot be made.
            raise
        return blobs

    def _decoded(self, tables: Iterable[pa.Table], number: int) -> Iterator[dict[str, Column]]:
        """Yield the decoded columns of each blob of a row group."""
        first = 0
        for table, rows in zip(tables, self._plan.lengths(number), strict=True):
            yield self.decoded_table(table, number, rows, first)
            first += rows

    def decoded_table(
        self, table: pa.Table, number: int, rows: int, first: int = 0, where: str = ""
    ) -> dict[str, Column]:
        """Return the decoded columns of some rows of a row group, with its constants.

        Args:
            table: The stored columns of the rows.
            number: The row group.
            rows: Number of rows.
            first: The first of them in the row group.
            where: Names the rows in errors; "": the row group.
        """
        group, needed = self._manifest.row_groups[number], self._plan.needed(number)
        whole = with_constants(table, group.constants, rows, self._schema)
        needed = None if needed is None else needed[first : first + rows]
        return decode(whole, self._plan.layout.fields, self._fill_null, where or group.name, self._schema, needed)

    def reservation(self, number: int) -> int:
        """Return the bytes of a row group that are fetched and held."""
        group = self._manifest.row_groups[number]
        stored = self._plan.stored(group)
        if not stored:
            return 0
        footer, most = self.footer(group), self.memory.held.total
        held = sum(stop - start for spans in footer.fetched(group.number, stored, most) for start, stop in spans)
        return min(held, most) if footer.streams else held

    def decoding_bytes(self, number: int) -> int:
        """Return the bytes that the decoding of a row group takes. They follow blobs larger than their estimate."""
        sizes = self._plan.blob_sizes(number)
        packed = (DECODED_COPIES - 1) * max(sizes)
        return math.ceil(self._growth * (self.decompressed_bytes(number, sizes) + packed))

    def decompressed_bytes(self, number: int, sizes: Sequence[int]) -> int:
        """Return the bytes of a row group that are decompressed at a time: those of a blob, or all. sizes: of blobs."""
        group = self._manifest.row_groups[number]
        is_whole = len(sizes) > 1 and self.footer(group).decompresses_whole(group.number)
        return sum(sizes) if is_whole else max(sizes)

    def footer(self, group: RowGroup) -> Footer:
        """Return the footer of a row group's file."""
        return self._footers.read(group.file, group.footer_at)

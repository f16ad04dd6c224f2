"""Makes row groups: fetches their byte ranges, decodes them, and packs them into blobs, within a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks
from dataload.cache.tier import BlobKey, Span
from dataload.catalog.footer_cache import FooterReader
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.formats.base import Footer
from dataload.formats.hive_partitions import with_constants
from dataload.formats.range_stream import LARGEST_PIECE, fetched_buffers
from dataload.rows import row_block
from dataload.rows.arrow_decode import decode
from dataload.rows.columns import Column
from dataload.rows.row_group_life import RowGroupLife, State
from dataload.rows.row_group_plan import BLOB_BYTES, RowGroupPlan
from dataload.rows.size_sampling import Aside
from dataload.runtime.baton import waiting
from dataload.runtime.counters import charge
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.forks import ForkAware
from dataload.runtime.memory_budget import MemoryBudget
from dataload.runtime.usable_cores import usable_cores
from dataload.runtime.usable_memory import usable_memory
from dataload.telemetry.wait_timeline import Timeline, doing, waited

MEMORY_DIVISOR = 8  # One part in eight of the usable memory is for row groups in flight, held and being decoded.
TRAINER_DIVISOR = 4  # A quarter of that is for the process that trains, the rest for its background decoder.
MIN_MEMORY = 64 << 20
UNSHARED_MEMORY = 512 << 20  # at most, for a dataset without a loader that knows the ranks of the host
RELEASED_BYTES = 16 << 20  # at least, of row groups, between two returns of Arrow's unused memory
INLINE_BYTES = 2 << 20  # of records: the thread that loads fewer decodes them itself
COLUMN_BYTES = 1 << 20  # to hold of each column: Arrow reads it page by page, and a page is about as large
DECODED_COPIES = 3  # of a blob: Arrow has its columns, may copy them to join their parts, and they are packed


class RowGroupMaker(ForkAware):
    """Makes the blobs of row groups, within a memory budget.

    Args:
        manifest: The dataset.
        plan: Names, lengths and sizes of the blobs.
        schema: The columns to store.
        blocks: Reader of the dataset's files, and the cache.
        fill_null: Replacement of nulls, for all columns or, as a mapping, by column; or None.

    Attributes:
        rank_memory: Bytes of row groups for this rank: this process and its background decoder. See `memory_bytes`.
        least_held: Bytes that a process must be able to hold at a time, whatever its part of `rank_memory`: a row
            group, or `COLUMN_BYTES` of each of its columns.
        largest: Stored bytes of the largest row group.
        blob_decoding_bytes: Bytes that decoding a row group of `BLOB_BYTES` takes.
        memory: The part of `rank_memory` in which this process fetches and holds row groups, as a budget.
        decoding: The part in which it decodes them. A row group that waits for a decoder reserves nothing of it.

    Notes:
        Any thread may call it.
    """

    memory: MemoryBudget
    decoding: MemoryBudget

    def __init__(
        self, manifest: Manifest, plan: RowGroupPlan, schema: pa.Schema, blocks: Blocks, fill_null: Any
    ) -> None:
        self._manifest = manifest
        self._plan = plan
        self._schema = schema
        self._blocks = blocks
        self._fill_null = fill_null
        self._growth = 1.0  # the largest ratio of the bytes of a row group to their estimate
        self._footers = FooterReader(blocks)
        self.largest = max((group.bytes for group in manifest.row_groups), default=0)
        self.least_held = self._least_held()
        self.blob_decoding_bytes = self._blob_decoding_bytes()
        self.rank_memory = max(MIN_MEMORY, min(UNSHARED_MEMORY, usable_memory() // MEMORY_DIVISOR))
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Reset the budget and threads."""
        held, decoding = self._parts(self.rank_memory // TRAINER_DIVISOR)
        self.memory, self.decoding = MemoryBudget(held), MemoryBudget(decoding)
        self._unreleased = 0  # bytes that Arrow may have kept since it last returned its unused memory
        # Few threads, apart from those that wait for the origin: Arrow keeps memory for each thread that decodes.
        self._decoders = DaemonExecutor(usable_cores(), "dataload-decode")

    def share_memory(self, processes: int) -> None:
        """Divide the host's memory for row groups among its ranks and their worker processes."""
        self.use_memory(usable_memory() // MEMORY_DIVISOR // processes)

    def use_memory(self, size: int) -> None:
        """Set `rank_memory`."""
        size = max(MIN_MEMORY, size)
        if size != self.rank_memory:
            self.rank_memory = size
            self._divide(size // TRAINER_DIVISOR)

    def share_with(self, other: RowGroupMaker) -> None:
        """Use the memory and the threads of another maker, which then bounds both together."""
        self.memory, self.decoding, self._decoders = other.memory, other.decoding, other._decoders
        self.rank_memory, self.least_held = other.rank_memory, max(self.least_held, other.least_held)

    def use_decoder_share(self) -> None:
        """Take the part of `rank_memory` that the training process leaves to its background decoder."""
        self._divide(self.rank_memory - self.rank_memory // TRAINER_DIVISOR)

    def enlarge_for(self, others: Iterable[RowGroupMaker]) -> None:
        """Enlarge the memory for the row groups of other makers, which will share it."""
        sizes = [(maker.least_held, maker.largest, maker.blob_decoding_bytes) for maker in (self, *others)]
        self.least_held, self.largest, self.blob_decoding_bytes = map(max, zip(*sizes, strict=True))
        self._divide(self.rank_memory // TRAINER_DIVISOR)

    @property
    def memory_bytes(self) -> int:
        """The most that is in use for this rank: up to `rank_memory`, or more if row groups have very many columns."""
        trainer = self.rank_memory // TRAINER_DIVISOR
        return sum(self._parts(trainer)) + sum(self._parts(self.rank_memory - trainer))

    def _divide(self, size: int) -> None:
        held, decoding = self._parts(size)
        self.memory.resize(held)  # Other loaders may have reserved parts of it.
        self.decoding.resize(decoding)

    def _parts(self, size: int) -> tuple[int, int]:
        return _memory_parts(size, self.blob_decoding_bytes, self.largest, self.least_held)

    def _blob_decoding_bytes(self) -> int:
        return DECODED_COPIES * BLOB_BYTES

    def _least_held(self) -> int:
        return min(self.largest, COLUMN_BYTES * len(self._schema))

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        """Return the byte ranges to fetch for a row group, or for some of its columns. See `Footer.fetched`."""
        group = self._manifest.row_groups[number]
        stored = self._plan.stored(group) if columns is None else columns
        if not stored:
            return [], []
        return self.footer(group).fetched(group.number, stored, self.memory.total)

    def has_all(self, numbers: Sequence[int]) -> bool:
        """Return whether these row groups are all of one file."""
        return len(numbers) == len(self.footer(self._manifest.row_groups[numbers[0]]).lengths)

    def has_capacity(self, number: int) -> bool:
        """Return whether the budget has room for another row group now."""
        return self.memory.fits(max(1, self.reservation(number)))

    def reserve(self, number: int, life: RowGroupLife) -> AbstractContextManager[None]:
        """Hold the memory for a row group for the duration of the block. Raises as `reserve_bytes` does."""
        return self.reserve_bytes(self.reservation(number), life.is_cancelled)

    @contextmanager
    def reserve_bytes(self, size: int, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """Hold memory for the bytes of row groups for the duration of the block.

        Raises:
            ReservationCancelled: `is_cancelled()` became true before the memory was reserved.
        """
        try:
            with _reserved(self.memory, size, is_cancelled):
                self._unreleased += size
                yield
        finally:
            # Return unused memory now, not between row groups: fresh memory is slow.
            if self._unreleased >= RELEASED_BYTES and self.memory.idle:
                self._unreleased = 0
                fetched_buffers.clear()
                pa.default_memory_pool().release_unused()

    def make(self, number: int, keys: list[BlobKey], life: RowGroupLife) -> list[memoryview]:
        """Fetch a row group and return its blobs, which are cached if there is space.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """
        charge(decoded=1)
        with self.opened(number) as columns:
            return self.pack(number, keys, columns, life)

    @contextmanager
    def opened(self, number: int) -> Iterator[Iterator[dict[str, Column]]]:
        """Fetch a row group, and yield an iterator that decodes the columns of one blob after the other.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """
        group = self._manifest.row_groups[number]
        stored = self._plan.stored(group)
        if not stored:
            yield self._decoded([pa.table({})] * len(self._plan.lengths(number)), number)
            return
        most = self.memory.total
        with self.footer(group).open_row_group(group.file, group.number, stored, self._blocks, most) as reader:
            reader.wait()
            yield self._decoded(reader.tables(int(self._plan.blob_rows[number])), number)

    def head(self, number: int, rows: int) -> Iterator[tuple[dict[str, Column], int]]:
        """Yield the columns of a row group and their rows, `rows` at a time. The first ones need few of its bytes.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """
        group, aside = self._manifest.row_groups[number], Aside.of(self._blocks)
        stored = self._plan.stored(group)
        if not stored:
            yield self.decoded_table(pa.table({}), group.rows, group), group.rows
            return
        held_limit = COLUMN_BYTES * len(stored)
        with self.footer(group).open_row_group(group.file, group.number, stored, aside, held_limit) as reader:
            for table in reader.tables(rows):
                yield self.decoded_table(table, len(table), group), len(table)

    def pack(
        self, number: int, keys: list[BlobKey], columns: Iterator[dict[str, Column]], life: RowGroupLife
    ) -> list[memoryview]:
        """Return the blobs of a row group, each made of the next item of `columns`.

        A decoder thread makes large ones. Handing over a small one takes longer than decoding it.
        """
        life.enter(State.DECODING)
        expected = self._plan.bytes_of(number)
        blobs = (self._pack if expected <= INLINE_BYTES else self._pack_in_thread)(number, keys, columns)
        if (made := sum(map(len, blobs))) > INLINE_BYTES:
            self._growth = max(self._growth, made / max(1, expected))
        return blobs

    def _pack_in_thread(
        self, number: int, keys: list[BlobKey], columns: Iterator[dict[str, Column]]
    ) -> list[memoryview]:
        since, decoding = perf_counter(), Timeline()

        def pack() -> list[memoryview]:
            with decoding.here():
                return self._pack(number, keys, columns)

        packed = self._decoders.submit(pack)
        with waiting():
            wait([packed])
        waited(since, decoding, instead=decoding.longest())
        return packed.result()

    def _pack(
        self, number: int, keys: list[BlobKey], columns_of_blobs: Iterator[dict[str, Column]]
    ) -> list[memoryview]:
        where = self._manifest.row_groups[number].name
        blobs = []
        with doing("decode"), _reserved(self.decoding, self.decoding_bytes(number)):
            for key, rows, columns in zip(keys, self._plan.lengths(number), columns_of_blobs, strict=True):
                fill = partial(row_block.pack, columns, rows, self._plan.layout, where)
                blobs.append(self._blocks.tier.get_or_fill(key, fill))
        return blobs

    def _decoded(self, tables: Iterable[pa.Table], number: int) -> Iterator[dict[str, Column]]:
        """Yield the decoded columns of each blob of a row group."""
        for table, rows in zip(tables, self._plan.lengths(number), strict=True):
            yield self.decoded_table(table, rows, self._manifest.row_groups[number])

    def decoded_table(self, table: pa.Table, rows: int, group: RowGroup, where: str = "") -> dict[str, Column]:
        """Return the decoded columns of rows with the constants of `group`. where: for errors; "": the row group."""
        whole = with_constants(table, group.constants, rows, self._schema)
        return decode(whole, self._plan.layout.fields, self._fill_null, where or group.name, self._schema)

    def reservation(self, number: int) -> int:
        """Return the bytes of a row group that are fetched and held."""
        group = self._manifest.row_groups[number]
        stored = self._plan.stored(group)
        if not stored:
            return 0
        footer, most = self.footer(group), self.memory.total
        held = sum(stop - start for spans in footer.fetched(group.number, stored, most) for start, stop in spans)
        return min(held, most) if footer.streams else held

    def decoding_bytes(self, number: int) -> int:
        """Return the bytes that the decoding of a row group takes. They follow blobs larger than their estimate."""
        return math.ceil(DECODED_COPIES * self._growth * max(self._plan.blob_sizes(number)))

    def footer(self, group: RowGroup) -> Footer:
        """Return the footer of a row group's file."""
        return self._footers.read(group.file, group.footer_at)


def _memory_parts(size: int, decoding_bytes: int, largest: int, least_held: int) -> tuple[int, int]:
    """Return the bytes for fetched row groups, and those for decoding, which has a part for each decoder thread.

    Fetched bytes fill all requests, or a row group for each decoder thread and the next one. More of them would only
    wait for a decoder, in fresh memory, which is slow.

    Args:
        size: Bytes in all.
        decoding_bytes: Bytes that a decoder thread needs.
        largest: Stored bytes of the largest row group.
        least_held: Bytes of fetched row groups that must fit, even beyond `size`.
    """
    decoding = min(size // 2, decoding_bytes * usable_cores())
    useful = max(IN_FLIGHT * LARGEST_PIECE, (usable_cores() + 1) * largest)
    return max(min(size - decoding, useful), least_held), decoding


@contextmanager
def _reserved(budget: MemoryBudget, size: int, cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Reserve memory for the duration of the block. A wait for it leaves the baton to other threads."""
    with ExitStack() as stack:
        with nullcontext() if budget.fits(size) else waiting():
            stack.enter_context(budget.reserve(size, cancelled))
        yield

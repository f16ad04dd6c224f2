"""A dataset's row groups as blobs of records in the cache. The first process of a host that needs one makes it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks
from dataload.cache.local.blob_file import size_on_disk
from dataload.cache.tier import BlobKey, Span, Waited
from dataload.catalog.footer_cache import read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import DataError
from dataload.formats.schema import Layout
from dataload.rows import row_block
from dataload.rows.arrow_decode import Column, concatenate, decode
from dataload.rows.row_block import Blob
from dataload.rows.row_group_plan import RowGroupPlan
from dataload.rows.size_sampling import ValueSizes
from dataload.runtime.cached_property import cached_property
from dataload.runtime.counters import charge
from dataload.runtime.executor import DaemonExecutor, in_turn
from dataload.runtime.forks import ForkAware
from dataload.runtime.memory_budget import MemoryBudget
from dataload.runtime.usable_memory import usable_memory
from dataload.telemetry.wait_timeline import ELSEWHERE, Timeline, doing, waited

FOOTERS_KEPT = 64
MEMORY_DIVISOR = 8  # One part in eight of the usable memory is for row groups in flight, held and being decoded.
TRAINER_DIVISOR = 4  # A quarter of that is for the process that trains, the rest for its background decoder.
MIN_MEMORY = 64 << 20
UNSHARED_MEMORY = 512 << 20  # at most, for a dataset without a loader that knows the ranks of the host
COLUMN_BYTES = 1 << 20  # to hold of each column: a stream of less would need many small requests


class RowGroupCache(ForkAware):
    """The chosen columns of a dataset's row groups, as blobs of records in the cache.

    Args:
        manifest: The dataset.
        columns: Names of the columns to store.
        blocks: Reader of the dataset's files, and the cache.
        fill_null: Replacement of nulls, for all columns or, as a mapping, by column. None makes nulls an error.

    Attributes:
        plan: Names, lengths and sizes of the blobs.
        rank_memory: Bytes of row groups in flight, held and being decoded, for this rank: this process and its
            background decoder.
        memory: The part of `rank_memory` for this process, as a budget.

    Notes:
        Any thread may call it.
    """

    def __init__(self, manifest: Manifest, columns: Sequence[str], blocks: Blocks, fill_null: Any = None) -> None:
        self._manifest = manifest
        self._columns = tuple(columns)
        self._schema = pa.schema([manifest.schema.field(name) for name in columns])
        self._blocks = blocks
        self._fill_null = fill_null
        self._measured = False
        self.rank_memory = max(MIN_MEMORY, min(UNSHARED_MEMORY, usable_memory() // MEMORY_DIVISOR))
        self.plan = RowGroupPlan(manifest, columns, fill_null)
        self._footer = lru_cache(FOOTERS_KEPT)(partial(read_footer, blocks=blocks))
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Reset the budget and threads."""
        self.memory = MemoryBudget(self.rank_memory // TRAINER_DIVISOR)
        # Row groups are fetched and decoded in the order of the calls, all byte ranges of one before the next one's.
        self._turns = itertools.count(1)
        # Few threads, apart from those that wait for the origin: Arrow keeps memory for each thread that decodes.
        self._decoders = DaemonExecutor(len(os.sched_getaffinity(0)), "dataload-decode")

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            RowGroupCache,
            (self._manifest, self._columns, self._blocks, self._fill_null),
            {"rank_memory": self.rank_memory},
        )

    def __setstate__(self, state: dict[str, int]) -> None:
        self.use_memory(state["rank_memory"])

    def share_memory(self, processes: int) -> None:
        """Divide the host's memory for row groups among its ranks and their worker processes."""
        self.use_memory(usable_memory() // MEMORY_DIVISOR // processes)

    def use_memory(self, size: int) -> None:
        """Set `rank_memory`."""
        size = max(MIN_MEMORY, size)
        if size != self.rank_memory:
            self.rank_memory = size
            self.memory = MemoryBudget(size // TRAINER_DIVISOR)

    def load(self, number: int, cancelled: Callable[[], bool] = lambda: False) -> list[memoryview]:
        """Return the blobs of a row group. Fetch and decode the row group if they are not cached.

        Args:
            number: The row group.
            cancelled: Returns whether the row group is no longer needed.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
            ReservationCancelled: `cancelled()` became true before the memory for the row group was reserved.
        """
        with in_turn(next(self._turns)):
            return self._found_or_made(number, None, cancelled)

    def find(self, number: int) -> list[memoryview] | None:
        """Return the blobs of a row group, or None if this host has not cached them."""
        with doing("disk"):
            return self._cached(self._keys(number))

    def make(self, number: int) -> bool:
        """Cache the row group if space allows. Return whether it is cached. Cached blobs are not read.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """
        with in_turn(next(self._turns)):
            self._found_or_made(number, (0, 0))
        return self._cached(self._keys(number), (0, 0)) is not None

    def lease(self) -> None:
        """Protect the cached blobs of all row groups from eviction as long as this process runs."""
        row_groups = range(len(self._manifest.row_groups))
        self._blocks.tier.lease(key for number in row_groups for key in self._keys(number))

    def passes(self, number: int) -> bool:
        """Return whether the cache may evict a row group soon after its use, or has not cached it yet."""
        return self._blocks.tier.is_transient(self._keys(number))

    def measure(self) -> None:
        """Measure the sizes of dictionary-coded values by reading a few row groups.

        Raises:
            OriginError: The origin does not answer, or a file does not exist.
            DataError: A row group cannot be decoded.
        """
        if not self._measured:
            self.plan.use_mean_sizes(self.value_sizes.means())
            self._measured = True
            vars(self).pop("num_bytes", None)

    @cached_property
    def value_sizes(self) -> ValueSizes:
        """The sizes that `measure` measures."""
        return ValueSizes(self._manifest, self.plan.layout, self._blocks)

    def bytes_of(self, number: int) -> int:
        """Return an estimate of the bytes of a row group's blobs. See `RowGroupPlan.bytes_of`."""
        return self.plan.bytes_of(number)

    @property
    def shared(self) -> bool:
        """Whether other processes can read the cached blobs."""
        return self._blocks.tier.shared

    @cached_property
    def num_bytes(self) -> int:
        """Estimate of the bytes of the blobs of all row groups."""
        return sum(map(self.bytes_of, range(len(self._manifest.row_groups))))

    @property
    def keeps(self) -> bool:
        """Whether every blob is still cached: the cache is neither full nor failing."""
        stats = self._blocks.counts()
        return not stats["refused"] and (stats["health"] or {}).get("state", "normal") == "normal"

    def sizes_on_disk(self, number: int) -> list[int]:
        """Return an estimate of the file size of each blob of a row group, in bytes."""
        sizes = zip(self.plan.blob_sizes(number), self._keys(number), strict=True)
        return [size_on_disk(size, key.name) for size, key in sizes]

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        """Return the byte ranges to fetch for a row group, or for some of its columns. See `Footer.fetched`."""
        group = self._manifest.row_groups[number]
        stored = self.plan.stored(group) if columns is None else columns
        footer = self._footer(group.file, group.footer_at)
        return footer.fetched(group.number, stored, self._held_limit(stored)) if stored else ([], [])

    def has_capacity(self, number: int) -> bool:
        """Return whether the budget has room for another row group now."""
        return self.memory.fits(self._reserved(number))

    def _held_limit(self, columns: Sequence[str]) -> int:
        """Return the most stored bytes of a row group to hold in memory. The rest is streamed while it is decoded."""
        return max(self.rank_memory // TRAINER_DIVISOR // 2, len(columns) * COLUMN_BYTES)

    def _found_or_made(
        self, number: int, span: Span | None, cancelled: Callable[[], bool] = lambda: False
    ) -> list[memoryview]:
        """Return the blobs of a row group, or `span` of each. Make them, unless another process or host does.

        A wait for another process or host holds neither memory nor a lock, so this process can make other row groups.
        """
        tier, keys, lock = self._blocks.tier, self._keys(number), self._key(number, "row group")
        waited_for: Waited | None = None
        with doing("disk"):
            found = self._cached(keys, span)
        found = found or tier.fetch_from_cluster(keys)  # Without the lock: a transfer blocks no other.
        while found is None:
            if waited_for is Waited.IN_VAIN:  # The lock's holder was stopped, so this process goes on without it.
                locked: AbstractContextManager[Any] = nullcontext()
            else:
                locked = tier.key_lock(lock, elect=waited_for is not Waited.FOR_HOST)
            with self.memory.reserve(self._reserved(number), cancelled), locked as wait_for_other:
                if wait_for_other is None:
                    found = self._cached(keys, span) or tier.fetch_from_cluster(keys) or self._make(number, keys)
            if wait_for_other is not None:
                with doing(ELSEWHERE):
                    waited_for = wait_for_other()
                found = self._cached(keys, span)
        self._release_unused()
        return found

    def _cached(self, keys: list[BlobKey], span: Span | None = None) -> list[memoryview] | None:
        found = []
        for key in keys:
            blob = self._blocks.tier.get(key, span)
            if blob is None:
                return None
            found.append(blob)
        return found

    def _make(self, number: int, keys: list[BlobKey]) -> list[memoryview]:
        if (columns := self._columns_of_wider(number)) is not None:
            return self._packed(number, keys, columns)
        charge(decoded=1)
        group = self._manifest.row_groups[number]
        stored = self.plan.stored(group)
        if not stored:
            return self._packed(number, keys, self._decoded([pa.table({})] * len(keys), number))
        with ExitStack() as stack:
            footer = self._footer(group.file, group.footer_at)
            reader = stack.enter_context(
                footer.open_row_group(group.file, group.number, stored, self._blocks, self._held_limit(stored))
            )
            return self._packed(number, keys, self._decoded(reader.tables(int(self.plan.blob_rows[number])), number))

    def _reserved(self, number: int) -> int:
        """Return the bytes of memory that a row group takes: what is fetched and held, and one blob three times.

        Arrow has a blob's columns, may copy them to join their parts, and they are packed into a buffer.
        """
        held = sum(stop - start for spans in self.sources(number) for start, stop in spans)
        group = self._manifest.row_groups[number]
        stored = self.plan.stored(group)
        if stored and self._footer(group.file, group.footer_at).streams:
            held = min(held, self._held_limit(stored))
        return held + 3 * max(self.plan.blob_sizes(number))

    def _release_unused(self) -> None:
        """Return Arrow's unused memory to the system once no row group is in flight: fresh memory is slow."""
        if self.memory.idle:
            pa.default_memory_pool().release_unused()

    def _decoded(self, tables: Iterable[pa.Table], number: int) -> Iterator[dict[str, Column]]:
        """Yield the decoded columns of each blob of a row group."""
        group = self._manifest.row_groups[number]
        for table, rows in zip(tables, self.plan.lengths(number), strict=True):
            whole = _with_constants(table, group, rows, self._schema)
            yield decode(whole, self.plan.layout.fields, self._fill_null, _location(group))

    def _packed(self, number: int, keys: list[BlobKey], columns: Iterator[dict[str, Column]]) -> list[memoryview]:
        """Return the blobs of a row group. A decoder thread makes them of the columns of each blob."""
        since, decoding = perf_counter(), Timeline()
        packed = self._decoders.submit(self._pack, number, keys, columns, decoding)
        wait([packed])
        waited(since, decoding, instead=decoding.longest())
        return packed.result()

    def _pack(
        self, number: int, keys: list[BlobKey], columns_of_blobs: Iterator[dict[str, Column]], decoding: Timeline
    ) -> list[memoryview]:
        location = _location(self._manifest.row_groups[number])
        blobs = []
        with decoding.here(), doing("decode"):
            for key, rows, columns in zip(keys, self.plan.lengths(number), columns_of_blobs, strict=True):
                fill = partial(row_block.pack, columns, rows, self.plan.layout, location)
                blobs.append(self._blocks.tier.get_or_fill(key, fill))
        return blobs

    def _columns_of_wider(self, number: int) -> Iterator[dict[str, Column]] | None:
        """Return the columns of each blob, taken from cached blobs of all columns, or None if these are not cached."""
        wider = self._wider
        found = None if wider is None else wider._cached(wider._keys(number))  # noqa: SLF001 (another of this class)
        if wider is None or found is None:
            return None
        blobs = [Blob(*blob, wider.plan.layout) for blob in zip(found, wider.plan.lengths(number), strict=True)]
        ratio = int(self.plan.blob_rows[number] // wider.plan.blob_rows[number])  # Both are powers of two.
        return _joined(blobs, ratio, self.plan.layout)

    @cached_property
    def _wider(self) -> RowGroupCache | None:
        """The same row groups with all columns. None if these are all columns, or a column has an unsupported type."""
        names = self._manifest.schema.names
        if set(names) == set(self._columns):
            return None
        try:
            return RowGroupCache(self._manifest, names, self._blocks, self._fill_null)
        except DataError:
            return None

    def _keys(self, number: int) -> list[BlobKey]:
        return [self._key(number, part) for part in self.plan.parts(number)]

    def _key(self, number: int, part: str) -> BlobKey:
        return self._blocks.key(self._manifest.row_groups[number].file, self.plan.qualified(number, part))


def _with_constants(table: pa.Table, group: RowGroup, rows: int, schema: pa.Schema) -> pa.Table:
    """Return the table with the columns of `schema` whose values are in the names of folders."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for name, value in group.constants:
        if name in schema.names:
            columns[name] = pa.repeat(pa.scalar(value, schema.field(name).type), rows)
    return pa.table(columns)


def _joined(blobs: list[Blob], ratio: int, layout: Layout) -> Iterator[dict[str, Column]]:
    """Yield the columns of `layout` for every `ratio` blobs together."""
    for first in range(0, len(blobs), ratio):
        run = blobs[first : first + ratio]
        yield {field.name: concatenate([blob.column(field) for blob in run]) for field in layout.fields}


def _location(group: RowGroup) -> str:
    return f"{group.file.path} row group {group.number}"

"""Mapped row groups: blobs of records in the cache, which a function of the user makes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from dataload.cache.blocks.reader import Blocks
from dataload.cache.tier import Span
from dataload.catalog.manifest import Manifest
from dataload.errors import DataError
from dataload.formats.schema import Layout
from dataload.mapping.places import mapped_of, rows_text, where
from dataload.mapping.plan import MappedPlan
from dataload.mapping.stage import Stage
from dataload.rows.columns import Column, concatenate
from dataload.rows.making.row_group_maker import RowGroupMaker
from dataload.rows.making.row_group_memory import MemoryNeed, RowGroupMemory
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_plan import RowGroupPlan
from dataload.rows.size_sampling import ValueSizes
from dataload.runtime.cached_property import cached_property
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.forks import ForkAware
from dataload.runtime.resource_limits import MEMORY_DIVISOR, usable_memory
from dataload.telemetry.wait_timeline import doing

if TYPE_CHECKING:
    from dataload.mapping.processes import ProcessRunner
    from dataload.rows.row_block import Records

FIRST_ROWS = 32  # of the first chunk of a row group
CHUNK_ROWS = 1024
CHUNK_BYTES = 16 << 20  # of the rows that the calls under way get, and of those that they return


def _bytes_of(columns: Mapping[str, Column]) -> int:
    return sum(column.values.nbytes for column in columns.values())


class ChunkSize:
    """The rows to map together: few at first, because results may be larger than the forecast, then up to `most`.

    Args:
        most: Most rows.
        rows: Rows of the first chunk.
        limit: Bytes of a result.
    """

    def __init__(self, most: int, rows: int, limit: int = CHUNK_BYTES) -> None:
        self.rows = min(most, rows)
        self._most = most
        self._limit = limit

    def follow(self, columns: Mapping[str, Column], rows: int) -> None:
        """Set the rows of further chunks, given the result of a chunk."""
        row_bytes = _bytes_of(columns) / rows
        self.rows = max(1, min(self._most, 2 * self.rows, int(self._limit / max(1.0, row_bytes))))


class MappedRowGroups(RowGroupCache):
    """The row groups of a mapped dataset.

    Args:
        source: The row groups that are mapped. They are not cached on the way, but used if they are.
        stage: The map.
        columns: Names of the mapped columns to store, in this order; None: all.
        blocks: The cache.
    """

    is_mapped = True

    def __init__(
        self, source: RowGroupCache, stage: Stage, blocks: Blocks, columns: Sequence[str] | None = None
    ) -> None:
        self._source, self._stage, self.selection = source, stage, stage.selection
        super().__init__(stage.stored(), stage.schema.names if columns is None else columns, blocks)

    def _new_plan(self) -> RowGroupPlan:
        return MappedPlan(self.manifest, self._columns, self._stage, self._source.plan)

    def _new_maker(self) -> RowGroupMaker:
        return MappedMaker(self.manifest, self.plan, self._source, self._stage, self.blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self._source, self._stage, self.blocks, self._columns
        return MappedRowGroups, arguments, {"rank": self.memory.rank}

    @property
    def is_estimate(self) -> bool:
        """Whether `num_bytes` comes from a sample."""
        return bool(self.plan.layout.ragged)

    @cached_property
    def value_sizes(self) -> ValueSizes:
        """No sizes, because the sample of `map` has measured all."""
        return ValueSizes(self.manifest, Layout(()), self.blocks, self.plan.blob_rows.tolist())

    def columns_of_wider(self, number: int) -> Generator[dict[str, Column], None, None] | None:
        """Return the columns of each blob, made of cached blobs of the source, or None if these are not cached."""
        columns = self._source.cached_columns(number)
        assert isinstance(self.maker, MappedMaker)
        return None if columns is None else self.maker.mapped(columns, number)


def head_of(source: RowGroupCache, number: int, rows: int) -> Iterator[tuple[dict[str, Column], int]]:
    """Yield the columns of a row group and their rows: all rows of a cached blob, or `rows` at a time."""
    # From cached blobs of its own source, a mapped one would map whole blobs.
    is_cached = not source.is_mapped or source.get_all(source.keys(number), (0, 0)) is not None
    columns = source.cached_columns(number) if is_cached else None
    if columns is None:
        return source.maker.head(number, rows)
    return zip(columns, source.plan.lengths(number), strict=True)


class MappedMaker(RowGroupMaker, ForkAware):
    """Makes the blobs of mapped row groups, within the memory budget.

    Args:
        manifest: The mapped rows, `Stage.stored`.
        plan: Names, lengths and sizes of the blobs.
        source: The row groups that are mapped.
        stage: The map.
        blocks: The cache.
    """

    _computing = staticmethod(nullcontext)  # The function may wait, and other threads call it meanwhile.

    def __init__(
        self, manifest: Manifest, plan: RowGroupPlan, source: RowGroupCache, stage: Stage, blocks: Blocks
    ) -> None:
        self._source, self._stage = source, stage
        super().__init__(manifest, plan, stage.schema, blocks, None)
        source.maker.share(self.memory)
        self.after_fork_in_child()
        ForkAware.__init__(self)

    def after_fork_in_child(self) -> None:
        """Start new threads, and leave the processes to the parent."""
        self._callers: dict[int, DaemonExecutor] = {}
        self._starting = threading.Lock()
        self._processes: ProcessRunner | None = None

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        """Return the byte ranges to fetch for a row group. See `Footer.fetched`."""
        return self._source.maker.sources(number, columns)

    def reservation(self, number: int) -> int:
        """Return the bytes of a row group of the source that are fetched and held."""
        return self._source.maker.reservation(number)

    def share(self, memory: RowGroupMemory) -> None:
        """Use a memory that bounds this maker, that of the source, and others together."""
        super().share(memory)
        self._source.maker.share(memory)

    @property
    def need(self) -> MemoryNeed:
        """The memory that these row groups need, their sources included."""
        own, source = super().need, self._source.maker.need
        return MemoryNeed(source.held, own.largest, own.decoding + 2 * CHUNK_BYTES + source.decoding)

    def decompressed_bytes(self, number: int, sizes: Sequence[int]) -> int:  # noqa: ARG002 - whatever its file
        """Return the bytes of a blob: only the source is decompressed."""
        return max(sizes)

    def decoding_bytes(self, number: int) -> int:
        """Return the bytes that decoding and mapping a row group take."""
        mapping = min(2 * CHUNK_BYTES, self._source.plan.bytes_of(number) + self._plan.bytes_of(number))
        return super().decoding_bytes(number) + mapping + self._source.maker.decoding_bytes(number)

    @contextmanager
    def opened(self, number: int, blocks: Blocks) -> Iterator[Iterator[dict[str, Column]]]:
        """Fetch a row group, and yield an iterator that maps it. See `RowGroupMaker.opened`."""
        opened = self._source.maker.opened(number, blocks)
        with opened as columns, closing(self.mapped(columns, number)) as mapped:
            yield mapped

    def head(self, number: int, rows: int) -> Iterator[tuple[dict[str, Column], int]]:
        """Yield the mapped columns of a row group and their rows, at most `rows` at a time."""
        chunk = ChunkSize(rows, rows)
        chunks = self._chunks(head_of(self._source, number, rows), number, chunk)
        for mapped in self._called(chunks, number, chunk, 0):
            self._stage.function.check_same()
            yield mapped

    def mapped(self, columns: Iterable[dict[str, Column]], number: int) -> Generator[dict[str, Column], None, None]:
        """Yield the columns of each mapped blob of a row group.

        Args:
            columns: The columns of each blob of the source.
            number: The row group.

        Raises:
            ConfigError: The function has changed since `map` was called.
            DataError: The function failed. It names file, row group and row.
        """
        lengths, fields = self._plan.lengths(number), self._plan.layout.fields
        if not sum(lengths):
            from dataload.mapping.running import no_rows

            yield no_rows(fields)
            return
        sources = zip(columns, self._source.plan.lengths(number), strict=True)
        chunk = ChunkSize(self._chunk_rows(number), FIRST_ROWS, CHUNK_BYTES // self._calls)
        chunks = self._chunks(sources, number, chunk, lengths[0])
        with closing(self._called(chunks, number, chunk, self._calls)) as done:
            for length in lengths:
                parts: list[dict[str, Column]] = []
                missing, size = length, 0
                while missing:
                    part, rows = next(done)
                    parts.append(part)
                    missing, size = missing - rows, size + _bytes_of(part)
                    self._check(number, size, length)
                self._stage.function.check_same()  # before the cache gets the rows
                yield {field.name: concatenate([part[field.name] for part in parts]) for field in fields}

    def _check(self, number: int, size: int, rows: int) -> None:
        """Raise DataError if a blob is larger than its forecast, and than all row groups of a host may be together."""
        forecast = max(self._plan.blob_sizes(number))
        if size > 2 * forecast and size > (limit := usable_memory() // MEMORY_DIVISOR):
            raise DataError(
                f"{self._where(number)}: map {self._stage.function.name}: the results of {rows} rows take more than "
                f"{decimal(limit)}, an eighth of the usable memory. The sample of rows suggested {decimal(forecast)}: "
                "write the file with fewer rows in a row group, and not sorted by size"
            )

    @property
    def _calls(self) -> int:
        """The calls of the function that are under way at a time."""
        return self._stage.processes or self.memory.rank.decoders

    def _chunk_rows(self, number: int) -> int:
        """Return how many rows to map together at most: a power of two, as the rows of blobs are."""
        plans = self._plan, self._source.plan
        row_bytes = sum(max(plan.blob_sizes(number)) // max(plan.lengths(number)) for plan in plans)
        most = CHUNK_BYTES // self._calls // max(1, row_bytes)
        return 1 << (max(1, min(CHUNK_ROWS, most)).bit_length() - 1)

    def _chunks(
        self, sources: Iterable[tuple[dict[str, Column], int]], number: int, chunk: ChunkSize, blob_rows: int = 1 << 62
    ) -> Iterator[Records]:
        """Yield the rows to map, in chunks of `chunk.rows` at most that are in one blob of the source and one result.

        Args:
            sources: The columns of consecutive blobs of the source, and their rows.
            number: The row group.
            chunk: Rows of a chunk.
            blob_rows: Rows of a mapped blob.
        """
        from dataload.mapping.running import mapped_blobs, records_of

        layout = self._source.plan.layout
        mask = mapped_of(self._stage.selection, self._source.selection, number)
        done = 0
        for blob, rows, chosen in mapped_blobs(sources, mask, layout, self._where(number)):
            first = 0
            while first < len(chosen):
                size = min(chunk.rows, len(chosen) - first, blob_rows - done % blob_rows)
                yield records_of(blob, rows, layout, chosen[first : first + size])
                first, done = first + size, done + size

    def _called(
        self, chunks: Iterator[Records], number: int, chunk: ChunkSize, ahead: int
    ) -> Generator[tuple[dict[str, Column], int], None, None]:
        """Yield the mapped rows of each chunk. ahead: as for `_each`.

        Raises:
            DataError: The function failed.
        """
        from dataload.mapping.running import ChunkError

        sizes: list[int] = []  # of the chunks that were taken

        def noted() -> Iterator[Records]:
            while True:
                with doing("decode"):
                    records = next(chunks, None)
                if records is None:
                    return
                sizes.append(len(records))
                yield records

        done = 0
        with closing(self._each(noted(), ahead)) as results:
            for index in itertools.count():
                try:
                    with doing("map"):
                        columns = next(results, None)
                except ChunkError as error:
                    rows = rows_text(self._stage.selection, number, done, sizes[index], error.row)
                    place = f"{self._where(number)} {rows}"
                    raise DataError(f"{place}: map {self._stage.function.name}: {error.text}") from error.__cause__
                if columns is None:
                    return
                chunk.follow(columns, sizes[index])
                yield columns, sizes[index]
                done += sizes[index]

    def _each(self, chunks: Iterator[Records], ahead: int) -> Generator[dict[str, Column], None, None]:
        """Yield the mapped rows of each chunk, in order. ahead: calls that are under way, besides the one awaited."""
        stage, given, fields = self._stage, self._source.plan.layout, self._plan.layout.fields
        if stage.processes is None:
            return stage.runner(given.fields).each(chunks, fields, self._threads(), ahead)
        with self._starting:
            if self._processes is None:
                from dataload.mapping.processes import ProcessRunner

                self._processes = ProcessRunner(stage.function, stage.columns, given, fields, stage.processes)
            return self._processes.each(chunks, ahead)

    def _threads(self) -> DaemonExecutor:
        """Return the threads that call the function: this rank's share of the cores."""
        count = self.memory.rank.decoders
        with self._starting:
            if count not in self._callers:
                self._callers = {count: DaemonExecutor(count, "dataload-map")}
            return self._callers[count]

    def _where(self, number: int) -> str:
        return where(self._manifest.row_groups[number], self._blocks)

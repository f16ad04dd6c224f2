"""Makes mapped row groups: a function of the user makes their rows."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from dataload.cache.blocks.reader import Blocks
from dataload.cache.tier import BlobKey, Span
from dataload.errors import DataError
from dataload.mapping.places import mapped_of, rows_text, where
from dataload.mapping.plan import MappedPlan
from dataload.mapping.stage import Stage
from dataload.rows.columns import Column, Ragged, concatenate, length_of, rows_of, used_values
from dataload.rows.making.maker import Columns, Opened
from dataload.rows.making.row_group_memory import DECODED_COPIES, MemoryNeed, RowGroupMemory, packing_bytes
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_plan import BLOB_BYTES
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.forks import ForkAware
from dataload.runtime.resource_limits import MEMORY_DIVISOR, usable_memory
from dataload.runtime.text import counted
from dataload.telemetry.wait_timeline import doing

if TYPE_CHECKING:
    from dataload.mapping.processes import ProcessRunner
    from dataload.rows.row_block import Records

FIRST_ROWS = 32  # of the first chunk of a row group
CHUNK_ROWS = 1024
NO_BORDER = 1 << 62  # rows
CHUNK_BYTES = 16 << 20  # of the rows that the calls under way get, and of those that they return


def _bytes_of(columns: Mapping[str, Column]) -> int:
    used = (used_values(each) if isinstance(each, Ragged) else each.values for each in columns.values())
    return sum(values.nbytes for values in used)


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


def head_of(source: RowGroupCache, number: int, rows: int) -> Iterator[tuple[Columns, int]]:
    """Yield the columns of a row group and their rows: all rows of a cached blob, or `rows` at a time."""
    # From cached blobs of its own source, a mapped one would map whole blobs.
    is_cached = not source.is_mapped or source.find(number, (0, 0)) is not None
    columns = source.cached_columns(number) if is_cached else None
    if columns is None:
        return source.maker.head(number, rows)
    return zip(columns, source.plan.lengths(number), strict=True)


def _in_blobs(
    results: Iterable[tuple[Columns, int]], most: int, check: Callable[[int, int], None]
) -> Iterator[list[Columns]]:
    """Yield results in lists of `most` rows; the last list may have fewer.

    Args:
        results: Columns, and their rows.
        most: Rows of a list.
        check: Called with the bytes of a list so far, and with `most`.
    """
    parts: list[Columns] = []
    missing, size = most, 0
    for found, rows in results:
        first = 0
        while first < rows:
            stop = min(rows, first + missing)
            parts.append(_rows_of(found, first, stop))
            missing, size, first = missing - (stop - first), size + _bytes_of(parts[-1]), stop
            check(size, most)
            if not missing:
                yield parts
                parts, missing, size = [], most, 0
    if parts:
        yield parts


def _rows_of(columns: Columns, first: int, stop: int) -> Columns:
    whole = first == 0 and stop == length_of(next(iter(columns.values())))
    return columns if whole else {name: rows_of(column, first, stop) for name, column in columns.items()}


class OfOthers:
    """What makers have whose rows are made of those of other row groups. See `Maker`.

    Attributes:
        _source: The other row groups.
    """

    is_mapped = True
    value_sizes = None  # The sample of `map` has measured all.
    _source: RowGroupCache

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        return self._source.maker.sources(number, columns)

    def discard_sources(self, number: int, keys: Callable[[int], list[BlobKey]]) -> None:
        """Keep the blocks of files, which another map may need."""

    @property
    def known_nulls(self) -> str | None:
        return self._source.maker.known_nulls

    def reservation(self, number: int) -> int:
        return self._source.maker.reservation(number)

    def opens_at_once(self, number: int) -> bool:
        return self._source.maker.opens_at_once(number)

    @contextmanager
    def open(self, number: int, blocks: Blocks) -> Iterator[Opened]:
        with self._source.maker.open(number, blocks) as opened, ExitStack() as stack:

            def columns() -> Iterator[Columns]:
                return stack.enter_context(closing(self._made(opened.columns(), number)))

            yield Opened(opened.fetches, columns)

    def from_cache(self, number: int) -> Generator[Columns, None, None] | None:
        """Make the rows of cached blobs of the source. See `Maker`."""
        columns = self._source.cached_columns(number)
        return None if columns is None else self._made(columns, number)

    def _made(self, columns: Iterable[Columns], number: int) -> Generator[Columns, None, None]:
        """Yield the columns of each blob of a row group.

        Args:
            columns: The columns of each blob of the source.
            number: The row group.
        """
        raise NotImplementedError


class MapMaker(OfOthers, ForkAware):
    """Makes the blobs of mapped row groups. See `Maker`.

    Args:
        source: The row groups that are mapped. They are not cached on the way, but used if they are.
        stage: The map.
        columns: Names of the mapped columns to store, in this order; None: all.
    """

    def __init__(self, source: RowGroupCache, stage: Stage, columns: Sequence[str] | None = None) -> None:
        self._source, self._stage, self._chosen, self.blocks = source, stage, columns, source.blocks
        added = stage.stored_schema.names[len(stage.schema) :]
        self._columns = (*(stage.schema.names if columns is None else columns), *added)
        self.selection = stage.stored_selection
        self.manifest = stage.stored()
        self.plan = MappedPlan(self.manifest, self._columns, stage, source.plan)
        self.share(RowGroupMemory(self.need))
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Start new threads, and leave the processes to the parent."""
        self._callers: dict[int, DaemonExecutor] = {}
        self._starting = threading.Lock()
        self._processes: ProcessRunner | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return MapMaker, (self._source, self._stage, self._chosen)

    @property
    def need(self) -> MemoryNeed:
        """The memory that these row groups need, their sources included."""
        source = self._source.maker.need
        largest = max((group.bytes for group in self.manifest.row_groups), default=0)
        return MemoryNeed(source.held, largest, DECODED_COPIES * BLOB_BYTES + 2 * CHUNK_BYTES + source.decoding)

    def share(self, memory: RowGroupMemory) -> None:
        """Use a memory that bounds this maker, that of the source, and others together."""
        self.memory = memory
        self._source.maker.share(memory)

    def decoding_bytes(self, number: int, growth: float) -> int:
        """Return the bytes that decoding and mapping a row group take."""
        sizes = self.plan.blob_sizes(number)
        mapping = min(2 * CHUNK_BYTES, self._source.plan.bytes_of(number) + self.plan.bytes_of(number))
        own = math.ceil(growth * (max(sizes) + packing_bytes(sizes)))
        return own + mapping + self._source.decoding_bytes(number)

    def head(self, number: int, rows: int) -> Iterator[tuple[Columns, int]]:
        """Yield the mapped columns of a row group and their rows, at most `rows` at a time."""
        chunk = ChunkSize(rows, rows)
        chunks = self._chunks(head_of(self._source, number, rows), number, chunk)
        for mapped in self._called(chunks, number, chunk, 0):  # of flat_map, these may be more than `rows`
            self._stage.function.check_same()
            yield mapped

    def _made(self, columns: Iterable[Columns], number: int) -> Generator[Columns, None, None]:
        """Yield the columns of each mapped blob of a row group.

        Args:
            columns: The columns of each blob of the source.
            number: The row group.

        Raises:
            ConfigError: The function has changed since `map` was called.
            DataError: The function failed. It names file, row group and row.
        """
        lengths, fields = self.plan.lengths(number), self.plan.layout.fields
        if not sum(lengths):
            from dataload.mapping.running import no_rows

            yield no_rows(fields)
            return
        aligned = NO_BORDER if self._stage.is_flat else lengths[0]
        made, expected = 0, iter(lengths)
        with closing(self.blobs(columns, number, max(lengths), aligned)) as blobs:
            for found, rows in blobs:
                made += rows
                if rows != next(expected, 0):
                    break
                yield found
        if made != sum(lengths):
            raise DataError(
                f"{self._where(number)}: {self._stage.title} made {counted(made, 'row')} of this row group at least, "
                f"and {counted(sum(lengths), 'row')} when they were counted: it must make the same rows each time, so "
                "use no random numbers and nothing else that changes, or version= if it has changed"
            )

    def blobs(
        self, columns: Iterable[Columns], number: int, most: int, aligned: int
    ) -> Generator[tuple[Columns, int], None, None]:
        """Yield the mapped columns of a row group in blobs of `most` rows, of which the last one may have fewer.

        Args:
            columns: The columns of each blob of the source.
            number: The row group.
            most: Rows of a blob.
            aligned: The rows of chunks do not cross multiples of this number.
        """
        sources = zip(columns, self._source.plan.lengths(number), strict=True)
        chunk = ChunkSize(self._chunk_rows(number), FIRST_ROWS, CHUNK_BYTES // self._calls)
        chunks = self._chunks(sources, number, chunk, aligned)
        fields = self.plan.layout.fields
        with closing(self._called(chunks, number, chunk, self._calls)) as done:
            for parts in _in_blobs(done, most, partial(self._check, number)):
                self._stage.function.check_same()  # before the cache gets the rows
                joined = {field.name: concatenate([part[field.name] for part in parts]) for field in fields}
                yield joined, length_of(next(iter(joined.values())))

    def _check(self, number: int, size: int, rows: int) -> None:
        """Raise DataError if a blob is larger than its forecast, and than all row groups of a host may be together."""
        forecast = max(self.plan.blob_sizes(number))
        if size > 2 * forecast and size > (limit := usable_memory() // MEMORY_DIVISOR):
            raise DataError(
                f"{self._where(number)}: {self._stage.title}: the results of {rows} rows take more than "
                f"{decimal(limit)}, an eighth of the usable memory. The sample of rows suggested {decimal(forecast)}: "
                "write the file with fewer rows in a row group, and not sorted by size"
            )

    @property
    def _calls(self) -> int:
        """The calls of the function that are under way at a time."""
        return self._stage.processes or self.memory.rank.decoders

    def _chunk_rows(self, number: int) -> int:
        """Return how many rows to map together at most: a power of two, as the rows of blobs are."""
        given, made = (
            max(plan.blob_sizes(number)) // max(1, *plan.lengths(number)) for plan in (self._source.plan, self.plan)
        )
        counts = self._stage.counts
        row_bytes = given + (made if counts is None else math.ceil(made * counts.ratio))
        most = CHUNK_BYTES // self._calls // max(1, row_bytes)
        return 1 << (max(1, min(CHUNK_ROWS, most)).bit_length() - 1)

    def _chunks(
        self, sources: Iterable[tuple[Columns, int]], number: int, chunk: ChunkSize, blob_rows: int = NO_BORDER
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
    ) -> Generator[tuple[Columns, int], None, None]:
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
                    raise DataError(f"{place}: {self._stage.title}: {error.text}") from error.__cause__
                if columns is None:
                    return
                chunk.follow(columns, sizes[index])
                yield columns, length_of(next(iter(columns.values())))
                done += sizes[index]

    def _each(self, chunks: Iterator[Records], ahead: int) -> Generator[Columns, None, None]:
        """Yield the mapped rows of each chunk, in order. ahead: calls that are under way, besides the one awaited."""
        stage, given = self._stage, self._source.plan.layout
        if stage.processes is None:
            return stage.runner(given.fields).each(chunks, stage.makes, self._threads(), ahead)
        with self._starting:
            if self._processes is None:
                from dataload.mapping.processes import ProcessRunner

                self._processes = ProcessRunner(stage, given, self.plan.layout)
            return self._processes.each(chunks, ahead)

    def _threads(self) -> DaemonExecutor:
        """Return the threads that call the function: this rank's share of the cores."""
        count = self.memory.rank.decoders
        with self._starting:
            if count not in self._callers:
                self._callers = {count: DaemonExecutor(count, "dataload-map")}
            return self._callers[count]

    def _where(self, number: int) -> str:
        return where(self.manifest.row_groups[number], self.blocks)

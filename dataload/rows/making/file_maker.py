"""Makes row groups of files: fetches their byte ranges and decodes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks
from dataload.cache.tier import BlobKey, Span
from dataload.catalog.footer_cache import FooterReader
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import DataError
from dataload.formats.arrow_types import leaf_count
from dataload.formats.base import Footer
from dataload.formats.hive_partitions import with_constants
from dataload.rows.arrow_decode import decode
from dataload.rows.known_nulls import known_nulls
from dataload.rows.making.maker import Columns, Opened
from dataload.rows.making.row_group_memory import DECODED_COPIES, MemoryNeed, RowGroupMemory, packing_bytes
from dataload.rows.making.shared_blocks import SharedBlocks
from dataload.rows.read_options import USUAL, ReadOptions
from dataload.rows.row_block import joined_columns
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_plan import BLOB_BYTES, RowGroupPlan
from dataload.rows.size_sampling import ValueSizes
from dataload.runtime.cached_property import cached_property

COLUMN_BYTES = 1 << 20  # to hold of each column: Arrow reads it page by page, and a page is about as large


class FileMaker:
    """Makes the chosen columns of a dataset's row groups. See `Maker`.

    Args:
        manifest: The dataset.
        columns: Names of the columns.
        blocks: Reader of the dataset's files, and the cache.
        read_options: How values are read.
    """

    is_mapped = False
    selection = None

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str],
        blocks: Blocks,
        read_options: ReadOptions,
    ) -> None:
        self.manifest = manifest
        self._columns = tuple(columns)
        self._read_options = read_options
        fill_null, null_masks, errors = read_options.fill_null, read_options.null_masks, read_options.errors
        made_by = [] if errors == "raise" else [f"errors={errors}"]
        self.plan = RowGroupPlan(manifest, columns, fill_null, null_masks=null_masks, made_by=made_by)
        self.blocks = blocks
        if not blocks.tier.shared:  # Memory keeps blocks until their neighbours are needed only if all data fits.
            files = {group.file for group in manifest.row_groups}
            rows = sum(map(self.plan.bytes_of, range(len(manifest.row_groups))))
            if sum(file.size for file in files) + rows > blocks.tier.limit:
                self.blocks = blocks.bypassing()
        self._schema = pa.schema([manifest.schema.field(name) for name in columns])
        self._footers = FooterReader(self.blocks, manifest.chunks_of_a_file)
        self.memory = RowGroupMemory(self.need)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileMaker, (self.manifest, self._columns, self.blocks, self._read_options)

    @property
    def need(self) -> MemoryNeed:
        """One of the row groups at a time, or `COLUMN_BYTES` of each stored column."""
        largest = max((group.bytes for group in self.manifest.row_groups), default=0)
        streamed = COLUMN_BYTES * sum(leaf_count(field.type) for field in self._schema)
        return MemoryNeed(min(largest, streamed), largest, DECODED_COPIES * BLOB_BYTES)

    def share(self, memory: RowGroupMemory) -> None:
        self.memory = memory

    def footer(self, group: RowGroup) -> Footer:
        """Return the footer of a row group's file."""
        return self._footers.of(group)

    def opens_at_once(self, number: int) -> bool:
        group = self.manifest.row_groups[number]
        return self.footer(group).opens_at_once(group.number, self.blocks)

    @contextmanager
    def open(self, number: int, blocks: Blocks) -> Iterator[Opened]:
        group = self.manifest.row_groups[number]
        stored = self.plan.stored(group)
        if not stored:
            empty = [pa.table({})] * len(self.plan.lengths(number))
            yield Opened((), partial(self._decoded, empty, number))
            return
        most = self.memory.held.total
        with self.footer(group).open_row_group(group.file, group.number, stored, blocks, most) as reader:

            def columns() -> Iterator[Columns]:
                reader.wait()
                return self._decoded(reader.tables(int(self.plan.blob_rows[number])), number)

            yield Opened(reader.fetches, columns)

    def from_cache(self, number: int) -> Generator[Columns, None, None] | None:
        """Take the columns from cached blobs of all columns. See `Maker`."""
        whole = self._all_columns
        found = None if whole is None else whole.find(number)
        if whole is None or found is None:
            return None
        ratio = int(self.plan.blob_rows[number] // whole.plan.blob_rows[number])  # Both are powers of two.
        return joined_columns(found, whole.plan.lengths(number), whole.plan.layout, ratio, self.plan.layout)

    @cached_property
    def _all_columns(self) -> RowGroupCache | None:
        """The same row groups with all columns. None if these are all columns, or a column has an unsupported type."""
        names = self.manifest.schema.names
        if set(names) == set(self._columns):
            return None
        try:
            return RowGroupCache(FileMaker(self.manifest, names, self.blocks, self._read_options))
        except DataError:
            return None

    def head(self, number: int, rows: int) -> Iterator[tuple[Columns, int]]:
        group = self.manifest.row_groups[number]
        stored, held = self.plan.stored(group), self.need.held
        if not stored:
            yield self._decoded_table(pa.table({}), number, group.rows), group.rows
            return

        def tables(blocks: Blocks) -> Iterator[pa.Table]:
            with self.footer(group).open_row_group(group.file, group.number, stored, blocks, held) as reader:
                yield from reader.tables(rows)

        def begun(blocks: Blocks) -> Iterator[pa.Table]:
            rest = tables(blocks)
            return itertools.chain([*itertools.islice(rest, 1)], rest)

        read, first = self.blocks.bypassing().undamaged, 0
        for table in read(begun, group.file, lambda: itertools.chain(*self.sources(number))):
            yield self._decoded_table(table, number, len(table), first), len(table)
            first += len(table)

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        group = self.manifest.row_groups[number]
        stored = self.plan.stored(group) if columns is None else columns
        if not stored:
            return [], []
        return self.footer(group).fetched(group.number, stored, self.memory.held.total)

    def discard_sources(self, number: int, keys: Callable[[int], list[BlobKey]]) -> None:
        if self._shared_blocks is not None and not self.plan.zeroes_nulls(number):
            self._shared_blocks.discard(number, keys, self._shared_spans)

    @cached_property
    def _shared_blocks(self) -> SharedBlocks | None:
        """The blocks that these row groups replace; None if datasets of other arguments cannot be made from them."""
        is_all = set(self.manifest.schema.names) == set(self._columns)
        if not is_all or self._read_options != USUAL:
            return None
        return SharedBlocks(self.manifest, self.blocks)

    def _shared_spans(self, numbers: Sequence[int]) -> list[list[Span]] | None:
        footer = self.footer(self.manifest.row_groups[numbers[0]])
        return [self.sources(number)[0] for number in numbers] if len(numbers) == len(footer.lengths) else None

    def reservation(self, number: int) -> int:
        group = self.manifest.row_groups[number]
        stored = self.plan.stored(group)
        if not stored:
            return 0
        footer, most = self.footer(group), self.memory.held.total
        held = sum(stop - start for spans in footer.fetched(group.number, stored, most) for start, stop in spans)
        return min(held, most) if footer.streams else held

    def decoding_bytes(self, number: int, growth: float) -> int:
        sizes = self.plan.blob_sizes(number)
        return math.ceil(growth * (self.decompressed_bytes(number, sizes) + packing_bytes(sizes)))

    def decompressed_bytes(self, number: int, sizes: Sequence[int]) -> int:
        """Return the bytes of a row group that are decompressed at a time: those of a blob, or all. sizes: of blobs."""
        group = self.manifest.row_groups[number]
        is_whole = len(sizes) > 1 and self.footer(group).decompresses_whole(group.number)
        return sum(sizes) if is_whole else max(sizes)

    @property
    def known_nulls(self) -> str | None:
        return known_nulls(self.manifest, self._columns, self._read_options)

    @cached_property
    def value_sizes(self) -> ValueSizes:
        """Sizes of dictionary-coded values, which footers do not tell."""
        rows, fill_null = self.plan.blob_rows.tolist(), self._read_options.fill_null
        return ValueSizes(self.manifest, self.plan.layout, self.blocks, rows, fill_null)

    def _decoded(self, tables: Iterable[pa.Table], number: int) -> Iterator[Columns]:
        """Yield the decoded columns of each blob of a row group."""
        first = 0
        for table, rows in zip(tables, self.plan.lengths(number), strict=True):
            yield self._decoded_table(table, number, rows, first)
            first += rows

    def _decoded_table(self, table: pa.Table, number: int, rows: int, first: int = 0) -> Columns:
        """Return the decoded columns of some rows of a row group, with its constants.

        Args:
            table: The stored columns of the rows.
            number: The row group.
            rows: Number of rows.
            first: The first of them in the row group.
        """
        group, needed = self.manifest.row_groups[number], self.plan.needed(number)
        whole = with_constants(table, group.constants, rows, self._schema)
        needed = None if needed is None else needed[first : first + rows]
        fields, options = self.plan.layout.fields, self._read_options
        return decode(whole, fields, options.fill_null, group.name, self._schema, needed, options.errors)

"""Sizes of dictionary-coded values. Footers do not tell them; a sample of a few row groups does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks
from dataload.catalog.footer_cache import FooterReader, Metadata
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.formats.base import RowGroupReader, read_row_group
from dataload.formats.schema import Field, Layout
from dataload.rows.arrow_decode import decode
from dataload.rows.columns import Coded, Nested, Ragged, whole_bytes
from dataload.rows.row_group_plan import digest_of
from dataload.runtime.cached_property import cached_property
from dataload.runtime.executor import DaemonExecutor

SAMPLES = 4  # row groups
READS_IN_FLIGHT = 16
VERSION = 5  # of the cached sizes
HELD_BYTES = 32 << 20  # stored bytes of a column to hold in memory


class MeanSize(NamedTuple):
    """The mean size of a column's values in bytes.

    Attributes:
        cached: In the cache with their spans, where rows share equal values.
        whole: In a batch with a span, where each row has its value.
    """

    cached: float
    whole: float


def spread(total: int) -> list[int]:
    """Return `SAMPLES` numbers below `total`, evenly spread, or all of them if there are fewer."""
    count = min(SAMPLES, total)
    return [(2 * sample + 1) * total // (2 * count) for sample in range(count)]


class ValueSizes:
    """Mean sizes of the values of dictionary-coded columns.

    Args:
        manifest: The dataset.
        layout: The columns.
        blocks: Reader of the dataset's files, and the cache.
        blob_rows: Rows of a full blob, by row group: each blob has a dictionary of its own.
        fill_null: Replacement of nulls, or None, see `decode`.

    Attributes:
        samples: Numbers of the sampled row groups, the same on every host.

    Notes:
        Each host reads each coded column of each sample once. The results are cached like footers.
    """

    def __init__(
        self, manifest: Manifest, layout: Layout, blocks: Blocks, blob_rows: Sequence[int], fill_null: Any = None
    ) -> None:
        self.samples = spread(len(manifest.row_groups))
        self._groups = [manifest.row_groups[number] for number in self.samples]
        self._schema = manifest.schema
        self._layout = layout
        self._blocks = blocks
        self._blob_rows = [blob_rows[number] for number in self.samples]
        self._fill_null = fill_null
        self._uncached_blocks = blocks.bypassing()
        self._footers = FooterReader(blocks, manifest.chunks_of_a_file)

    @property
    def coded(self) -> list[str]:
        """Names of the columns that are dictionary-coded in all samples. See `Footer.coded`."""
        return [field.name for field in self._coded_fields]

    def means(self) -> dict[str, MeanSize]:
        """Return the mean sizes of a value, by name of the coded column, in the sample in which they are the largest.

        A cache of exactly the mean size would be too small by chance.

        Raises:
            OriginError: The origin does not answer, or a file does not exist.
            DataError: A sample cannot be decoded.
        """
        groups = zip(self._groups, self._blob_rows, strict=True)
        reads = [(group, rows, field) for (group, rows), field in product(groups, self._coded_fields)]
        sizes = DaemonExecutor(READS_IN_FLIGHT, "dataload-sizes").map(self._size, reads)
        means = dict.fromkeys(self.coded, MeanSize(0.0, 0.0))
        for (group, _, field), (cached, whole) in zip(reads, sizes, strict=True):
            rows, largest = max(1, group.rows), means[field.name]
            means[field.name] = MeanSize(max(largest.cached, cached / rows), max(largest.whole, whole / rows))
        return means

    @cached_property
    def _coded_fields(self) -> list[Field]:
        fields = [field for field in self._layout.ragged if field.kind != "list"] if self._groups else []
        for group in self._groups:
            stored = [field.name for field in fields if field.name not in dict(group.constants)]
            coded = self._footers.of(group).coded(group.number, stored)
            fields = [field for field in fields if field.name in coded]
        return fields

    def _size(self, read: tuple[RowGroup, int, Field]) -> tuple[int, int]:
        """Return the bytes of a column's values in a row group: in the cache, and if no rows shared values."""
        group, rows, field = read
        name = f"size {VERSION} {group.number} {min(rows, group.rows)} {digest_of(self._fill_null)} {field.name}"
        sizes = Metadata(self._blocks, group.file, name, lambda text: bytes(text).split())
        cached, whole = map(int, sizes.get_or_make(lambda: " ".join(map(str, self._sum(*read))).encode()))
        return cached, whole

    def _sum(self, group: RowGroup, rows: int, field: Field) -> tuple[int, int]:
        footer = self._footers.of(group)

        def measure(reader: RowGroupReader) -> list[tuple[int, int]]:
            return [self._sizes(table, group, field) for table in reader.tables(rows)]

        blocks, columns = self._uncached_blocks, [field.name]
        sizes = read_row_group(footer, group.file, group.number, columns, blocks, HELD_BYTES, measure)
        return sum(cached for cached, _ in sizes), sum(whole for _, whole in sizes)

    def _sizes(self, table: pa.Table, group: RowGroup, field: Field) -> tuple[int, int]:
        column = decode(table, [field], self._fill_null, group.name, self._schema)[field.name]
        if isinstance(column, Ragged):
            return (whole_bytes(column),) * 2
        if isinstance(column, Coded):
            return int(column.values.nbytes + column.spans.nbytes), whole_bytes(column)
        return (int(column.values.nbytes) if isinstance(column, Nested) else 0,) * 2

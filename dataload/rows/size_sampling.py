"""How large values are of which files have codes: footers do not tell that, a look into a few row groups does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from dataload.cache.blocks.reader import Blocks
from dataload.cache.tier import Allocate
from dataload.catalog.footer_cache import read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.formats.schema import Field, Layout
from dataload.rows.arrow_decode import Ragged, decode
from dataload.runtime.cached_property import cached_property

SAMPLES = 4  # row groups
AT_ONCE = 16  # looks
VERSION = 1  # of what is kept
NULL = ""  # takes no bytes: what stands for it, those say who want the rows
ROWS = 1 << 14  # decoded at a time


class ValueSizes:
    """Of the columns of `layout` that files have codes of.

    samples: row groups that stand for the others, the same ones on every host.

    Notes: of these, the columns that `coded` names are read, each by itself, once a host; what is found is kept like a
    footer.
    """

    def __init__(self, manifest: Manifest, layout: Layout, blocks: Blocks) -> None:
        every, some = len(manifest.row_groups), min(SAMPLES, len(manifest.row_groups))
        self.samples = [(2 * sample + 1) * every // (2 * some) for sample in range(some)]
        self._groups = [manifest.row_groups[number] for number in self.samples]
        self._layout = layout
        self._blocks = blocks
        self._aside = Aside(blocks.origin, blocks.tier, blocks.block_bytes)

    @property
    def coded(self) -> list[str]:
        """The columns of which all samples have codes; see `Footer.coded`."""
        return [field.name for field in self._coded]

    def means(self) -> dict[str, float]:
        """Bytes of a value of each of these columns, on average. Raises OriginError, DataError."""
        looks = [(group, field) for field in self._coded for group in self._groups]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dataload-sizes") as pool:
            sizes = list(pool.map(self._size, looks))
        found: Counter[str] = Counter()
        for (_, field), size in zip(looks, sizes, strict=True):
            found[field.name] += size
        rows = sum(group.rows for group in self._groups)
        return {name: found[name] / max(1, rows) for name in self.coded}

    @cached_property
    def _coded(self) -> list[Field]:
        fields = [field for field in self._layout.ragged if field.kind != "list"] if self._groups else []
        for group in self._groups:
            stored = [field.name for field in fields if field.name not in dict(group.constants)]
            coded = read_footer(group.file, group.kept, self._blocks).coded(group.number, stored)
            fields = [field for field in fields if field.name in coded]
        return fields

    def _size(self, look: tuple[RowGroup, Field]) -> int:
        """Bytes of a column's values in a row group."""
        group, field = look

        def fill(allocate: Allocate) -> None:
            found = str(sum(self._read(group, field))).encode()
            allocate(len(found))[:] = found

        key = self._blocks.key(group.file, f"size {VERSION} {group.number} {field.name}")
        return int(bytes(self._blocks.tier.get_or_fill(key, fill)))

    def _read(self, group: RowGroup, field: Field) -> Iterator[int]:
        footer, where = read_footer(group.file, group.kept, self._blocks), f"{group.file.path} row group {group.number}"
        with footer.open_row_group(group.file, group.number, [field.name], self._aside) as reader:
            for table in reader.tables(ROWS):
                column = decode(table, [field], NULL, where)[field.name]
                assert isinstance(column, Ragged)
                yield int(column.offsets[-1] - column.offsets[0])


class Aside(Blocks):
    """For a look at what is not needed yet: blocks that are kept are read, others are not made to stay."""

    @property
    def retains_blocks(self) -> bool:
        return False

"""Exact filters: the rows of a dataset that match, found once per host."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.catalog.filters import Filter, Filters, filter_of, lacks_member, shown
from dataload.catalog.footer_cache import FooterReader, Metadata, read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.catalog.pruning import decide
from dataload.catalog.selection import Mask, Selection
from dataload.errors import ConfigError
from dataload.formats.base import RowGroupReader, read_row_group
from dataload.formats.hive_partitions import with_constants
from dataload.formats.null_types import has_null_type
from dataload.formats.table_columns import TableFile
from dataload.formats.text import TextErrors
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.memory_budget import MemoryBudget
from dataload.runtime.resource_limits import usable_memory

VERSION = 3  # of cached selections
PARTS_AT_ONCE = 4
CACHED_TOGETHER = 64  # row groups: so few that other processes need not wait for long
ROW_GROUPS_AT_ONCE = 16
FILTER_DIVISOR = 32  # One part of the usable memory is for the columns of a filter, in each rank of the host.
HELD_BYTES = 8 << 20  # of each row group in flight; the rest of its columns is streamed
BATCH_ROWS = 1 << 14


def narrow(
    manifest: Manifest,
    blocks: Blocks,
    filters: Filters,
    made: Collection[str] = (),
    errors: TextErrors = "raise",
    name: str = "filters",
) -> Manifest:
    """Return the manifest of the rows that match.

    Partition keys and statistics decide first. Where they do not, the filter's columns are fetched. Each host finds the
    rows once: the result is cached, and besides for each run of files, which other datasets may share.

    Args:
        manifest: The dataset.
        blocks: Reads the objects through the cache.
        filters: As in `make_dataset`.
        made: Names of the columns that `map` made, which no filter can read.
        errors: As in `make_dataset`.
        name: The argument that the filters were given as.

    Raises:
        ConfigError: The filters are malformed, they name a column that `map` made, or no row matches.
        OriginError: The origin failed.
        DataError: A row group cannot be decoded.
    """
    if not manifest.row_groups:
        return manifest
    first = manifest.row_groups[0]
    table = first.file.columns if isinstance(first.file, TableFile) else None
    own = read_footer(first.file, first.footer_at, blocks).schema if table is None else table.schema
    own = [field.with_type(_common(field.name, field.type, manifest)) for field in own]
    keys = [manifest.schema.field(name) for name, _ in first.constants if table is None]
    chosen = filter_of(filters, manifest, pa.schema([*own, *keys]), errors)
    if mapped := {*made} & {*chosen.columns}:
        raise ConfigError(f"map made the column {min(mapped)!r}")
    if lacking := [name for name in chosen.columns if name in manifest.partial and _is_member(name, manifest, blocks)]:
        raise lacks_member(lacking[0], manifest)
    matches = Metadata(
        blocks,
        Object(first.file.path, 0, manifest.fingerprint),
        f"matches {VERSION} {chosen.digest}",
        partial(Selection.from_bytes, lengths=[group.rows for group in manifest.row_groups]),
    )
    found = matches.get()
    if found is None:
        selection = _selection(manifest, blocks, chosen).to_bytes()  # without the lock of its key: it may take minutes
        found = matches.get_or_make(lambda: selection)
    result = manifest.selected(found)
    if not result.num_rows:
        raise ConfigError(
            f"{name}={shown(filters)} leave none of {manifest.num_rows} rows: compare the values with `dataload head`"
        )
    return result


def _is_member(name: str, manifest: Manifest, blocks: Blocks) -> bool:
    """Return whether a column is a member of a struct, in the first file that has it."""
    for group in manifest.row_groups:
        if name not in dict(group.constants):
            return name not in read_footer(group.file, group.footer_at, blocks).schema.names
    return False


def _common(name: str, kind: pa.DataType, manifest: Manifest) -> pa.DataType:
    """Return the type of a file's column as filters see it: one without values, or promoted, has that of the schema."""
    schema = manifest.schema
    if name in schema.names and (name in manifest.promoted or has_null_type(kind)):
        return schema.field(name).type
    if pa.types.is_null(kind):  # It is a struct in other files.
        inner = (other.removeprefix(f"{name}.") for other in schema.names if other.startswith(f"{name}."))
        members = dict.fromkeys(path.partition(".")[0] for path in inner)
        return pa.struct([(member, _common(f"{name}.{member}", kind, manifest)) for member in members])
    if not pa.types.is_struct(kind):
        return kind
    return pa.struct([field.with_type(_common(f"{name}.{field.name}", field.type, manifest)) for field in kind])


def _selection(manifest: Manifest, blocks: Blocks, chosen: Filter) -> Selection:
    """Return the matching rows of each row group."""
    decisions = decide(manifest, blocks, chosen)
    unknown = [number for number, decision in enumerate(decisions) if decision is None]
    scanned = _Scan(manifest, blocks, chosen).masks(unknown)
    every = zip(manifest.row_groups, decisions, strict=True)
    return Selection.of(
        next(scanned) if decision is None else np.full(group.rows, decision) for group, decision in every
    )


class _Scan:
    """Finds the rows of a dataset that match a filter, by reading the filter's columns.

    The result is cached for every few row groups of a run of files, for all datasets. The filter may raise for a row
    that the dataset does not have. Then only those that it has are tried.
    """

    def __init__(self, manifest: Manifest, blocks: Blocks, chosen: Filter) -> None:
        self._groups, self._selection = manifest.row_groups, manifest.selection
        self._blocks = blocks
        self._filter = chosen
        self._footers = FooterReader(blocks, manifest.chunks_of_a_file)
        self._budget = MemoryBudget(usable_memory() // FILTER_DIVISOR)
        self._threads = DaemonExecutor(ROW_GROUPS_AT_ONCE, "dataload-filter")
        self._ended = threading.Event()  # The caller was interrupted, or a row group cannot be read.

    def masks(self, numbers: Sequence[int]) -> Iterator[Mask]:
        """Yield which rows of each of these row groups match."""
        runs = [list(run) for _, run in groupby(numbers, lambda number: self._groups[number].footer_at.run)]
        parts = [run[first : first + CACHED_TOGETHER] for run in runs for first in range(0, len(run), CACHED_TOGETHER)]
        try:
            found = DaemonExecutor(PARTS_AT_ONCE, "dataload-filter-parts").map(self._part, parts)
        finally:
            self._ended.set()
        for part, selection in zip(parts, found, strict=True):
            yield from map(selection.mask, range(len(part)))

    def _part(self, part: Sequence[int]) -> Selection:
        try:
            return self._tried(part, None)
        except ConfigError:
            if self._selection is None:
                raise
            return self._tried(part, self._selection)

    def _tried(self, part: Sequence[int], tried: Selection | None) -> Selection:
        """Return the matching ones of the rows of some row groups that are tried. None tries all."""
        groups, chosen = [self._groups[number] for number in part], self._filter
        content = [VERSION, chosen.digest, str(chosen.schema), *([] if tried is None else [tried.only(part).digest])]
        content += [
            [group.file.stable_path, group.number, group.constants, *([group.renamed] if group.renamed else [])]
            for group in groups
        ]
        digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16, person=b"matches").hexdigest()
        each = partial(self._mask, tried=tried)
        parse = partial(Selection.from_bytes, lengths=[group.rows for group in groups])
        matches = Metadata(self._blocks, groups[0].footer_at.run, f"matches {digest}", parse)
        return matches.get_or_make_once(lambda: Selection.of(self._threads.map(each, part)).to_bytes())

    def _mask(self, number: int, tried: Selection | None) -> Mask:
        if self._ended.is_set():
            raise CancelledError
        group = self._groups[number]
        footer = self._footers.of(group)
        stored = [name for name in self._filter.columns if name not in dict(group.constants)]
        with self._budget.reserve(HELD_BYTES + 2 * sum(footer.decoded_bytes(group.number, stored))):
            mask = None if tried is None else tried.mask(number)

            def matches(reader: RowGroupReader) -> Mask:
                return _matches(reader, group, self._filter, mask)

            return read_row_group(footer, group.file, group.number, stored, self._blocks, HELD_BYTES, matches)


def _matches(reader: RowGroupReader, group: RowGroup, chosen: Filter, tried: Mask | None) -> Mask:
    """Return which of the rows of a row group that are tried match. None tries all."""
    found = np.ones(group.rows, np.bool_) if tried is None else tried.copy()
    first = 0
    for table in reader.tables(BATCH_ROWS):
        part = found[first : first + len(table)]
        first += len(table)
        whole = with_constants(table, group.constants, len(table), chosen.schema)
        part[part] = chosen.mask(whole, part)
    return found

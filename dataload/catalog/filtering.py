"""Exact filters: the rows of a dataset that match, found once per host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.catalog.filters import Filter, Filters, filter_of
from dataload.catalog.footer_cache import get_or_make, read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.catalog.pruning import decide
from dataload.catalog.selection import Mask, Selection
from dataload.errors import ConfigError
from dataload.formats.hive_partitions import with_constants
from dataload.runtime.executor import DaemonExecutor

VERSION = 1  # of cached selections
RUNS_AT_ONCE = 4
ROW_GROUPS_AT_ONCE = 16
HELD_BYTES = 8 << 20  # of each row group in flight; the rest of its columns is streamed
BATCH_ROWS = 1 << 16


def narrow(manifest: Manifest, blocks: Blocks, filters: Filters) -> Manifest:
    """Return the manifest of the rows that match.

    Partition keys and statistics decide first. Where they do not, the filter's columns are fetched. Each host finds the
    rows once: the result is cached, and besides for each run of files, which other datasets may share.

    Args:
        manifest: The dataset.
        blocks: Reads the objects through the cache.
        filters: As in `make_dataset`.

    Raises:
        ConfigError: The filters are malformed, or no row matches.
        OriginError: The origin failed.
        DataError: A row group cannot be decoded.
    """
    if not manifest.row_groups:
        return manifest
    first = manifest.row_groups[0]
    own = read_footer(first.file, first.footer_at, blocks).schema
    keys = [manifest.schema.field(name) for name, _ in first.constants]
    chosen = filter_of(filters, manifest, pa.schema([*own, *keys]))
    key = blocks.key(Object(first.file.path, 0, manifest.fingerprint), f"matches {VERSION} {chosen.digest}")
    found = get_or_make(blocks, key, lambda: _selection(manifest, blocks, chosen).to_bytes())
    result = manifest.selected(Selection.from_bytes(found))
    if not result.num_rows:
        raise ConfigError(f"filters={filters} leave none of {manifest.num_rows} rows")
    return result


def _selection(manifest: Manifest, blocks: Blocks, chosen: Filter) -> Selection:
    """Return the matching rows of each row group."""
    decisions = decide(manifest, blocks, chosen)
    unknown = [group for group, decision in zip(manifest.row_groups, decisions, strict=True) if decision is None]
    scanned = _scan(unknown, blocks, chosen)
    every = zip(manifest.row_groups, decisions, strict=True)
    return Selection.of(
        next(scanned) if decision is None else np.full(group.rows, decision) for group, decision in every
    )


def _scan(groups: Sequence[RowGroup], blocks: Blocks, chosen: Filter) -> Iterator[Mask]:
    """Yield which rows of each row group match."""
    scans = DaemonExecutor(ROW_GROUPS_AT_ONCE, "dataload-filter")

    def scan(run: list[RowGroup]) -> Selection:
        parts = json.dumps([VERSION, chosen.digest, [[group.file.path, group.number] for group in run]]).encode()
        digest = hashlib.blake2b(parts, digest_size=16, person=b"matches").hexdigest()
        key = blocks.key(run[0].footer_at.run, f"matches {digest}")
        return Selection.from_bytes(
            get_or_make(
                blocks,
                key,
                lambda: Selection.of(scans.map(lambda group: _matches(group, blocks, chosen), run)).to_bytes(),
            )
        )

    runs = [list(run) for _, run in groupby(groups, lambda group: group.footer_at.run)]
    for run, selection in zip(runs, DaemonExecutor(RUNS_AT_ONCE, "dataload-filter-runs").map(scan, runs), strict=True):
        yield from map(selection.mask, range(len(run)))


def _matches(group: RowGroup, blocks: Blocks, chosen: Filter) -> Mask:
    """Return which rows of a row group match."""
    constants = dict(group.constants)
    stored = [name for name in chosen.columns if name not in constants]
    footer = read_footer(group.file, group.footer_at, blocks)
    with footer.open_row_group(group.file, group.number, stored, blocks, HELD_BYTES) as reader:
        tables = (
            with_constants(table, group.constants, len(table), chosen.schema) for table in reader.tables(BATCH_ROWS)
        )
        return np.concatenate([chosen.mask(table) for table in tables])

"""Whether the files have a shape that trains well, and the command that gives them one."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import pyarrow.compute as pc
from rich.filesize import decimal

from dataload.catalog.footer_cache import read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.doctor.finding import Case, Finding, ok, warning
from dataload.runtime.redact import redacted
from dataload.runtime.text import counted

SMALL, LARGE = 4 << 20, 256 << 20  # stored bytes of a row group, at the median
LEAST_BYTES = 64 << 20  # Of less data, the shape matters little.
LEAST_GROUPS = 4  # from which on values can be told to be sorted
MOST_FILES = 8  # whose statistics are looked at
IN_VAIN = 0.97  # what compression leaves of a column that it does not make smaller, such as JPEG


def shape(case: Case, url: str) -> Finding:
    """Report row groups that are small or large, rows sorted by a column, and compression that gains nothing."""
    assert case.reads is not None
    manifest = case.reads[1].manifest
    groups = manifest.row_groups
    size = median(group.bytes for group in groups) if groups else 0
    rows = round(median(group.rows for group in groups)) if groups else 0
    what = f"row groups have about {decimal(round(size))} and {counted(rows, 'row')}"
    faults = []
    if sum(group.bytes for group in groups) >= LEAST_BYTES and not SMALL <= size <= LARGE:
        faults.append(f"{what}, and some dozens of MB load fastest")
    fragments = list(_fragments(case, manifest))
    if column := _sorted_by(fragments):
        faults.append(f"rows are sorted by {column!r}: each row group has one value, so batches of a window mix few")
    if column := _compressed_in_vain(fragments):
        faults.append(f"column {column!r} is compressed without becoming smaller, which costs each epoch time")
    if not faults:
        return ok(what)
    return warning("; ".join(faults), f"dataload convert {shlex.quote(redacted(url))} NEW_FOLDER --shuffle 0")


def _fragments(case: Case, manifest: Manifest) -> Iterator[Any]:
    """Yield the footers of some files, as fragments of pyarrow; none of files without statistics."""
    assert case.reads is not None
    files: dict[Any, RowGroup] = {group.file: group for group in manifest.row_groups}
    for group in [*files.values()][:: -(-len(files) // MOST_FILES) or 1]:
        footer = read_footer(group.file, group.footer_at, case.reads[1].blocks)
        fragment = footer.for_statistics(pc.scalar(True), footer.schema.names)
        if fragment is not None:
            yield fragment


def _sorted_by(fragments: Sequence[Any]) -> str | None:
    """Return a column of which each row group has one value, as statistics say, but not all the same; None: none."""
    bounds: dict[str, list[tuple[Any, Any]]] = {}
    count = 0
    for each in (group for fragment in fragments for group in fragment.row_groups):
        count += each.num_rows > 1
        for name, known in (each.statistics or {}).items() if each.num_rows > 1 else ():
            bounds.setdefault(name, []).append((known["min"], known["max"]))
    for name, found in bounds.items():
        values = {low for low, high in found if low == high}
        if len(found) == count >= LEAST_GROUPS and len(values) > 1 and all(low == high for low, high in found):
            return name
    return None


def _compressed_in_vain(fragments: Sequence[Any]) -> str | None:
    """Return a large column that compression does not make smaller; None: none."""
    stored: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for metadata in (fragment.metadata for fragment in fragments):
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.compression != "UNCOMPRESSED":
                    stored[chunk.path_in_schema] += chunk.total_compressed_size
                    plain[chunk.path_in_schema] += chunk.total_uncompressed_size
    return next((name for name in plain if plain[name] >= LEAST_BYTES and stored[name] > IN_VAIN * plain[name]), None)

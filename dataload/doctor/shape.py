"""Whether the files have a shape that trains well, and the command that gives them one."""

from __future__ import annotations

import shlex
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


def shape(case: Case, url: str) -> Finding:
    """Report row groups that are small or large, and rows that are sorted by a column."""
    assert case.reads is not None
    manifest = case.reads[1].manifest
    groups = manifest.row_groups
    size = median(group.bytes for group in groups) if groups else 0
    rows = round(median(group.rows for group in groups)) if groups else 0
    what = f"row groups have about {decimal(round(size))} and {counted(rows, 'row')}"
    faults = []
    if sum(group.bytes for group in groups) >= LEAST_BYTES and not SMALL <= size <= LARGE:
        faults.append(f"{what}, and some dozens of MB load fastest")
    if column := _sorted_by(case, manifest):
        faults.append(f"rows are sorted by {column!r}: each row group has one value, so batches of a window mix few")
    if not faults:
        return ok(what)
    return warning("; ".join(faults), f"dataload convert {shlex.quote(redacted(url))} NEW_FOLDER --shuffle 0")


def _sorted_by(case: Case, manifest: Manifest) -> str | None:
    """Return a column of which each row group has one value, as statistics say, but not all the same; None: none."""
    assert case.reads is not None
    files: dict[Any, RowGroup] = {group.file: group for group in manifest.row_groups}
    chosen = [*files.values()][:: -(-len(files) // MOST_FILES) or 1]
    bounds: dict[str, list[tuple[Any, Any]]] = {}
    count = 0
    for group in chosen:
        footer = read_footer(group.file, group.footer_at, case.reads[1].blocks)
        fragment = footer.for_statistics(pc.scalar(True), footer.schema.names)
        for each in fragment.row_groups if fragment is not None else ():
            count += each.num_rows > 1
            for name, known in (each.statistics or {}).items() if each.num_rows > 1 else ():
                bounds.setdefault(name, []).append((known["min"], known["max"]))
    for name, found in bounds.items():
        values = {low for low, high in found if low == high}
        if len(found) == count >= LEAST_GROUPS and len(values) > 1 and all(low == high for low, high in found):
            return name
    return None

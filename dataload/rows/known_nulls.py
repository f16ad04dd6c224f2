"""Nulls that batches cannot hold, as the footers know them: told before the first batch instead of in the loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from dataload.catalog.manifest import Manifest
from dataload.formats.arrow_types import fixed_shape
from dataload.rows.arrow_decode import raises_for_nulls
from dataload.runtime.text import few

IN_PYTHON = "pass fill_null= to replace them, or null_masks=True to mark them"
ON_THE_COMMAND_LINE = "pass --fill-null to replace them, or --null-masks to mark them, and give the loader the same"


def known_nulls(manifest: Manifest, columns: Sequence[str], fill_null: Any, *, null_masks: bool) -> str | None:
    """Return which columns of a dataset are known to have nulls that would end a loop, and how many; None: none.

    Unknown are nulls in lists and in files without statistics. Where rows are dropped, as many nulls may be theirs.

    Args:
        manifest: The dataset.
        columns: The columns that are read.
        fill_null: The replacement of nulls.
        null_masks: Whether nulls are marked.
    """
    if null_masks:
        return None
    counts, places = Counter[str](), dict[str, tuple[str, int]]()
    for group, rows in zip(manifest.row_groups, manifest.block_lengths.tolist(), strict=True):
        known = [*group.nulls, *((name, group.rows) for name, value in group.constants if value is None)]
        for name, nulls in known:
            dropped = 0 if rows == group.rows else (group.rows - rows) * _values(manifest.schema.field(name))
            if nulls is not None and nulls > dropped:  # Those of dropped rows end no loop.
                counts[name] += nulls - dropped
                places.setdefault(name, (group.name, nulls - dropped))
    ending = [name for name in columns if name in places and raises_for_nulls(manifest.schema.field(name), fill_null)]
    if not ending:
        return None
    where, first = places[ending[0]]
    total = few(f"{name!r} {counts[name]:,}" for name in ending)
    least = "" if manifest.selection is None else "at least "
    what = f"{least}{first:,} nulls, which batches cannot hold (in all files: {least}{total})"
    return f"{where} column {ending[0]!r} has {what}"


def _values(field: pa.Field) -> int:
    """Return the most nulls that a footer counts in a row."""
    return math.prod(fixed_shape(field)[0])

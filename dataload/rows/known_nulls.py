"""Nulls that batches cannot hold, as the footers know them: told before the first batch instead of in the loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataload.catalog.manifest import Counts, Manifest
from dataload.formats.arrow_types import fixed_shape
from dataload.formats.schema import hides_nulls
from dataload.rows.arrow_decode import raises_for_nulls
from dataload.rows.read_options import ReadOptions
from dataload.runtime.text import few

IN_PYTHON = "pass fill_null= to replace them, or null_masks=True to mark them"
ON_THE_COMMAND_LINE = "pass --fill-null to replace them, or --null-masks to mark them, and give the loader the same"


def known_nulls(manifest: Manifest, columns: Sequence[str], read_options: ReadOptions) -> str | None:
    """Return which columns of a dataset are known to have nulls that would end a loop, and how many; None: none.

    Unknown are nulls in lists and in files without statistics. Where rows are dropped, as many nulls may be theirs.

    Args:
        manifest: The dataset.
        columns: The columns that are read.
        read_options: How their values are read.
    """
    schema = manifest.schema
    found: dict[str, Counts] = {}
    for name in () if read_options.null_masks else columns:
        if name not in manifest.nulls or hides_nulls(schema.field(name)):
            continue
        if raises_for_nulls(schema.field(name), read_options.fill_null):
            # Those of rows that are dropped end no loop.
            dropped = (manifest.stored_lengths - manifest.block_lengths) * _values(schema.field(name))
            found[name] = np.maximum(manifest.nulls[name] - dropped, 0)
    totals = {name: int(counts.sum()) for name, counts in found.items()}
    ending = [name for name, total in totals.items() if total]
    if not ending:
        return None
    first = int(np.flatnonzero(found[ending[0]])[0])
    total = few(f"{name!r} {totals[name]:,}" for name in ending)
    least = "" if manifest.selection is None else "at least "
    nulls = found[ending[0]][first]
    what = f"{least}{nulls:,} nulls, which batches cannot hold (in all files: {least}{total})"
    return f"{manifest.row_groups[first].name} column {ending[0]!r} has {what}"


def _values(field: pa.Field) -> int:
    """Return the most nulls that a footer counts in a row."""
    return math.prod(fixed_shape(field)[0])

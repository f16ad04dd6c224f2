"""Nulls that batches cannot hold, as the footers know them: told before the first batch instead of in the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from dataload.catalog.manifest import Manifest
from dataload.errors import DataError
from dataload.formats.schema import fields_of
from dataload.rows.arrow_decode import decode
from dataload.runtime.text import few

IN_PYTHON = "pass fill_null= to replace them, or null_masks=True to mark them"
ON_THE_COMMAND_LINE = "pass --fill-null to replace them, or --null-masks to mark them, and give the loader the same"


def known_nulls(manifest: Manifest, columns: Sequence[str], fill_null: Any, *, null_masks: bool) -> str | None:
    """Return which columns of a dataset are known to have nulls that would end a loop, and how many; None: none.

    Unknown are nulls in lists, in files without statistics, and in row groups that are selected in part.

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
        for name, nulls in known if rows == group.rows else ():  # else those of rows that are not selected
            counts[name] += nulls
            places.setdefault(name, (group.name, nulls))
    ending = [name for name in columns if counts[name] > 0 and _ends_a_loop(manifest.schema.field(name), fill_null)]
    if not ending:
        return None
    where, first = places[ending[0]]
    total = few(f"{name!r} {counts[name]:,}" for name in ending)
    return f"{where} column {ending[0]!r} has {first:,} nulls, which batches cannot hold (in all files: {total})"


def _ends_a_loop(field: pa.Field, fill_null: Any) -> bool:
    schema = pa.schema([field])
    try:
        decode(pa.table([pa.nulls(1, field.type)], schema=schema), fields_of(schema), fill_null, "", schema)
    except DataError:
        return True
    return False

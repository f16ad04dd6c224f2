"""Which rows of a file are mapped, and their names in errors."""

from __future__ import annotations

import numpy as np

from dataload.cache.blocks.reader import Blocks
from dataload.catalog.manifest import RowGroup
from dataload.catalog.selection import Mask, Selection
from dataload.runtime.redact import redacted


def mapped_of(own: Selection | None, below: Selection | None, number: int) -> Mask | None:
    """Return which stored rows of a row group are mapped; None: all.

    Args:
        own: The rows that are mapped, among all rows of the file; None: all.
        below: The rows that are stored, which include them; None: all.
        number: The row group.
    """
    if own is None:
        return None
    mask = own.mask(number)
    return mask if below is None else mask[below.mask(number)]


def stored_of(own: Selection | None, below: Selection | None, groups: int) -> Selection | None:
    """Return `mapped_of` of all row groups as a selection."""
    if own is None or below is None:
        return own
    selection = Selection.of(own.mask(number)[below.mask(number)] for number in range(groups))
    return None if selection.is_whole else selection


def where(group: RowGroup, blocks: Blocks) -> str:
    """Return the URL, without credentials, and the number of a row group."""
    return f"{redacted(blocks.origin.url_of(group.file.path))} row group {group.number}"


def rows_text(own: Selection | None, number: int, first: int, rows: int, row: int | None) -> str:
    """Return the numbers in the file of mapped rows as text.

    Args:
        own: The rows that are mapped; None: all.
        number: The row group.
        first: The first mapped row of a chunk.
        rows: Rows of the chunk.
        row: The row of the chunk, or None for all of them.
    """
    span = [first, first + rows - 1] if row is None else [first + row]
    in_file = span if own is None else np.flatnonzero(own.mask(number))[span].tolist()
    return f"row {in_file[0]}" if row is not None else f"rows {in_file[0]} to {in_file[-1]}"

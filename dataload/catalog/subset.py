"""Subsets of a dataset by row number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.catalog.manifest import Manifest
from dataload.catalog.selection import Mask, Selection
from dataload.errors import ConfigError


def subset(manifest: Manifest, rows: npt.NDArray[Any]) -> Manifest:
    """Return the manifest of some rows.

    Args:
        manifest: The dataset.
        rows: Row numbers, each at most once, negative ones from the end: integers [n]. Or which rows to keep: bool
            [rows of the dataset].

    Raises:
        ConfigError: There are no rows, a number comes twice, or the mask has another length than the dataset.
        IndexError: The dataset has no such row.
    """
    mask = rows if rows.dtype == np.bool_ else _mask(rows, manifest.num_rows)
    if rows.dtype != np.bool_ and np.count_nonzero(mask) < len(rows):
        raise ConfigError("a row number comes twice: a dataset has each row once, and mix repeats rows by weights")
    if mask.shape != (manifest.num_rows,):
        raise ConfigError(
            f"the mask has the shape {mask.shape}, and the dataset {manifest.num_rows} rows: give a value for each row"
        )
    if not mask.any():
        raise ConfigError("no row is selected: select at least one")
    return manifest.selected(Selection.of(_by_row_group(mask, manifest)))


def excluded(manifest: Manifest, rows: npt.NDArray[Any]) -> Manifest:
    """Return the manifest without some rows.

    Args:
        manifest: The dataset.
        rows: Row numbers, negative ones from the end: integers [n].

    Raises:
        ConfigError: No row is left, or these are no row numbers.
        IndexError: The dataset has no such row.
    """
    if not rows.size:
        return manifest
    if rows.dtype == np.bool_:
        raise ConfigError("exclude takes row numbers, not a mask: give it np.flatnonzero(mask), or select(~mask)")
    mask = ~_mask(rows, manifest.num_rows)
    if not mask.any():
        raise ConfigError("exclude leaves no row: name fewer")
    return manifest.selected(Selection.of(_by_row_group(mask, manifest)))


def _mask(rows: npt.NDArray[Any], total: int) -> Mask:
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise ConfigError(f"rows must be a list of row numbers, not {rows.dtype} of shape {rows.shape}")
    for outside in (rows.min(), rows.max()) if rows.size else ():
        if not -total <= outside < total:
            raise IndexError(f"row {outside} of a dataset of {total} rows: row numbers count from 0")
    mask = np.zeros(total, np.bool_)
    mask[rows.astype(np.int64, copy=False)] = True  # Negative numbers count from the end.
    return mask


def _by_row_group(mask: Mask, manifest: Manifest) -> Iterator[Mask]:
    """Yield the rows to keep of each row group, among all its rows."""
    ends = np.cumsum(manifest.block_lengths)
    for number, part in enumerate(np.split(mask, ends[:-1])):
        yield part if manifest.selection is None else manifest.selection.within(number, part)

"""Decoded columns as numpy arrays, and as Arrow arrays where they are nested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.formats.schema import NULL

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dense:
    """A column with one value, or one array of fixed shape, per row.

    Attributes:
        values: The values, [rows, …] of the column's dtype.
    """

    values: Array


@dataclass(frozen=True)
class Ragged:
    """A column with a varying number of values per row. Row i is values[offsets[i]:offsets[i + 1]].

    Attributes:
        values: Numbers, or bytes as uint8, [total].
        offsets: Where each row starts, int64 [rows + 1].
        valid: Which rows are not null, bool [rows]; None: all. A null has no values.
    """

    values: Array
    offsets: Array
    valid: Array | None = None


@dataclass(frozen=True)
class Coded:
    """A column of strings or bytes whose rows share values, as dictionary codes do.

    Attributes:
        values: The bytes of the distinct values, uint8 [total].
        spans: `SPAN` of each row in them, uint32 [rows, 2].
    """

    values: Array
    spans: Array


@dataclass(frozen=True)
class Nested:
    """A column of nested values.

    Attributes:
        values: An Arrow array that can be gathered, see `plain`.
    """

    values: pa.Array


Column = Dense | Ragged | Coded | Nested


def concatenate(parts: Sequence[Column]) -> Column:
    """Return the rows of several columns of one kind as one column. There is at least one."""
    if len(parts) == 1:
        return parts[0]
    nested = [part.values for part in parts if isinstance(part, Nested)]
    if nested:
        return Nested(pa.concat_arrays(nested))
    values = np.concatenate([part.values for part in parts])
    if any(isinstance(part, Coded) for part in parts):
        starts = np.cumsum([0, *(len(part.values) for part in parts[:-1])])
        return Coded(
            values, np.concatenate([_moved(spans_of(part), by) for part, by in zip(parts, starts, strict=True)])
        )
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return Dense(values)
    lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
    masks = [np.ones(len(part.offsets) - 1, np.bool_) if part.valid is None else part.valid for part in ragged]
    has_nulls = any(part.valid is not None for part in ragged)
    return Ragged(values, np.concatenate(([0], np.cumsum(lengths))), np.concatenate(masks) if has_nulls else None)


def spans_of(column: Column) -> Array:
    """Return the `SPAN` of each row of a ragged column, uint32 [rows, 2]. The values begin with those of row 0."""
    if isinstance(column, Coded):
        return column.spans
    assert isinstance(column, Ragged)
    spans = np.stack([column.offsets[:-1] - column.offsets[0], np.diff(column.offsets)], axis=1).astype(np.uint32)
    if column.valid is not None:
        spans[~column.valid, 1] = NULL
    return spans


def _moved(spans: Array, by: int) -> Array:
    return spans + np.array([by, 0], np.uint32)

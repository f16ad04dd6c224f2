"""A whole column as a NumPy array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from dataload.rows.columns import Array

BYTES_AT_ONCE = 32 << 20  # of rows that are gathered


def whole_column(parts: Iterable[Any], rows: int) -> Array:
    """Return consecutive parts of a column, of which there is at least one, as one array.

    Tensors become an array of their dtype, [rows, …]. All other values become objects, [rows]: strings, bytes, arrays,
    or Python values; None for a null. Each part is copied before the next one is taken.
    """
    whole, done = np.empty(0), 0
    for part in parts:
        values = part.numpy() if isinstance(part, torch.Tensor) else _objects(part)
        if not done:
            whole = np.empty((rows, *values.shape[1:]), values.dtype)
        whole[done : done + len(values)] = values
        done += len(values)
    return whole


def _objects(values: list[Any]) -> Array:
    array = np.empty(len(values), np.object_)
    array[:] = [_owned(value) for value in values]
    return array


def _owned(value: Any) -> Any:
    """Return a value that keeps nothing else in memory."""
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    return bytes(value) if isinstance(value, memoryview) else value

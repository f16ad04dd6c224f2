"""The shuffle quality of a window, and the default window that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.placement import window_borders

MEMORY = 2**32  # bytes of two windows of 16 row groups of 128 MiB, the target size of Parquet writers
BATCH = 256  # assumed batch size: the order must not depend on the batch size that the user chooses
GOAL = 2.0  # variance ratio that is good enough: a wider window costs more than it improves
UNKNOWN = 16  # row groups, if their bytes are unknown


@dataclass(frozen=True)
class WindowTrade:
    """The quality of a window.

    Args:
        window: Row groups in the window, over all streams.
        variance_ratio: Expected for batches of `batch_size` rows over data sorted by label; 1 is a uniform shuffle.
    """

    window: int
    variance_ratio: float


def weigh_window(window: int, block_lengths: Sequence[int] | npt.ArrayLike, batch_size: int = BATCH) -> WindowTrade:
    """Return the quality of windows of m out of M row groups.

    An epoch has V windows of 1, 2, 4, … and then m row groups (`window_borders`). The variance ratio for batches of b
    rows is 1 + (b - 1) (V - 1) / M, and V is about M / m, as in `shuffle_quality`. A window with fewer than b rows
    counts with its rows in place of b, because a batch holds all of them. A batch of all rows has ratio 1.

    Args:
        window: Row groups in a window.
        block_lengths: Rows of each row group: int64 [M].
        batch_size: Rows of a global batch.
    """
    lengths = np.asarray(block_lengths, np.int64)
    count, rows = len(lengths), int(lengths.sum())
    window = max(1, min(window, count))
    ends = np.append(window_borders(count, window)[1:], count)  # of windows
    window_rows = np.diff(ends, prepend=0) * (rows / max(1, count))  # on average
    effects = np.clip(window_rows, 1, batch_size) - 1 if batch_size < rows else np.zeros(1)
    return WindowTrade(window, 1 + float(effects.mean()) * (len(effects) - 1) / max(1, count))


def default_window(
    block_lengths: Sequence[int] | npt.ArrayLike, block_bytes: Sequence[int] | npt.ArrayLike | None = None
) -> int:
    """Return the default number of row groups in a window, from the footers alone.

    It is the smallest number with a variance ratio of GOAL over data sorted by label, without the small first windows.
    Two windows must fit into MEMORY, but a window has at least two row groups. If the bytes are unknown, UNKNOWN is the
    limit instead of MEMORY.
    """
    count = len(np.asarray(block_lengths))
    good = -(-(BATCH - 1) * count // max(1, int(count * (GOAL - 1)) + BATCH - 1))
    if block_bytes is None:
        return max(1, min(good, count, UNKNOWN))
    largest = np.cumsum(np.sort(np.asarray(block_bytes, np.int64))[::-1])
    fitting = int(np.searchsorted(largest, MEMORY, "right")) // 2 if count and largest[-1] > MEMORY else count
    return max(1, min(good, count, max(2, fitting)))

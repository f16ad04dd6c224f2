"""What a window costs and what it buys: the trade behind the default one, to be shown before a byte is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.placement import window_borders

MEMORY = 2**32  # bytes of two windows: of 16 row groups each, of 128 MiB, the size that Parquet's writers aim at
BATCH = 256  # rows of the batch that quality is judged by: the order must not depend on the batch that is asked for
GOAL = 2.0  # variance ratio that is good enough: a wider window would cost more than it shows
UNKNOWN = 16  # row groups, where their bytes are not known


@dataclass(frozen=True)
class WindowTrade:
    """A window of so many row groups, over all streams.

    variance_ratio: expected, of batches of `batch_size` rows over data sorted by label; 1 is a uniform shuffle.
    first_row_groups, first_bytes: at most, that the first batch waits for on each node, with one stream a node and the
    row groups aside that borders of streams cut; bytes: of the two windows that are held at a time. Bytes are as the
    footers say them, and 0 where they are not known.
    """

    window: int
    variance_ratio: float
    first_row_groups: int
    first_bytes: int
    bytes: int


def weigh_window(
    window: int,
    block_lengths: Sequence[int] | npt.ArrayLike,
    block_bytes: Sequence[int] | npt.ArrayLike | None = None,
    batch_size: int = BATCH,
) -> WindowTrade:
    """The trade of windows of m out of M row groups, block_lengths rows and block_bytes bytes each: int64 [M].

    An epoch's windows are of 1, 2, 4, … and then m row groups (`window_borders`). Of V windows each adds as much to the
    variance ratio, 1 + (b - 1) (V - 1) / M; without the small ones V is M / m, as in `shuffle_quality`. Of windows with
    fewer rows than a batch it is these in the place of b, for a batch has all of them; and a batch of all rows is as
    any order has it. The first batch draws on windows until they have as many rows.
    """
    lengths = np.sort(np.asarray(block_lengths, np.int64))
    sizes = np.zeros_like(lengths) if block_bytes is None else np.asarray(block_bytes, np.int64)
    held = np.concatenate(([0], np.cumsum(np.sort(sizes)[::-1])))
    count = len(lengths)
    window = max(1, min(window, count))
    ends = np.append(window_borders(count, window)[1:], count)  # of the windows, if the smallest row groups came first
    rows = np.concatenate(([0], np.cumsum(lengths)))
    drawn_from = np.diff(ends, prepend=0) * (rows[-1] / max(1, count))  # rows of each window, on average
    together = np.clip(drawn_from, 1, batch_size) - 1 if batch_size < rows[-1] else np.zeros(1)
    first = int(ends[np.searchsorted(rows[ends], min(batch_size, rows[-1]))])
    return WindowTrade(
        window=window,
        variance_ratio=1 + float(together.mean()) * (len(together) - 1) / max(1, count),
        first_row_groups=first,
        first_bytes=int(held[first]),
        bytes=int(held[min(2 * window, count)]),
    )


def default_window(
    block_lengths: Sequence[int] | npt.ArrayLike, block_bytes: Sequence[int] | npt.ArrayLike | None = None
) -> int:
    """Row groups in a window when the user does not say: it follows from the footers alone.

    As few as reach a variance ratio of GOAL over data sorted by label, the epoch's first windows aside, but no more
    than fit twice into MEMORY, and no fewer than two. Where bytes are not known, UNKNOWN takes the place of MEMORY.
    """
    count = len(np.asarray(block_lengths))
    good = -(-(BATCH - 1) * count // max(1, int(count * (GOAL - 1)) + BATCH - 1))
    if block_bytes is None:
        return max(1, min(good, count, UNKNOWN))
    held = np.cumsum(np.sort(np.asarray(block_bytes, np.int64))[::-1])
    fitting = int(np.searchsorted(held, MEMORY, "right")) // 2 if count and held[-1] > MEMORY else count
    return max(1, min(good, count, max(2, fitting)))

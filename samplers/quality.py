"""Measures of how well an order is shuffled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.order import Order

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShuffleQuality:
    """The quality of one epoch's order.

    Args:
        adjacency: Share of all rows but the first that directly follow their predecessor in the file: 1 in file order,
            about 1 / n after a uniform shuffle.
        variance_ratio: Variance of the batches' shares of row groups, relative to a uniform shuffle, which has 1.
        exactly_once: Whether the order has each row exactly once.
    """

    adjacency: float
    variance_ratio: float
    exactly_once: bool


def shuffle_quality(
    order: Order | Iterable[int] | Int64, block_lengths: Sequence[int] | npt.ArrayLike, batch_size: int
) -> ShuffleQuality:
    """Return the shuffle quality of one whole epoch.

    The variance ratio is the sum over batches t and row groups g of (c_tg - b_t p_g)**2, divided by its expectation for
    batches drawn without replacement. Batch t has b_t rows, c_tg of them from g, and g has the share p_g of all rows.
    The expectation is hypergeometric: the sum of b_t p_g (1 - p_g) (n - b_t) / (n - 1).

    For windows of m out of M equal row groups the ratio is about 1 + (b - 1) (1 - m / M) / m. This is the design effect
    1 + (b - 1) rho of cluster sampling (Kish, Survey Sampling, 1965) for a property that is constant in each row group.

    Args:
        order: Row numbers of an epoch in delivery order: an array or an iterable of ints; or an `Order`, whose epoch 0
            is measured.
        block_lengths: Rows of each row group.
        batch_size: Rows of one step, over all ranks.

    Example:
        Eight row groups of 100 rows, in file order and fully shuffled:

        >>> from dataload.samplers import Permutation, shuffle_quality
        >>> sequential = shuffle_quality(range(800), [100] * 8, batch_size=50)
        >>> sequential.adjacency, sequential.exactly_once
        (1.0, True)
        >>> shuffled = shuffle_quality(Permutation(800, seed=0, epoch=0)[:], [100] * 8, batch_size=50)
        >>> sequential.variance_ratio > 40, shuffled.variance_ratio < 1.5
        (True, True)
    """
    if isinstance(order, Order):
        order = order.rows(0, np.arange(order.n))
    rows = order if isinstance(order, np.ndarray) else np.fromiter(order, np.int64)
    lengths = np.asarray(block_lengths, np.int64)
    n = int(lengths.sum())
    known = rows[(rows >= 0) & (rows < n)]
    return ShuffleQuality(
        adjacency=float(np.mean(np.diff(rows) == 1)) if len(rows) > 1 else 0.0,
        variance_ratio=_variance_ratio(known, lengths, batch_size),
        exactly_once=len(rows) == n and bool((np.bincount(known, minlength=n) == 1).all()),
    )


def _variance_ratio(rows: Int64, lengths: Int64, batch_size: int) -> float:
    """Return the variance ratio, or 1.0 if no order could vary: for one row group or one batch."""
    n = int(lengths.sum())
    shares = lengths / max(n, 1)
    batches = np.arange(len(rows)) // batch_size
    blocks = np.searchsorted(np.cumsum(lengths), rows, "right")
    pairs, counts = np.unique(batches * len(lengths) + blocks, return_counts=True)
    sizes = np.bincount(batches)
    # The expanded square: most pairs of batch and row group have no common row, and only their (b_t p_g)**2 remains.
    expected_counts = sizes[pairs // len(lengths)] * shares[pairs % len(lengths)]
    squares = (counts.astype(float) - 2 * expected_counts) @ counts
    observed = squares + sizes.astype(float) @ sizes * (shares @ shares)
    expected = (sizes @ (n - sizes)) / max(n - 1, 1) * (1 - shares @ shares)
    return float(observed / expected) if expected > 0 else 1.0

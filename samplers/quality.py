"""How well an order is shuffled, measured on the order itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.order import Order

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShuffleQuality:
    """adjacency: of all rows but the first, the share that come right after their predecessor in the file: 1 in file
        order, about 1 / n when shuffled uniformly.
    variance_ratio: how much more the batches' shares of the row groups vary than under a uniform shuffle, which has 1.
    exactly_once: every row is there, none twice.
    """

    adjacency: float
    variance_ratio: float
    exactly_once: bool


def shuffle_quality(
    order: Order | Iterable[int] | Int64, block_lengths: Sequence[int] | npt.ArrayLike, batch_size: int
) -> ShuffleQuality:
    """Quality of an epoch's order, its edges included.

    order: the rows of an epoch in the order of their delivery, numbered in file order: an array, or any iterable of
        ints; or an `Order`, of which epoch 0 is measured.
    block_lengths: rows of each row group.
    batch_size: rows that meet in one step, over all ranks.

    The variance ratio is sum over batches t and row groups g of (c_tg - b_t p_g)**2, c_tg rows of g among the b_t of
    batch t, p_g its share of all rows, over the expectation of that sum when batches are drawn without replacement
    (hypergeometric: b_t p_g (1 - p_g) (n - b_t) / (n - 1)). For windows of m out of M equal row groups it is about
    1 + (b - 1) (1 - m / M) / m: the design effect 1 + (b - 1) rho of cluster sampling (Kish, Survey Sampling, 1965)
    for whatever property rows of one row group share wholly; less so, by rho, for one that they share in part.
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
    """1.0 where no order of the rows could vary: one row group, or one batch."""
    n = int(lengths.sum())
    shares = lengths / max(n, 1)
    batches = np.arange(len(rows)) // batch_size
    blocks = np.searchsorted(np.cumsum(lengths), rows, "right")
    pairs, counts = np.unique(batches * len(lengths) + blocks, return_counts=True)
    sizes = np.bincount(batches)
    # The square written out: of the many (batch, row group) that have no row in common, only b_t p_g is left.
    met = sizes[pairs // len(lengths)] * shares[pairs % len(lengths)]
    squares = (counts.astype(float) - 2 * met) @ counts
    observed = squares + sizes.astype(float) @ sizes * (shares @ shares)
    expected = (sizes @ (n - sizes)) / max(n - 1, 1) * (1 - shares @ shares)
    return float(observed / expected) if expected > 0 else 1.0

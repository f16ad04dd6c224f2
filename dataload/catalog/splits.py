"""Splits of a dataset, such as training and validation. Each process gets the same splits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from dataload.catalog.manifest import Manifest, RowGroup
from dataload.catalog.subset import subset
from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key
from dataload.samplers.permutation import KeyedPermutation

TOLERANCE = 1e-6  # of the sum of the fractions
COARSE = 0.02  # by which whole row groups may miss a fraction of the rows


def split(manifest: Manifest, fractions: Sequence[float], seed: int) -> list[Manifest]:
    """Return disjoint splits that cover the dataset, with these fractions of the rows to within `COARSE`.

    Row groups are sorted by a hash of (seed, name and size of the file, number), and that order is cut. So the row
    groups of a dataset that grows keep their relative order, and copies in other folders are split alike. Each split
    has at least one row, and is in file order.

    If row groups are so few or so uneven that a split would miss its fraction, the rows of those at the borders are
    divided at random.

    Raises:
        ConfigError: The fractions are not positive or do not sum to 1, or there are fewer rows than splits.
    """
    if not isinstance(fractions, Iterable) or not all(isinstance(fraction, Real) for fraction in fractions):
        raise ConfigError(f"fractions={fractions!r} must be a list of numbers, such as [0.9, 0.1]")
    fractions = list(fractions)
    if not fractions or not all(fraction > 0 for fraction in fractions) or abs(math.fsum(fractions) - 1) > TOLERANCE:
        raise ConfigError(f"fractions={fractions} must be positive and sum to 1, not {math.fsum(fractions):g}")
    groups = manifest.row_groups
    lengths = manifest.block_lengths
    filled = np.flatnonzero(lengths).tolist()
    seen = Counter[tuple[str, int, int]]()
    keys = {}
    for number in filled:
        identity = _identity(groups[number])
        again = [seen[identity]] if identity in seen else []  # Files of one name and size do not follow one another.
        keys[number] = derive_key("split", seed, *identity, *again)
        seen[identity] += 1
    order = sorted(filled, key=lambda number: (keys[number], number))
    if len(order) < len(fractions):
        return _split_rows(manifest, fractions, order, keys)
    rows = lengths[order]
    spans = [slice(*span) for span in pairwise([0, *_borders(rows, fractions), None])]
    shares = [rows[span].sum() / rows.sum() for span in spans]
    if not np.allclose(shares, fractions, rtol=0, atol=COARSE):
        return _split_rows(manifest, fractions, order, keys)
    order += np.flatnonzero(lengths == 0).tolist()  # Row groups without rows go to the last split.
    return [manifest.only(order[span]) for span in spans]


def _identity(group: RowGroup) -> tuple[str, int, int]:
    return PurePosixPath(group.file.stable_path).name, group.file.size, group.number


def _split_rows(
    manifest: Manifest, fractions: Sequence[float], order: Sequence[int], keys: Mapping[int, int]
) -> list[Manifest]:
    """Return splits of the row groups in this order, of which those at the borders are divided at random."""
    total = manifest.num_rows
    if total < len(fractions):
        raise ConfigError(
            f"fractions={fractions} need {len(fractions)} rows, and the dataset has {total}: make fewer splits"
        )
    borders = [0]
    for number in range(1, len(fractions)):
        border = max(round(math.fsum(fractions[:number]) * total), borders[-1] + 1)
        borders.append(min(border, total - len(fractions) + number))
    lengths = manifest.block_lengths
    starts = np.cumsum(lengths) - lengths
    splits, position = np.empty(total, np.int32), 0  # of each row
    for group in order:
        rows = int(lengths[group])
        own = np.searchsorted(borders, np.arange(position, position + rows), "right") - 1
        if own[0] != own[-1]:
            own = own[KeyedPermutation(rows, derive_key("split rows", keys[group]))[np.arange(rows)]]
        splits[starts[group] : starts[group] + rows] = own
        position += rows
    return [subset(manifest, splits == number) for number in range(len(fractions))]


def _borders(rows: npt.NDArray[np.int64], fractions: Sequence[float]) -> list[int]:
    """Return the indices at which to cut a sequence of row groups into splits of at least one row group each."""
    ends = np.concatenate(([0], np.cumsum(rows)))
    borders = [0]
    for number in range(1, len(fractions)):
        first, last = borders[-1] + 1, len(rows) - (len(fractions) - number)
        target = math.fsum(fractions[:number]) * ends[-1]
        borders.append(first + int(np.argmin(np.abs(ends[first : last + 1] - target))))
    return borders[1:]

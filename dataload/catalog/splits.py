"""A dataset in parts, such as for training and validation: whole row groups, the same ones in every process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key

TOLERANCE = 1e-6  # of the sum of the fractions


def split(manifest: Manifest, fractions: Sequence[float], seed: int) -> list[Manifest]:
    """Disjoint parts that together are everything, of as near these fractions of the rows as whole row groups allow.

    Row groups are put in the order of a hash of (seed, path, number), and that is cut: so that those of a dataset
    which has grown stay in their old order. Inside a part they are in file order; each part has one with rows.

    Raises ConfigError for fractions that are not positive or do not sum to 1, and for fewer row groups than parts.
    """
    fractions = list(fractions)
    if not fractions or not all(fraction > 0 for fraction in fractions) or abs(math.fsum(fractions) - 1) > TOLERANCE:
        raise ConfigError(f"fractions={fractions} must be positive and sum to 1, not {math.fsum(fractions):g}")
    groups = manifest.row_groups
    filled = [number for number, group in enumerate(groups) if group.rows]
    if len(filled) < len(fractions):
        raise ConfigError(
            f"fractions={fractions} ask for {len(fractions)} parts of whole row groups, and the dataset has "
            f"{len(filled)} with rows: ask for fewer parts, or write smaller row groups"
        )
    keys = {number: derive_key("split", seed, groups[number].file.path, groups[number].number) for number in filled}
    order = sorted(filled, key=lambda number: (keys[number], number))
    # Those without rows go where they lie in no one's way.
    order += [number for number, group in enumerate(groups) if not group.rows]
    borders = _borders([groups[number].rows for number in order[: len(filled)]], fractions)
    parts = zip([0, *borders], [*borders, len(order)], strict=True)
    return [manifest.only(order[start:stop]) for start, stop in parts]


def _borders(rows: Sequence[int], fractions: Sequence[float]) -> list[int]:
    """Where to cut a sequence of row groups into parts of at least one each: after as many as stand here."""
    ends = np.cumsum([0, *rows])
    borders = [0]
    for number in range(1, len(fractions)):
        first, last = borders[-1] + 1, len(rows) - (len(fractions) - number)
        target = math.fsum(fractions[:number]) * ends[-1]
        borders.append(first + int(np.argmin(np.abs(ends[first : last + 1] - target))))
    return borders[1:]

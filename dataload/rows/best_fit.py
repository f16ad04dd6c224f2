"""Best fit: which documents share a sequence if none of them is cut.

Best-fit decreasing takes the sizes from the largest to the smallest, and puts each into the fullest bin that has room
for it. It takes at most 11/9 of the fewest bins (Johnson, "Near-optimal bin packing algorithms", 1973); of documents,
whose small ones fill the gaps, it takes hardly more than the fewest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from dataload.rows.columns import Array

SHIFTS = (0, 3, 6)
"""Sizes are sorted as if each was larger by up to 1/2**shift, by chance. The first that needs no more bins is used."""


def best_fit(sizes: Sequence[int], room: int) -> tuple[list[int], int]:
    """Return the bin of each size, each taken in turn, and the number of bins.

    Args:
        sizes: Sizes, each in [1, room].
        room: Size of a bin.
    """
    bins: list[int] = []
    rests: list[int] = []  # the different rooms that are left in bins, ascending
    with_rest: dict[int, list[int]] = {}
    count = 0
    for size in sizes:
        place = bisect_left(rests, size)
        if place == len(rests):
            found, rest, count = count, room, count + 1
        else:
            rest = rests[place]
            found = (same := with_rest[rest]).pop()
            if not same:
                del rests[place], with_rest[rest]
        bins.append(found)
        rest -= size
        if rest in with_rest:
            with_rest[rest].append(found)
        elif rest:
            with_rest[rest] = [found]
            insort(rests, rest)
    return bins, count


def fewest(sizes: Array, room: int) -> int:
    """Return how many bins best-fit decreasing takes for these sizes, int64 [n], each in [1, room]."""
    return best_fit(np.sort(sizes)[::-1].tolist(), room)[1]


def shuffled(sizes: Array, room: int, count: int, first: int = 0) -> tuple[Array, int]:
    """Return the bin of each size, int64 [n], in as many bins as `fewest` takes: `count`.

    The order of the sizes is that of a shuffle, and decides which ones share a bin. So neighbours differ from epoch to
    epoch, also where no two sizes are equal: each size is taken as a larger one by chance, as long as that needs no
    more bins.

    Args:
        sizes: As for `fewest`.
        room: The same.
        count: As above.
        first: The first place in `SHIFTS` to try.

    Returns: the bins, and the place of what worked.
    """
    order = np.arange(len(sizes))
    for tried in range(first, len(SHIFTS) + 1):
        # In integers, so that each machine finds the same bins.
        keys = sizes if tried == len(SHIFTS) else sizes * ((len(sizes) << SHIFTS[tried]) + order)
        taken = np.argsort(-keys, kind="stable")
        found, needed = best_fit(sizes[taken].tolist(), room)
        if needed == count:
            break
    bins = np.empty(len(sizes), np.int64)
    bins[taken] = found
    return bins, tried

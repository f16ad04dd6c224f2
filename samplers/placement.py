"""The placement of row groups in streams and windows, which all epochs share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.keys import derive_key
from dataload.samplers.partition import even_split
from dataload.samplers.permutation import KeyedPermutation

Int64 = npt.NDArray[np.int64]

FIRST_ROWS, MOST_ROWS = 1 << 10, 1 << 16  # of parts of an epoch, where it has no windows


@dataclass(frozen=True, eq=False)
class Placement:
    """All rows as one line of S consecutive streams; a *place* is an index in that line.

    A piece is the part of a row group that belongs to one stream: the whole row group, unless a border of streams cuts
    it.

    Args:
        cuts: First place of each stream, then n: int64 [S + 1].
        first: Number in the dataset of the first row of each piece: int64 [P].
        length: Rows of each piece, at least 1: int64 [P].
        pieces: First piece of each stream, then P: int64 [S + 1].
        windows: First piece of each window, stream by stream, then P: int64 [V + 1].
        first_windows: First window of each stream, then V: int64 [S + 1].
    """

    cuts: Int64
    first: Int64
    length: Int64
    pieces: Int64
    windows: Int64
    first_windows: Int64


def place_row_groups(starts: Int64, num_streams: int, width: int | None, dataset_key: bytes) -> Placement:
    """Return the placement of a dataset's row groups.

    It depends on the dataset alone, so all seeds, epochs and jobs share a node's cache. Each stream gets random row
    groups, so that sorted data does not leave one node with one label. A single stream keeps file order: each epoch
    shuffles it anyway.

    Args:
        starts: First row of each row group, then the number of rows: int64 [M + 1].
        num_streams: Number of streams.
        width: Row groups in a window of one stream; None: all.
        dataset_key: Identifies the dataset.
    """
    first, length = starts[:-1], np.diff(starts)
    if not length.all():
        first, length = first[length > 0], length[length > 0]
    cuts = even_split(int(starts[-1]), num_streams)
    pieces = np.array([0, len(length)])
    if num_streams > 1:
        groups = KeyedPermutation(len(length), derive_key("placement", dataset_key))[:]
        first, length = first[groups], length[groups]
        ends = np.cumsum(length)
        inner = cuts[cuts > 0]
        containing = np.searchsorted(ends, inner)
        inside = containing != np.searchsorted(ends, inner, "right") - 1  # cuts that are no border of row groups
        if inside.any():
            sources = np.insert(np.arange(len(groups)), containing[inside], containing[inside])
            first = (first - ends + length)[sources]
            ends = np.insert(ends, containing[inside], inner[inside])
            length = np.diff(ends, prepend=0)
            first += ends - length
        pieces = np.searchsorted(ends, cuts, "right")
    windows = [begin + window_borders(end - begin, width) for begin, end in itertools.pairwise(pieces.tolist())]
    return Placement(
        cuts=cuts,
        first=first,
        length=length,
        pieces=pieces,
        windows=np.concatenate([*windows, pieces[-1:]]),
        first_windows=np.concatenate(([0], np.cumsum([len(borders) for borders in windows]))),
    )


def window_borders(num_pieces: int, width: int | None) -> Int64:
    """Return the first piece of each window: windows of 1, 2, 4, … and then `width` pieces, or one if width is None.

    Small windows come first because a batch needs every row group of its window: the first batch must not wait long.
    """
    if width is None:
        return np.arange(min(1, num_pieces))
    width = min(width, max(1, num_pieces))
    ramp = 2 ** np.arange((width - 1).bit_length()) - 1
    borders = np.concatenate((ramp, np.arange(2 ** len(ramp) - 1, num_pieces, width)))
    return borders[borders < num_pieces]


def row_borders(n: int, most: int = MOST_ROWS) -> Int64:
    """Return the first row of each part of n rows, then n: parts of 1,024, 2,048, 4,096, … and then `most` rows."""
    starts = window_borders(-(-n // FIRST_ROWS), max(1, most // FIRST_ROWS)) * FIRST_ROWS
    return np.append(starts, n)

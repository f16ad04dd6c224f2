"""What is the same in every epoch: the row groups laid end to end, cut into streams, in windows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.keys import derive_key
from dataload.samplers.partition import even_split
from dataload.samplers.permutation import KeyedPermutation

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placement:
    """All rows, row group after row group, in S streams one behind the other; a *place* is a number in that line.

    A piece is what one stream has of one row group: all of it, but where a border of streams runs through it.

    cuts: places where streams begin, and n: int64 [S + 1].
    first: the row with which each piece begins, by its number in the dataset: int64 [P].
    length: rows of each piece, none empty: int64 [P].
    pieces: the first piece of each stream, and P: int64 [S + 1].
    windows: the first piece of each window, stream after stream, and P: int64 [V + 1].
    first_windows: the first window of each stream, and V: int64 [S + 1].
    """

    cuts: Int64
    first: Int64
    length: Int64
    pieces: Int64
    windows: Int64
    first_windows: Int64


def place(starts: Int64, num_streams: int, width: int | None, dataset_key: bytes) -> Placement:
    """The placement of row groups that begin at `starts`, int64 [M + 1], the number of rows at the end.

    It depends on the dataset alone, so that all seeds, epochs and jobs share what a node has cached. Streams draw their
    row groups at random, so that sorted data does not leave one node with one label; a single stream has them all, and
    the epochs shuffle them. width: row groups in a window of one stream; None: all.
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
        at = np.searchsorted(ends, inner)
        through = at != np.searchsorted(ends, inner, "right") - 1  # cuts that are no border of row groups
        if through.any():
            which = np.insert(np.arange(len(groups)), at[through], at[through])
            first = (first - ends + length)[which]
            ends = np.insert(ends, at[through], inner[through])
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
    """The first piece of each window: windows of 1, 2, 4, … and then `width` pieces; one window when width is None.

    The small ones come first because a batch needs every row group of its window: the first batch must not wait long.
    """
    if width is None:
        return np.arange(min(1, num_pieces))
    width = min(width, max(1, num_pieces))
    ramp = 2 ** np.arange((width - 1).bit_length()) - 1
    borders = np.concatenate((ramp, np.arange(2 ** len(ramp) - 1, num_pieces, width)))
    return borders[borders < num_pieces]

"""The sequence of sources in one block: earliest deadline first, then shuffled within what the quotas allow."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataload.samplers.keys import mix
from dataload.samplers.mixture.borders import BLOCK, Borders
from dataload.samplers.mixture.quotas import Local

Int64 = npt.NDArray[np.int64]
Int16 = npt.NDArray[np.int16]
Bool = npt.NDArray[np.bool_]

PART = 128  # positions walked one by one; all parts of a block are walked together
NEVER = np.iinfo(np.int64).max
FAR = 1 << 14  # more than all exchanges together move a unit
STRIDES = (64, 32, 16, 8, 4, 2, 1)  # of the exchanges in a part
SHIFTS = (0, 43, 86)  # of the parts; a unit thus crosses their borders
MARGIN = 2 * PART  # positions before an end beyond which the shuffle does not depend on the end


class Schedule(NamedTuple):
    """The units of a block, in parts that were walked together, and how far the quotas allow to move them.

    Args:
        units: Source, first and last position of the unit at each position of each part: int16 [3, PART, parts]. First
            and last count from the begin of the part, and are at most `FAR` positions away.
        reach: Most positions between two units that may change places.
    """

    units: Int16
    reach: int


def schedule(borders: Borders, start: int, size: int = BLOCK) -> Schedule:
    """Return the schedule of the block at `start`: the parts that `shuffled` needs for `size`.

    The state at the borders of all parts is known. In each part the unit with the earliest last position comes first,
    of those that may come. This meets all last positions whenever any sequence does (Steiner and Yeomans, Level
    schedules for mixed-model, just-in-time processes, Management Science 39, 1993).
    """
    segment = borders.segment(start)
    length = min(BLOCK, segment.end - start)
    offsets = np.arange(_num_parts(min(size, length), length) + 1) * PART
    offsets[-1] = min(offsets[-1], length)
    states = borders.inside(start, PART, int(offsets[-1]))
    local = Local(borders.quotas, start, offsets)
    ends = local.whole[:, 1:] + states[:, 1:] - local.whole[:, :-1]
    walked = _walk(local, states[:, :-1].astype(np.int64), ends)
    walked[1:, offsets[-1] - offsets[-2] :, -1] = [[FAR], [-FAR]]  # Positions beyond the segment stay where they are.
    # Units of one source may not change places: their windows share one position at most.
    least = map(min, segment.shares(start), segment.shares(start + length))
    widest = sorted(-(-segment.total // share) if share else FAR for share in least)[-2:]
    return Schedule(walked, min(widest[0], FAR))


def _walk(local: Local, units: Int64, ends: Int64) -> Int16:
    """Return the units of L parts, int16 [3, PART, L]; see `Schedule`.

    Args:
        local: The quotas at the begin of each part.
        units: Number of the next unit of each source, counted from the current one: int64 [S, L].
        ends: Number of the first unit that is not in the part: int64 [S, L].
    """
    num_sources, num_parts = table = units.shape
    sources, lanes = (each.ravel() for each in np.indices(table))
    units, ends = units.ravel(), ends.ravel()
    first, last = local.windows(sources, lanes, units)
    order = _priority(last, units < ends, sources, num_sources)
    lanes = np.arange(num_parts)
    walked = np.empty((3, PART, num_parts), np.int16)
    for position in range(PART):
        source = np.where(first.reshape(table) <= position, order.reshape(table), NEVER).min(0) % num_sources
        cells = source * num_parts + lanes
        walked[0, position] = source
        np.maximum(first[cells], position - FAR, out=walked[1, position], casting="unsafe")
        np.minimum(last[cells], position + FAR, out=walked[2, position], casting="unsafe")
        units[cells] += 1
        first[cells], last[cells] = local.windows(source, lanes, units[cells])
        order[cells] = _priority(last[cells], units[cells] < ends[cells], source, num_sources)
    return walked


def _priority(last: Int64, left: Bool, sources: Int64, num_sources: int) -> Int64:
    """Return numbers that sort units by their last position, then by source; units of other parts come last."""
    order: Int64 = np.where(left, np.minimum(last, PART - 1) * num_sources + sources, NEVER)
    return order


def shuffled(units: Schedule, key: int, size: int = BLOCK) -> Int16:
    """Return the sources after exchanges of pairs of units that a key draws; the quotas hold after each exchange.

    Two units may change places if both are allowed at the other's position. Each round pairs all positions of the parts
    at one distance, and exchanges half of the pairs that may. Then the parts are cut elsewhere, for more rounds.

    Only the first `size` positions are right, and not many more are returned.
    """
    num_parts = min(_num_parts(size), units.units.shape[2])
    # Positions of all parts in a row are adjacent in memory, which numpy needs for speed.
    table = units.units[:, :, :num_parts].copy()
    places = np.arange(PART, dtype=np.int16)[:, None]
    rounds = [number for number, stride in enumerate(STRIDES) if stride <= units.reach]
    for number, shift in enumerate(SHIFTS):
        # A part has the end of one part of the table, and the begin of the next.
        count = num_parts - (shift > 0)
        if not count:
            break
        heads, tails = table[:, shift:, :count], table[:, :shift, -count:]
        parts = np.concatenate((heads, tails), 1)
        parts[1:, PART - shift :] += PART
        for later in rounds:
            drawn = _bits(key, number * len(STRIDES) + later)[: PART // 2 * ((BLOCK - shift) // PART)]
            _exchange(parts, places + shift, STRIDES[later], drawn.reshape(PART // 2, -1)[:, :count])
        parts[1:, PART - shift :] -= PART
        heads[:], tails[:] = parts[:, : PART - shift], parts[:, PART - shift :]
    sources: Int16 = table[0].T.ravel()  # in the order of their positions
    return sources


def _num_parts(size: int, length: int = BLOCK) -> int:
    """Return the parts on which the shuffle of the first `size` positions of a block of some length depends."""
    return -(-min(length, size + MARGIN) // PART)


def _bits(key: int, number: int) -> Bool:
    """Return what a key draws for the pairs of a round: bool [BLOCK / 2]."""
    words = BLOCK // 2 // 64
    draws = mix(key, np.arange(number * words, (number + 1) * words, dtype=np.uint64))
    return np.unpackbits(draws.astype("<u8").view(np.uint8)).view(bool)


def _exchange(parts: Int16, places: Int16, stride: int, drawn: Bool) -> None:
    """Exchange units at a distance of `stride` in L parts, if both may be at the other's position.

    Args:
        parts: Source, first and last position of the unit at each position of each part: int16 [3, PART, L].
        places: The positions: int16 [PART, 1].
        stride: The distance.
        drawn: Which pairs to exchange: bool [PART / 2, L].
    """
    sides = parts.reshape(3, -1, 2, stride, parts.shape[2])
    before, after = sides[:, :, 0], sides[:, :, 1]
    of_before, of_after = places.reshape(-1, 2, stride, 1).swapaxes(0, 1)
    allowed = before[2] >= of_after
    allowed &= after[1] <= of_before
    allowed &= drawn.reshape(allowed.shape)
    if allowed.any():
        change = before ^ after
        change &= -allowed.astype(np.int16)
        before ^= change
        after ^= change

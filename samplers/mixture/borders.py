"""Exact quotas at the borders of blocks, at any position of an endless sequence of sources.

The quota Q(p) of a source is the sum of its shares up to position p (`quotas.py`): p w for a fixed share w. Its count
c(p) must satisfy |c(p) - Q(p)| < 1 at each p. This is a window for each unit: unit j, counted from 0, may come from the
last p with Q(p) <= j on, and before the first p with Q(p) >= j + 1.

A sequence with these windows exists for all shares (Tijdeman, The chairman assignment problem, Discrete Mathematics 32,
1980), and taking the unit whose window ends first finds one (Steiner and Yeomans, 1993), but both walk it from position
0. The bisection here finds the counts at any border without a walk.

The count at p is floor(Q(p)), or one more if the *current unit* j = floor(Q(p)) is done. So the state at p is a set U
of sources whose current unit is done. It has R members, the sum of the fractions f(p) = Q(p) - j over all sources.

Bisection: at the middle m of an interval from a to b, `bisect` chooses U so:

- A unit that is done at a is done at m; a unit that is not done at b is not done at m.
- Bounds: for each t with m <= t < b let A(t) be the current units whose window ends after t, and k(t) the sum of f(t)
  over A(t), rounded up. At most k(t) units of A(t) are done.
- Under these bounds, units whose windows begin first are taken first.

Mirrored bounds: for each t with a < t < b let B(t) be the units that began before t, and l(t) the sum of 1 - f(t) over
B(t), rounded up. At most l(t) units of B(t) are not done.

Claim. Suppose that the state at a satisfies the bounds for a < t < b, that the state at b satisfies the mirrored
bounds, and that no count shrinks from a to b. Then the state at m exists, satisfies the bounds for m < t < b and the
mirrored ones for a < t < m, and no count shrinks from a to m or from m to b. So both halves satisfy the condition
again, and intervals of length 1 are single units.

Proof. Call E the units at m, F those done at a, and G those not done at b. U must be an independent set of the nested
matroid M given by k and must contain F. Its complement in E must be an independent set of the nested matroid N given by
l and must contain G. F is independent: for t > m the units of F in A(t) were current at a, where their bound is at most
k(t). G is independent in the same way. By the matroid union theorem U exists if for all t' <= m <= t the units X of
A(t) that began before t' satisfy

    |X - F - G| + |F & A(t)| + |G & B(t')| <= k(t) + l(t').

Units of F began before a < t', and windows of G end after b > t, so both intersections are in X and the left side is
|X|. On the right, f grows with time, so each unit of X contributes at least f(t) + 1 - f(t') >= 1. The bounds at t = t'
= m say that U has R members. Taking the units that began first is the greedy algorithm of M, and for each t' it takes
as many units of B(t') as possible, so it satisfies N if any set does. Counts do not shrink: if a source has the same
current unit at both positions, F and G say so; otherwise a unit ended in between, which is counted in full at the later
one. QED.

Position 0 has no state, and at `END` nothing follows. In between, 32 bisections lead to any border, and neighbours
share most of them.

Schedules. The proof needs of Q only that it grows and that quotas sum to p, so each stretch between two rows of a
schedule is a segment with a polynomial of its own. Large denominators are rounded to multiples of 1 / MOST. What that
leaves in doubt, less than one window in 10,000, is computed again in Python's integers. Then k(t) is the sum less e =
127/512, rounded up, which still suffices: k(t) + l(t') >= |X| - 2 e, rounded up, which is |X|.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataload.samplers.lru import LRU
from dataload.samplers.mixture.quotas import END, Local, Quotas, Segment, reach
from dataload.samplers.mixture.weights import MOST

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

BLOCK = 1 << 16  # positions that are scheduled together
KEPT = 256  # borders; a path of the bisection has 32


class Borders:
    """The counts of each source at the borders of blocks: at multiples of `BLOCK`, counted from the start of a segment.

    At position p source s has come floor(quota) times, and once more if its current unit is done. The *current unit* is
    the one that the quota has begun at p and not ended; without one, the quota is an integer. So a set of sources,
    those whose current unit is done, is the whole state at a position. Bisection finds it: the positions 0 and `END`
    have a state by themselves, and the state between two positions follows from those at these. First come the starts
    of the segments, from the last one to the first; then the middles of what is left of each segment.

    Args:
        quotas: The quotas of all sources.

    Notes: the state at a position costs at most 32 bisections of O(S**2) elementary steps in numpy, the same number
    everywhere, after one for each segment. Neighbours share most of them. Threads may share one object.
    """

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._states: LRU[int, Bool] = LRU(KEPT)
        self._starts: dict[int, Bool] = {}  # of segments

    def counts(self, position: int) -> Int64:
        """Return the units of each source before a border: int64 [S]."""
        segment = self.segment(position)
        return np.array([whole for whole, _ in segment.at(position)], np.int64) + self.done(position)

    def segment(self, position: int) -> Segment:
        """Return the segment that has a position; at the end of the sequence the last one."""
        return self.quotas.segments[self.quotas.number_at(position)]

    def done(self, position: int) -> Bool:
        """Return whether the current unit of each source is done at a border: bool [S]."""
        if position not in self._starts and position in (END, self.segment(position).start):
            self._find_starts()
        return self._starts[position] if position in self._starts else self._states.get(position, self._find)

    def inside(self, position: int, size: int, end: int) -> Bool:
        """Return the states at the multiples of `size` in a block, and at its end: bool [S, borders].

        The block has `end` positions, or those up to the end of the segment. Both ends are included.
        """
        most = self.segment(position).end - position
        states, half = np.stack((self.done(position), self.done(position + min(BLOCK, most))), 1), BLOCK // 2
        end = min(end, most)
        while half >= size:
            middles = np.arange(half, end, 2 * half)
            intervals = -(-end // (2 * half))
            states = states[:, : intervals + 1]
            found = np.empty((len(states), intervals + len(middles) + 1), bool)
            found[:, : 2 * intervals : 2] = states[:, :-1]
            found[:, -1] = states[:, -1]
            if len(middles):
                ends = states[:, : len(middles)], states[:, 1 : len(middles) + 1]
                current = Current.inside(Local(self.quotas, position, middles))
                found[:, 1 : 2 * len(middles) : 2] = bisect(current, half, np.minimum(half, most - middles), *ends)
            states, half = found, half // 2
        return states

    def _find(self, position: int) -> Bool:
        segment = self.segment(position)
        offset = position - segment.start
        half = offset & -offset
        after = min(half, segment.end - position)
        ends = self.done(position - half)[:, None], self.done(position + after)[:, None]
        return bisect(Current.at(self.quotas, position), half, np.array([after]), *ends)[:, 0]

    def _find_starts(self) -> None:
        """Find the states at the starts of all segments and at the end, from which each state between them follows."""
        segments = self.quotas.segments
        last = segments[-1].at(END)
        current = Current.at(self.quotas, END, is_start=True)
        # Nothing follows the end, so the units that began first are done.
        done = np.zeros(len(last), bool)
        done[np.argsort(-current.age[:, 0], kind="stable")[: END - sum(whole for whole, _ in last)]] = True
        starts = {END: done, 0: np.zeros(len(last), bool)}
        for segment in reversed(segments[1:]):
            current = Current.at(self.quotas, segment.start, is_start=True)
            ends = starts[0][:, None], starts[segment.end][:, None]
            after = np.array([segment.end - segment.start])
            starts[segment.start] = bisect(current, segment.start, after, *ends)[:, 0]
        self._starts = starts


class Current(NamedTuple):
    """The current units at L positions, in one segment.

    Attributes:
        rest: Progress of each unit times `total`, 0 without a current unit: [S, L].
        slopes: Share of each source times `total`: [S, L].
        bends: Half of what each share changes by in one position: [S, 1].
        total: The denominator. If it is too large for 64 bits, the numbers above are Python integers.
        slack: As in `Segment`, of the total above.
        age: Positions since the first one that may have the unit: int64 [S, L].
        left: Positions until it must be done: int64 [S, L].
        local: What rounds the numbers, if they are rounded.
    """

    rest: Int64
    slopes: Int64
    bends: Int64
    total: int
    slack: int
    age: Int64
    left: Int64
    local: Local | None = None

    @classmethod
    def inside(cls, local: Local) -> Current:
        """Return the units at positions of which only the neighbours within a block matter."""
        shape = local.rest.shape
        sources, lanes = (each.ravel() for each in np.indices(shape))
        first, last = (each.reshape(shape) for each in local.windows(sources, lanes, np.zeros_like(sources)))
        age, rounded = np.where(local.rest > 0, -first, 0), local if local.slack else None
        return cls(local.rest, local.slopes, local.bends, local.total, local.slack, age, last + 1, rounded)

    @classmethod
    def at(cls, quotas: Quotas, position: int, *, is_start: bool = False) -> Current:
        """Return the units at one position, which may be the start of a segment or the end of the sequence."""
        segment = quotas.segments[quotas.number_at(position)]
        if not (is_start or segment.is_ramp or segment.total > MOST):
            return cls.inside(Local(quotas, position, np.zeros(1, np.int64)))
        parts, slopes = segment.at(position), segment.shares(position)
        ages = [position - quotas.earliest(s, whole) if rest else 0 for s, (whole, rest) in enumerate(parts)]
        lines = zip(parts, slopes, segment.bends, strict=True)
        lefts = [reach(segment.total - rest, slope, bend) for (_, rest), slope, bend in lines]
        kind: Any = np.int64 if segment.total <= MOST else object
        rest, slope, bend = (np.array(each, kind)[:, None] for each in ([r for _, r in parts], slopes, segment.bends))
        age, left = (np.array(each, np.int64)[:, None] for each in (ages, [2 * END if t is None else t for t in lefts]))
        return cls(rest, slope, bend, segment.total, segment.slack, age, left)


def bisect(current: Current, before: int, after: Int64, left: Bool, right: Bool) -> Bool:
    """Return which current units are done at positions inside L intervals: bool [S, L].

    At each position a fixed number of units must be done. They are taken in the order of their begin, except where too
    many units that end late would be done: of the units that end after a later position p, at most
    ceil(sum of (quota(p) - j)) may be done. The others must end before p.

    Args:
        current: The current units at the positions.
        before: Positions from the start of each interval.
        after: Positions to the end of each interval: int64 [L].
        left: State at the starts: bool [S, L].
        right: State at the ends: bool [S, L].
    """
    age, rest = current.age, current.left
    done = left & (age > before)
    free = ~done & (right | (rest <= after))  # A source without a current unit has age 0: others come before it.
    late_first = np.argsort(-rest, axis=0, kind="stable")
    until = np.zeros_like(rest)
    until[:-1] = np.take_along_axis(rest, late_first, 0)[1:]
    # Where a product of large numbers wraps, the sum does not: each term of it that counts is less than the total.
    most = _running(current.slopes, late_first) * until + _running(current.rest, late_first)
    if current.bends.any():
        most = most + _running(current.bends, late_first) * until * until
    slack = -((current.slack - most) // current.total)
    if current.local is not None:
        doubt = np.arange(1, len(age) + 1)[:, None] * (3 + (until + 1) * (until + 1))
        doubtful = (np.abs((most - current.slack + doubt) % current.total) <= 2 * doubt) & (until < after)
        for number, lane in np.argwhere(doubtful).tolist():
            slack[number, lane] = current.local.bound(late_first[: number + 1, lane], lane, int(until[number, lane]))
    slack = np.where(until < after, slack, len(age)).astype(np.int64)
    slack -= np.cumsum(np.take_along_axis(done, late_first, 0), 0)
    by_age = np.argsort(-age, axis=0, kind="stable")
    oldest = np.take_along_axis(free, by_age, 0)
    oldest &= np.cumsum(oldest, 0) <= slack[-1]
    chosen = np.empty_like(done)
    np.put_along_axis(chosen, by_age, oldest, 0)
    fits = (np.cumsum(np.take_along_axis(chosen, late_first, 0), 0) <= slack).all(0)
    done |= chosen & fits
    if len(lanes := np.flatnonzero(~fits)):  # too many that end late
        by_age, late_first = by_age[:, lanes], late_first[:, lanes]
        places = np.take_along_axis(np.argsort(by_age, axis=0), late_first, 0)
        tables = slack[:, lanes], np.take_along_axis(free[:, lanes], late_first, 0), places
        for order, lane, *rows in zip(by_age.T, lanes, *(table.T.tolist() for table in tables), strict=True):
            done[order[_oldest(*rows)], lane] = True
    return done


def _oldest(slack: Sequence[int], free: Sequence[bool], places: Sequence[int]) -> list[int]:
    """Return the lowest places of free units, such that at most slack[i] of them are among the first i + 1 places."""
    taken: list[int] = []  # a heap with the highest place first
    for most, is_free, place in zip(slack, free, places, strict=True):
        if is_free:
            heappush(taken, -place)
        while len(taken) > most:
            heappop(taken)
    return [-place for place in taken]


def _running(numbers: Int64, order: Int64) -> Int64:
    """Return the sums over the first sources in an order: int64 [S, L]."""
    if numbers.shape[1] == 1:
        return np.cumsum(numbers[:, 0][order], 0)
    return np.cumsum(np.take_along_axis(numbers, order, 0), 0)

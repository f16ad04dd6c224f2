"""The quota of each source at each position, as exact fractions: the integral of its share up to there.

Weights that do not change give a line. A schedule gives a line or a parabola between two of its rows:

    quota of a source at position start + t  =  (progress + slope * t + bend * t * t) / total

`bend` is half of what the share changes by in one position, so it is 0 unless the weights are on a ramp.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataload.samplers.mixture.weights import MOST, Weights, knots

Int64 = npt.NDArray[np.int64]
Integers = tuple[int, ...]

END = 1 << 48  # positions of the sequence
FAR = 1 << 20  # positions: more than in a block


class Segment(NamedTuple):
    """Positions in which the quotas are lines or parabolas.

    Attributes:
        start: First position.
        end: Position after the last one.
        total: Denominator of the numbers below.
        progress: Quota of each source at the start.
        slopes: Share of each source at the start. They sum to `total`.
        bends: Half of what each share changes by in one position. They sum to 0.
    """

    start: int
    end: int
    total: int
    progress: Integers
    slopes: Integers
    bends: Integers

    @property
    def slack(self) -> int:
        """What `bisect` subtracts from sums of progress, 0 if all numbers are exact in 64 bits.

        Without it, sums that are whole numbers would be in doubt.
        """
        return self.total * 127 // 512 if self.total > MOST else 0

    @property
    def is_ramp(self) -> bool:
        """Whether the shares change."""
        return any(self.bends)

    def at(self, position: int) -> list[tuple[int, int]]:
        """Return the quota of each source at a position: its whole part, and the rest times `total`."""
        t = position - self.start
        lines = zip(self.progress, self.slopes, self.bends, strict=True)
        return [divmod(progress + (slope + bend * t) * t, self.total) for progress, slope, bend in lines]

    def shares(self, position: int) -> Integers:
        """Return the share of each source at a position, times `total`."""
        double = 2 * (position - self.start)
        return tuple(slope + bend * double for slope, bend in zip(self.slopes, self.bends, strict=True))


class Quotas:
    """The quotas of all sources.

    Args:
        weights: The weights.
        unit: Rows of a position. Rows of a schedule count up to whole units.

    Attributes:
        segments: All positions from 0 to `END`.
    """

    def __init__(self, weights: Weights, unit: int = 1) -> None:
        self.segments = tuple(_segments(weights, unit))
        self._starts = [segment.start for segment in self.segments]

    def number_at(self, position: int) -> int:
        """Return the number of the segment that has a position."""
        return bisect_right(self._starts, position) - 1

    def at(self, position: int) -> list[Fraction]:
        """Return the quota of each source at a position."""
        segment = self.segments[self.number_at(position)]
        return [whole + Fraction(rest, segment.total) for whole, rest in segment.at(position)]

    def earliest(self, source: int, unit: int) -> int:
        """Return the first position that the quota allows for a unit of a source: the last one with a quota of `unit`.

        `END` if the quota never exceeds it.
        """
        number = bisect_right(self.segments, Fraction(unit), key=self._started(source)) - 1
        return self._reached(number, source, unit, 1) - 1

    def latest(self, source: int, unit: int) -> int:
        """Return the last position that the quota allows for a unit of a source; `END` if all of them."""
        passed = bisect_left(self.segments, Fraction(unit + 1), key=self._started(source))
        return self._reached(passed - 1, source, unit + 1, 0) - 1

    def most(self, positions: int) -> list[int]:
        """Return how many units of each source may be in so many consecutive positions."""
        shares = [
            [Fraction(share, each.total) for share in each.shares(min(position, each.end))]
            for each in self.segments
            for position in {each.start, each.end if each.is_ramp else each.start}
        ]
        return [math.ceil(positions * max(of_source)) + 1 for of_source in zip(*shares, strict=True)]

    def _started(self, source: int) -> Callable[[Segment], Fraction]:
        """Return a function that returns the quota of a source at the start of a segment."""
        return lambda each: Fraction(each.progress[source], each.total)

    def _reached(self, number: int, source: int, units: int, more: int) -> int:
        """Return the first position of a segment whose quota is at least `units` and `more` parts of its total."""
        each = self.segments[number]
        left = units * each.total + more - each.progress[source]
        t = reach(left, each.slopes[source], each.bends[source])
        return END + 1 if t is None else min(each.start + t, END + 1)


def reach(count: int, slope: int, bend: int) -> int | None:
    """Return the smallest t >= 0 with slope * t + bend * t * t >= count; None if there is none.

    The sum must not shrink before t.
    """
    if count <= 0:
        return 0
    root = slope * slope + 4 * bend * count
    if root < 0 or not (slope or bend):
        return None
    t = 2 * count // (slope + math.isqrt(root))  # off by one at most
    while (slope + bend * t) * t < count:
        t += 1
    while t and (slope + bend * (t - 1)) * (t - 1) >= count:
        t -= 1
    return t


class Local:
    """The quotas near L positions of one segment, in 64 bits.

    Numbers are exact if the denominator of the segment is at most `MOST`. Otherwise they are rounded to multiples of
    1 / MOST, and what this leaves in doubt is computed again, exactly.

    Args:
        quotas: The quotas.
        start: A position, in whose segment all positions are.
        offsets: The positions, counted from `start`: int64 [L].

    Attributes:
        whole: Whole part of each quota: int64 [S, L].
        rest: What is left of each quota, times `total`: int64 [S, L]. 0 for whole quotas only.
        slopes: Share of each source times `total`: int64 [S, L].
        bends: Half of what each share changes by in one position: int64 [S, 1].
        total: The denominator.
        slack: As in `Segment`, of this denominator.
    """

    def __init__(self, quotas: Quotas, start: int, offsets: Int64) -> None:
        segment = quotas.segments[quotas.number_at(start)]
        self._quotas, self._segment, self._positions = quotas, segment, start + offsets
        first, slopes, self.total, self.slack = segment.at(start), segment.shares(start), segment.total, segment.slack
        kind: Any = np.int64 if segment.total <= MOST else object
        slope, bend, rest = (
            np.array(column, kind)[:, None] for column in (slopes, segment.bends, [left for _, left in first])
        )
        done = rest + (slope + bend * offsets) * offsets
        more, rest = done // self.total, done % self.total
        slope = slope + 2 * bend * offsets
        if segment.total > MOST:
            rest = np.maximum(rest * MOST // self.total, rest > 0)
            slope, bend = slope * MOST // self.total, bend * MOST // self.total
            self.total, self.slack = MOST, MOST * 127 // 512
        self.whole = np.array([whole for whole, _ in first])[:, None] + more.astype(np.int64)
        self.rest, self.slopes, self.bends = (each.astype(np.int64) for each in (rest, slope, bend))
        self._is_plain = not self.slack and not segment.is_ramp and all(slopes)

    def windows(self, sources: Int64, lanes: Int64, units: Int64) -> tuple[Int64, Int64]:
        """Return the first and the last position that the quota allows for units, counted from those of their lanes.

        Args:
            sources: Source of each unit: int64 [k].
            lanes: Number of a position for each: int64 [k].
            units: Number of each unit in its source, counted from `whole`: int64 [k].
        """
        counts = units * self.total - self.rest[sources, lanes]
        if self._is_plain:
            slopes = self.slopes[sources, 0]
            return counts // slopes, (counts + (self.total - 1)) // slopes
        lines = self.slopes[sources, lanes], self.bends[sources, 0] if self._segment.is_ramp else None
        first, last = crossing(counts, *lines), crossing(counts + (self.total - 1), *lines)
        if self.slack:
            earliest, latest = self._quotas.earliest, self._quotas.latest
            for found, ends, exact in ((first, counts, earliest), (last, counts + self.total, latest)):
                doubtful = _is_near(found, ends, *lines) | _is_near(found + 1, ends, *lines)
                for cell in np.flatnonzero(doubtful).tolist():
                    source, lane = int(sources[cell]), int(lanes[cell])
                    unit = int(self.whole[source, lane] + units[cell])
                    found[cell] = exact(source, unit) - int(self._positions[lane])
        return first, last

    def bound(self, sources: Int64, lane: int, after: int) -> int:
        """Return how many current units of some sources may be done `after` positions after that of a lane, exactly."""
        parts = self._segment.at(int(self._positions[lane]) + after)
        total, units = self._segment.total, [(parts[source], int(self.whole[source, lane])) for source in sources]
        progress: int = sum((whole - first) * total + rest for (whole, rest), first in units)
        return int(-((self._segment.slack - progress) // total))


def _is_near(t: Int64, counts: Int64, slopes: Int64, bends: Int64 | None) -> npt.NDArray[np.bool_]:
    """Return whether rounded numbers leave open if slopes * t + bends * t * t is less than counts."""
    most = 3 + (np.abs(t) + 1) * (np.abs(t) + 1)
    near = np.abs((slopes + (0 if bends is None else bends * t)) * t - counts) <= most
    found: npt.NDArray[np.bool_] = near & (np.abs(t) < FAR)
    return found


def crossing(counts: Int64, slopes: Int64, bends: Int64 | None) -> Int64:
    """Return the largest t with slopes * t + bends * t * t <= counts, of either sign. int64 of the same shape.

    Results are right within the segment of the slopes, and within -FAR and FAR if there are bends.

    Args:
        counts: int64 [...].
        slopes: int64, of the same shape or broadcast to it.
        bends: The same; None: all are 0.
    """
    if bends is None:
        steep = np.maximum(slopes, 1)
        return np.where(slopes > 0, counts // steep, np.where(counts < 0, -2 * END, 2 * END))
    with np.errstate(divide="ignore", invalid="ignore"):
        root = slopes.astype(float) ** 2 + 4 * bends.astype(float) * counts
        roots = 2 * counts.astype(float) / (slopes + np.sqrt(root))
    far = np.where(counts < 0, -FAR, FAR)
    found = np.where(np.isfinite(roots), np.clip(roots, -FAR, FAR), far)
    found = np.where((counts == 0) & ((slopes > 0) | (bends > 0)), 0, np.floor(found)).astype(np.int64)
    # The square root of a difference is off by one position at most within FAR.
    found += (slopes + bends * (found + 1)) * (found + 1) <= counts
    found -= (slopes + bends * found) * found > counts
    return found


def _segments(weights: Weights, unit: int) -> Iterator[Segment]:
    """Yield the segments in units of so many rows."""
    rows, each, ramp = knots(weights)
    starts = [-(-row // unit) for row in rows]
    whole = math.lcm(*map(sum, each))
    corners = [[weight * (whole // sum(some)) for weight in some] for some in each]
    done, double = [0] * len(corners[0]), 1 + ramp  # quotas times double * whole
    for (start, end), (first, last) in zip(pairwise([*starts, END]), pairwise([*corners, corners[-1]]), strict=True):
        length = end - start
        if ramp and first != last and length:
            slopes = tuple(2 * length * share for share in first)
            bends = tuple(b - a for a, b in zip(first, last, strict=True))
            yield Segment(start, end, 2 * whole * length, tuple(length * d for d in done), slopes, bends)
            done = [d + length * (a + b) for d, a, b in zip(done, first, last, strict=True)]
        elif length:
            slopes = tuple(double * share for share in first)
            yield Segment(start, end, double * whole, tuple(done), slopes, (0,) * len(first))
            done = [d + length * slope for d, slope in zip(done, slopes, strict=True)]

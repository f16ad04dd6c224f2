"""Exact quotas at the borders of blocks, at any position of an endless sequence of sources.

Source s has the share w of the positions. Its unit j, counted from 0, may come at the positions after j / w and must
have come by (j + 1) / w. This is the same as |count(p) - p w| < 1 at every position p. Such a sequence exists for all
weights (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980), but known algorithms walk it from
its start. `docs/design/mixtures.md` proves that the bisection here needs no walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from dataload.samplers.lru import LRU

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

BLOCK = 1 << 16  # positions that are scheduled together
END = 1 << 48  # of the sequence
KEPT = 256  # borders; a path of the bisection has 32


class Borders:
    """The counts of each source at the multiples of `BLOCK`.

    At position p source s has come floor(p w) times, and once more if its current unit is done. The *current unit* is
    the one with j / w < p < (j + 1) / w; without one, p w is an integer. So a set of sources, those whose current unit
    is done, is the whole state at a position. Bisection finds it: the positions 0 and `END` have a state by themselves,
    and the state at the middle of an interval follows from those at its ends.

    Args:
        weights: int [S], see `integer_weights`.

    Notes: the state at a position costs at most 32 bisections of O(S**2) elementary steps in numpy, the same number
    everywhere. Neighbours share most of them. Threads may share one object.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = np.array(weights, np.int64)
        self.total = sum(weights)
        self._integers = tuple(weights)  # Python integers do not overflow
        self._states: LRU[int, Bool] = LRU(KEPT)

    def counts(self, position: int) -> Int64:
        """Return the units of each source before a multiple of BLOCK: int64 [S]."""
        whole = np.array([position * weight // self.total for weight in self._integers], np.int64)
        return whole + self.done(position)

    def done(self, position: int) -> Bool:
        """Return whether the current unit of each source is done at a multiple of BLOCK: bool [S]."""
        return self._states.get(position, self._find)

    def residues(self, position: int) -> Int64:
        """Return the progress of each current unit times the sum of weights: int64 [S]. 0 without a current unit."""
        return np.array([position * weight % self.total for weight in self._integers], np.int64)

    def inside(self, position: int, size: int, end: int) -> Bool:
        """Return the states at the multiples of `size` in the first `end` positions of a block: bool [S, borders].

        Both ends are included. `end` is a multiple of `size`.
        """
        states = np.stack((self.done(position), self.done(position + BLOCK)), 1)
        start, half = self.residues(position)[:, None], BLOCK // 2
        while half >= size:
            middles = np.arange(half, end + half, 2 * half)
            states = states[:, : len(middles) + 1]
            residues = (start + self.weights[:, None] * middles) % self.total
            found = np.empty((len(states), 2 * states.shape[1] - 1), bool)
            found[:, ::2] = states
            found[:, 1::2] = bisect(self.weights, self.total, residues, half, states[:, :-1], states[:, 1:])
            states, half = found, half // 2
        return states[:, : end // size + 1]

    def _find(self, position: int) -> Bool:
        residues = self.residues(position)
        if position in (0, END):  # Nothing follows the end, so the units that began first are done.
            age = -(-residues // self.weights)
            done = np.zeros(len(residues), bool)
            done[np.argsort(-age, kind="stable")[: residues.sum() // self.total]] = True
            return done
        half = position & -position
        ends = self.done(position - half)[:, None], self.done(position + half)[:, None]
        return bisect(self.weights, self.total, residues[:, None], half, *ends)[:, 0]


def bisect(weights: Int64, total: int, residues: Int64, half: int, left: Bool, right: Bool) -> Bool:
    """Return which current units are done at the middles of L intervals of one size: bool [S, L].

    At each middle a fixed number of units must be done. They are taken in the order of their begin, except where too
    many units that end late would be done: of the units that end after a later position p, at most
    ceil(sum of (p w - j)) may be done. The others must end before p.

    Args:
        weights: int64 [S].
        total: Sum of the weights.
        residues: Progress of each current unit at the middles, see `Borders.residues`: int64 [S, L].
        half: Positions between the middle and an end.
        left: State at the left ends: bool [S, L].
        right: State at the right ends: bool [S, L].
    """
    each = weights[:, None]
    age, rest = -(-residues // each), -((residues - total) // each)  # positions since the begin and to the end
    done = left & (age > half)
    free = ~done & (right | (rest <= half))  # A source without a current unit has age 0: others come before it.
    late_first = np.argsort(-rest, axis=0, kind="stable")
    until = np.zeros_like(rest)
    until[:-1] = np.take_along_axis(rest, late_first, 0)[1:]
    most = np.cumsum(weights[late_first], 0) * until + np.cumsum(np.take_along_axis(residues, late_first, 0), 0)
    slack = np.where(until < half, -(-most // total), len(weights))
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

"""The endless sequence of units of a mixture in each epoch, read at any place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU
from dataload.samplers.mixture.borders import BLOCK, END, Borders
from dataload.samplers.mixture.schedule import Schedule, schedule, shuffled

Int64 = npt.NDArray[np.int64]

SCHEDULES = 32  # kept, of 384 KiB each: an epoch of 2 million units


@dataclass(frozen=True, eq=False)
class _Block:
    """The sources of a block's units, uint16 [k], and their numbers in their sources, int64 [k]."""

    source: npt.NDArray[np.uint16]
    number: Int64


class UnitSequence:
    """The sources of units 0, 1, 2, … of each epoch, with the quotas of all sources in each prefix.

    Args:
        weights: Weight of each source, see `integer_weights`.
        seed: Seed of the exchanges in blocks.
        end: Units of an epoch. None beyond them is asked for.

    Notes: a block costs 10 to 40 ms for up to 50 sources and is cached, so nearby units are cheap.
    """

    def __init__(self, weights: Sequence[int], seed: int, end: int = END) -> None:
        self._weights, self._total = tuple(weights), sum(weights)
        self._seed, self._end = seed, end
        self._borders = Borders(weights)
        self._schedules: LRU[int, Schedule] = LRU(SCHEDULES)  # the same in all epochs
        self._blocks: LRU[tuple[int, int], _Block] = LRU(4)

    def draws(self, epoch: int, units: Int64) -> tuple[Int64, Int64]:
        """Return the source of each unit and its number among the units of its source: int64 [k] each."""
        if (units[1:] < units[:-1]).any():
            ascending, (sources, numbers) = np.argsort(units), np.empty((2, len(units)), np.int64)
            sources[ascending], numbers[ascending] = self.draws(epoch, units[ascending])
            return sources, numbers
        sources, numbers, done = np.empty_like(units), np.empty_like(units), 0
        while done < len(units):
            block = int(units[done]) // BLOCK
            end = done + int(np.searchsorted(units[done:], (block + 1) * BLOCK))
            found, inside = self._block(epoch, block), units[done:end] - block * BLOCK
            sources[done:end], numbers[done:end] = found.source[inside], found.number[inside]
            done = end
        return sources, numbers

    def counts(self, epoch: int, unit: int) -> Int64:
        """Return the units of each source before a unit: int64 [S]."""
        block, inside = divmod(unit, BLOCK)
        counts = self._borders.counts(block * BLOCK)
        if inside:
            counts += np.bincount(self._block(epoch, block).source[:inside], minlength=len(counts))
        return counts

    def earliest(self, source: int, number: int) -> int:
        """Return the first place in the sequence that the quota allows for a unit of a source."""
        return number * self._total // self._weights[source]

    def latest(self, source: int, number: int) -> int:
        """Return the last place in the sequence that the quota allows for a unit of a source."""
        return -(-(number + 1) * self._total // self._weights[source]) - 1

    def _block(self, epoch: int, number: int) -> _Block:
        return self._blocks.get((epoch, number), self._make_block)

    def _make_block(self, key: tuple[int, int]) -> _Block:
        epoch, block = key
        units = self._schedules.get(block, lambda number: schedule(self._borders, number * BLOCK))
        size = min(BLOCK, self._end - block * BLOCK)
        source = shuffled(units, derive_key("mixture", self._seed, epoch, block), size)[:size].view(np.uint16)
        by_source = np.argsort(source, kind="stable")  # numpy sorts 16 bits by radix
        counts = np.bincount(source, minlength=len(self._weights))
        shifts = self._borders.counts(block * BLOCK) - (np.cumsum(counts) - counts)
        number = np.empty(size, np.int64)
        number[by_source] = np.arange(size) + np.repeat(shifts, counts)
        return _Block(source, number)

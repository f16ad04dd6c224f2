"""The endless sequence of units of a mixture in each epoch, read at any place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dataload.runtime.cached_property import cached_property
from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU, FirstKept
from dataload.samplers.mixture.borders import BLOCK, Borders
from dataload.samplers.mixture.quotas import Quotas
from dataload.samplers.mixture.schedule import Schedule, schedule, shuffled

Int64 = npt.NDArray[np.int64]

BEGINNING = 1 << 12  # units of a block that are computed alone, so that the first batch does not wait for the others
SCHEDULES = 64  # kept, of 384 KiB each: an epoch of 4 million units, or a part of a longer one


class _Block:
    """The units of a block.

    Args:
        source: Source of each unit: uint16 [k].
        before: Units of each source before the block: int64 [S].

    Attributes:
        source: As above.
        before: As above.
    """

    def __init__(self, source: npt.NDArray[np.uint16], before: Int64) -> None:
        self.source, self.before = source, before
        self._by_source = np.argsort(source, kind="stable")  # numpy sorts 16 bits by radix
        self._firsts = np.append(0, np.cumsum(np.bincount(source, minlength=len(before))))
        self._keys = self._by_source + np.repeat(np.arange(len(before)) * BLOCK, np.diff(self._firsts))

    def parts(self, start: int, end: int) -> Iterator[tuple[int, Int64, int]]:
        """Yield (source, its places from `start` to `end`, number of its unit at the first one) of each source."""
        borders = np.arange(len(self.before)) * BLOCK
        begins, ends = np.searchsorted(self._keys, borders + start), np.searchsorted(self._keys, borders + end)
        numbers = self.before + begins - self._firsts[:-1]
        for source in np.flatnonzero(ends > begins).tolist():
            yield source, self._by_source[begins[source] : ends[source]], int(numbers[source])

    @cached_property
    def number(self) -> Int64:
        """Number of each unit in its source: int64 [k]."""
        numbers = np.empty(len(self.source), np.int64)
        shifts = np.repeat(self.before - self._firsts[:-1], np.diff(self._firsts))
        numbers[self._by_source] = np.arange(len(self.source)) + shifts
        return numbers


class UnitSequence:
    """The sources of units 0, 1, 2, … of each epoch, with the quotas of all sources in each prefix.

    Args:
        quotas: The quotas of all sources.
        seed: Seed of the exchanges in blocks.
        end: Number of units of an epoch. Callers request no later unit.
        reshuffled: Whether each epoch draws exchanges of its own. Without a shuffle, all epochs have the same rows.

    Notes: a block costs 10 to 40 ms for up to 50 sources and is cached, so nearby units are cheap.
    """

    def __init__(self, quotas: Quotas, seed: int, end: int, *, reshuffled: bool = True) -> None:
        self._reshuffled = reshuffled
        self._seed, self._end = seed, end
        self._borders = Borders(quotas)
        sizes = ((segment.start, -(-(segment.end - segment.start) // BLOCK)) for segment in quotas.segments)
        starts, blocks = zip(*sizes, strict=True)
        self._starts: list[int] = list(starts)  # of the segments
        self._firsts: list[int] = [0, *accumulate(blocks)]  # blocks of the segments
        self._schedules: FirstKept[tuple[int, int], Schedule] = FirstKept(SCHEDULES)  # the same in all epochs
        self._blocks: LRU[tuple[int, int, int], _Block] = LRU(4)

    def draws(self, epoch: int, units: Int64) -> tuple[Int64, Int64]:
        """Return the source of each unit and its number among the units of its source: int64 [k] each."""
        if (units[1:] < units[:-1]).any():
            ascending, (sources, numbers) = np.argsort(units), np.empty((2, len(units)), np.int64)
            sources[ascending], numbers[ascending] = self.draws(epoch, units[ascending])
            return sources, numbers
        sources, numbers, done = np.empty_like(units), np.empty_like(units), 0
        while done < len(units):
            block = self._block_of(int(units[done]))
            start, length = self._place(block)
            end = done + int(np.searchsorted(units[done:], start + length))
            inside = units[done:end] - start
            found = self._block(epoch, block, int(inside[-1]) + 1)
            sources[done:end], numbers[done:end] = found.source[inside], found.number[inside]
            done = end
        return sources, numbers

    def parts(self, epoch: int, start: int, end: int) -> Iterator[tuple[int, Int64, int]]:
        """Yield the units from `start` to `end`, in parts of one source.

        Yields:
            (source, places of its units, counted from `start`: int64 [k], number of the first of them in its source)
        """
        done = start
        while done < end:
            block = self._block_of(done)
            begin, length = self._place(block)
            first, last = done - begin, min(end - begin, length)
            for source, places, number in self._block(epoch, block, last).parts(first, last):
                yield source, places + (begin - start), number
            done = begin + last

    def counts(self, epoch: int, unit: int) -> Int64:
        """Return the units of each source before a unit: int64 [S]."""
        block = self._block_of(unit)
        start, _ = self._place(block)
        counts = self._borders.counts(start)
        if inside := unit - start:
            counts += np.bincount(self._block(epoch, block, inside).source[:inside], minlength=len(counts))
        return counts

    def _block_of(self, unit: int) -> int:
        """Return the number of the block that has a unit."""
        segment = bisect_right(self._starts, unit) - 1
        return self._firsts[segment] + (unit - self._starts[segment]) // BLOCK

    def _place(self, block: int) -> tuple[int, int]:
        """Return the first unit of a block, and the most units that it may have."""
        segment = bisect_right(self._firsts, block) - 1
        start = self._starts[segment] + (block - self._firsts[segment]) * BLOCK
        return start, min(BLOCK, self._borders.quotas.segments[segment].end - start)

    def _block(self, epoch: int, number: int, end: int) -> _Block:
        """Return a block, or its beginning if this has the first `end` units."""
        start, length = self._place(number)
        size = min(BEGINNING if end <= BEGINNING else BLOCK, length, self._end - start)
        return self._blocks.get((epoch if self._reshuffled else 0, number, size), self._make_block)

    def _make_block(self, key: tuple[int, int, int]) -> _Block:
        epoch, block, size = key
        start, _ = self._place(block)
        units = self._schedules.get((block, size), lambda _: schedule(self._borders, start, size))
        source = shuffled(units, derive_key("mixture", self._seed, epoch, block), size)[:size].view(np.uint16)
        return _Block(source, self._borders.counts(start))

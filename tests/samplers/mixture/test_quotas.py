"""Each prefix of a sequence of sources has the quota of each source, with an error of less than one unit."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import cache
from itertools import product
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seeds import seeds

from dataload.samplers.keys import derive_key, mix
from dataload.samplers.mixture import borders as borders_module
from dataload.samplers.mixture.borders import BLOCK, Borders
from dataload.samplers.mixture.quotas import END, Quotas
from dataload.samplers.mixture.schedule import PART, SHIFTS, STRIDES, schedule, shuffled

RARE = [1, *[2**20 + number for number in range(7)]]


def assert_quotas(weights, start, counts, sources):
    """Check each prefix of `sources`, which begin at position `start` after `counts` units, in exact arithmetic."""
    total = sum(weights)
    positions = np.arange(1, len(sources) + 1)
    assert sum(counts.tolist()) == start
    for source, weight in enumerate(weights):
        ahead = int(counts[source]) * total - start * weight
        assert -total < ahead < total
        errors = ahead + np.cumsum(sources == source) * total - positions * weight
        assert errors.min() > -total, (source, weights)
        assert errors.max() < total, (source, weights)


def random_weights(chance):
    """Return weights of 2 to 50 sources: similar, of all magnitudes, one large and many small, or equal but one."""
    count = chance.randint(2, 50)
    kind = chance.choice(["similar", "magnitudes", "one", "equal"])
    if kind == "similar":
        return [chance.randint(1, 9) for _ in range(count)]
    if kind == "magnitudes":
        return [int(2 ** chance.uniform(0, 40)) for _ in range(count)]
    if kind == "one":
        return [chance.choice([1, count, 10 * count, count * count]), *[1] * (count - 1)]
    return [chance.randint(1, 20), *[7] * (count - 1)]


@pytest.mark.parametrize("seed", seeds(10, 100))
def test_every_prefix_has_its_quotas(seed):
    chance = random.Random(seed)
    weights = random_weights(chance)
    borders = Borders(Quotas(tuple(weights)))
    number = chance.choice([0, 1, 2**12 - 1, chance.randrange(2**31), END // BLOCK - 2])
    counts, ends = borders.counts(number * BLOCK), borders.counts((number + 1) * BLOCK)
    units = schedule(borders, number * BLOCK)
    for drawn in (units.units[0].T.ravel(), shuffled(units, seed)):
        assert_quotas(weights, number * BLOCK, counts, drawn)
        assert np.array_equal(ends - counts, np.bincount(drawn, minlength=len(weights)))


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 12) | st.integers(1, 2**40), min_size=1, max_size=14),
    st.integers(0, 9) | st.sampled_from([2**37, END // 128 - 1]),
)
@example([30, *[1] * 30], 3)
@example(RARE, 0)
def test_bisection_down_to_single_positions(weights, number):
    """A smaller block is bisected down to positions, without the walk: each step must be one unit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(borders_module, "BLOCK", 128)
        borders = Borders(Quotas(tuple(weights)))
        states = borders.inside(128 * number, 1, 128)
    total, positions = sum(weights), range(128 * number, 128 * number + 129)
    whole = np.array([[position * weight // total for position in positions] for weight in weights])
    exact = np.array([[position * weight % total == 0 for position in positions] for weight in weights])
    counts = whole + states
    assert (counts.sum(0) == positions).all()
    assert (np.diff(counts) >= 0).all()
    assert not (states & exact).any()


class Reference:
    """The sequence of one block by fractions and loops."""

    def __init__(self, weights):
        self.shares = [Fraction(weight, sum(weights)) for weight in weights]
        self.everyone = range(len(weights))
        self.state = cache(self._state)

    def _state(self, position):
        """Return the sources whose current unit is done at a position."""
        now = [position * share for share in self.shares]
        whole = [floor(quota) for quota in now]
        current = [s for s in self.everyone if now[s] > whole[s]]
        if position in (0, END):
            oldest = sorted(current, key=lambda s: -ceil((now[s] - whole[s]) / self.shares[s]))
            return frozenset(oldest[: int(position - sum(whole))])
        half = position & -position
        left, right = self.state(position - half), self.state(position + half)
        end = [(whole[s] + 1) / self.shares[s] for s in self.everyone]
        done = {s for s in current if s in left and (position - half) * self.shares[s] > whole[s]}
        never = {s for s in current if end[s] > position + half and s not in right}
        times = [time for time in {position, *map(ceil, end)} if time < position + half]

        def fits(chosen):
            for time in times:
                late = {s for s in self.everyone if end[s] > time}
                if len(late & chosen) > ceil(sum(time * self.shares[s] - whole[s] for s in late)):
                    return False
            return True

        for s in sorted(current, key=lambda s: ceil(whole[s] / self.shares[s] - position)):
            if s not in never and fits(done | {s}):
                done.add(s)
        return frozenset(done)

    def walk(self, part):
        """Return (source, first position, last position) for each position of a part."""

        def counts(position):
            return [floor(position * share) + (s in self.state(position)) for s, share in enumerate(self.shares)]

        walked, units, ends = [], counts(part), counts(part + PART)
        for position in range(part, part + PART):
            windows = {s: (floor(units[s] / w), ceil((units[s] + 1) / w) - 1) for s, w in enumerate(self.shares)}
            allowed = [s for s in self.everyone if units[s] < ends[s] and windows[s][0] <= position]
            source = min(allowed, key=lambda s: (min(windows[s][1], part + PART - 1), s))
            walked.append((source, *windows[source]))
            units[source] += 1
        return walked

    def block(self, number, key):
        """Return the sources of a block before and after the exchanges."""
        start, turns = number * BLOCK, list(product(SHIFTS, STRIDES))
        line = [unit for part in range(start, start + BLOCK, PART) for unit in self.walk(part)]
        before = [unit[0] for unit in line]
        draws = mix(key, np.arange(len(turns) * BLOCK // 128, dtype=np.uint64)).tolist()
        bits = [draw >> byte * 8 + 7 - bit & 1 for draw in draws for byte in range(8) for bit in range(8)]
        for turn, (shift, stride) in enumerate(turns):
            drawn = iter(bits[turn * BLOCK // 2 :])
            offsets = [offset for offset in range(PART) if offset & stride == 0]
            for offset, part in product(offsets, range(shift, BLOCK - PART + 1, PART)):
                early, late = part + offset, part + offset + stride
                fits = line[early][2] >= start + late and line[late][1] <= start + early
                if next(drawn) and fits:
                    line[early], line[late] = line[late], line[early]
        return before, [unit[0] for unit in line]


@pytest.mark.variants
@pytest.mark.parametrize(("weights", "number"), [([7, 2, 1], 0), ([1, 1, 50, 13, 13, 20, 2**20], 5)])
def test_blocks_are_those_of_the_reference(weights, number):
    walked, exchanged = Reference(weights).block(number, key=7)
    units = schedule(Borders(Quotas(tuple(weights))), number * BLOCK)
    assert units.units[0].T.ravel().tolist() == walked
    assert shuffled(units, 7).tolist() == exchanged


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_the_beginning_of_a_block_does_not_depend_on_its_rest(seed):
    chance = random.Random(seed)
    borders, start = Borders(Quotas(tuple(random_weights(chance)))), chance.choice([0, 7, 2**31]) * BLOCK
    size = chance.choice([1, 127, 128, 4096, BLOCK - 200])
    beginning = schedule(borders, start, size)
    assert beginning.units.shape[2] <= size // PART + 3
    whole = shuffled(schedule(borders, start), seed)
    assert shuffled(beginning, seed, size)[:size].tolist() == whole[:size].tolist()


def test_a_border_far_away_costs_the_same(monkeypatch):
    """The longest path from any border to both ends of the sequence has as many bisections as there are levels."""
    calls = []
    bisect = borders_module.bisect
    monkeypatch.setattr(borders_module, "bisect", lambda *given: calls.append(None) or bisect(*given))
    for position in (BLOCK, END // 3 // BLOCK * BLOCK, END - BLOCK):
        calls.clear()
        Borders(Quotas((5, 3, 2**30))).counts(position)
        assert len(calls) <= 32


def test_the_sequence_is_golden():
    first = shuffled(schedule(Borders(Quotas((5, 3, 1, 1))), 0), 1)
    assert "".join(map(str, first[:40])) == "1001021003010120030110010210031001020103"
    assert derive_key("golden", first.astype("<i4").tobytes()) == 0x9D15B7543A51B3B9
    far = shuffled(schedule(Borders(Quotas((10**9, 3 * 10**8 + 1, 77, 10**8))), 10**6 * BLOCK), 2)
    assert derive_key("golden", far.astype("<i4").tobytes()) == 0x4B2CDD6867806159
    many = shuffled(schedule(Borders(Quotas(tuple(range(1, 51)))), 3 * BLOCK), 3)
    assert derive_key("golden", many.astype("<i4").tobytes()) == 0xE7A4D3E69FAF7899

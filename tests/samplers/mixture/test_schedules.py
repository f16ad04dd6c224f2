"""Weights that change within an epoch: each prefix has the sum of the shares so far, on any ranks."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from seeds import seeds

from dataload.errors import ConfigError
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.quotas import Quotas
from dataload.samplers.mixture.sampler import MixtureSampler
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.mixture.weights import knots, plain, weights_of

SOURCES = [MixtureSource([90, 70], "a"), MixtureSource([200], "b"), MixtureSource([33, 100], "c")]
RAMP = weights_of(None, {0: [6, 3, 1], 500: [1, 1, 8], 600: [0, 1, 1]}, ramp=True)


def shares_of(weights, rows):
    """Return the share of each source in each row of an epoch, which is that at the middle of the row."""
    starts, each, ramp = knots(weights)
    corners = [[Fraction(weight, sum(some)) for weight in some] for some in each]
    shares, number = [], 0
    for row in range(rows):
        while number + 1 < len(starts) and starts[number + 1] <= row:
            number += 1
        here, after = corners[number], corners[min(number + 1, len(corners) - 1)]
        part = Fraction(0)
        if ramp and number + 1 < len(starts):
            part = Fraction(2 * (row - starts[number]) + 1, 2 * (starts[number + 1] - starts[number]))
        shares.append([a + (b - a) * part for a, b in zip(here, after, strict=True)])
    return shares


def random_schedule(chance, rows):
    count = chance.randint(2, 12)
    digits = chance.choice([0, 0, 3, 17])  # of fractions; many make denominators that 64 bits do not hold
    while True:
        at = [0, *sorted(chance.sample(range(1, rows + rows // 3), chance.randint(1, 7)))]
        some = [
            [chance.choice([0, 1, chance.randint(1, 50), round(chance.random(), digits)]) for _ in range(count)]
            for _ in at
        ]
        if all(map(sum, some)) and all(map(sum, zip(*some, strict=True))):
            return weights_of(None, dict(zip(at, some, strict=True)), ramp=chance.random() < 0.7)


@pytest.mark.variants
@pytest.mark.parametrize("seed", seeds(20, 100))
def test_every_prefix_of_a_random_schedule_has_its_quotas(seed):
    chance = random.Random(seed)
    rows = chance.choice([50, 700, 2500])
    weights = random_schedule(chance, rows)
    sources = [MixtureSource([chance.randint(1, 99)], str(number)) for number in range(len(knots(weights).weights[0]))]
    order = MixtureOrder(sources, weights, num_rows=rows, seed=seed)
    drawn, _ = order.draws(seed, np.arange(rows))
    for source, shares in enumerate(zip(*shares_of(order.weights, rows), strict=True)):
        counts = np.cumsum(drawn == source).tolist()
        assert all(abs(count - quota) < 1 for count, quota in zip(counts, accumulate(shares), strict=True))
    some = chance.choices(range(rows), k=30)
    assert order.draws(seed, np.array(some))[0].tolist() == drawn[some].tolist()


@pytest.mark.parametrize("weights", [[[5, 3, 2], [1, 1, 8]], [[0.123456789, 0.3, 2.7], [1.000000007, 0, 31]]])
def test_a_ramp_of_a_billion_rows_is_exact_at_any_place(weights):
    rows, chance = 10**9, random.Random(0)
    ramp = weights_of(None, dict(zip([0, rows], weights, strict=True)), ramp=True)
    order = MixtureOrder(SOURCES, ramp, num_rows=rows)
    quotas = Quotas(order.weights)
    for start in (0, rows // 3, rows - 70_000):
        drawn, indices = order.draws(1, np.arange(start, start + 70_000))
        for source in range(3):
            mine = np.flatnonzero(drawn == source)
            for place in chance.sample(range(len(mine)), min(len(mine), 50)):  # index i may come while the quota is in
                position, index = start + int(mine[place]), int(indices[mine[place]])  # (i - 1, i + 2)
                assert quotas.at(position)[source] - 1 < index < quotas.at(position + 1)[source]
                assert index == indices[mine[0]] + place


def test_quotas_count_up_to_whole_units():
    weights = weights_of(None, {0: [3, 1], 10: [1, 3]})  # from unit 3 on
    order = MixtureOrder(SOURCES[:2], weights, num_rows=400, batching="homogeneous", batch_rows=4)
    drawn = order.draws(0, np.arange(0, 400, 4))[0]
    quotas = accumulate([Fraction(3, 4)] * 3 + [Fraction(1, 4)] * 97)
    assert all(abs(count - quota) < 1 for count, quota in zip(np.cumsum(drawn == 0).tolist(), quotas, strict=True))


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_an_epoch_ends_where_the_quotas_say(stop):
    weights = weights_of(None, {0: [6, 3, 1], 100: [1, 1, 1], 5000: [1, 2, 3]}, ramp=True)
    order = MixtureOrder(SOURCES, weights, stop=stop)
    counts = np.bincount(order.draws(0, np.arange(order.n))[0], minlength=3)
    sizes = np.array([160, 200, 133])
    quotas = [float(quota) for quota in Quotas(order.weights).at(order.n)]
    if stop == "first_exhausted":
        assert (counts <= sizes).all()
        assert (np.array(quotas) > sizes - 2).any()
    else:
        assert (counts >= sizes).all()
        assert (np.array(quotas) < sizes + 2).any()


def test_needs_come_before_the_rows_that_need_them():
    order = MixtureOrder(SOURCES, RAMP, num_rows=900)
    blocks = np.searchsorted(np.cumsum(order.block_lengths), order.rows(2, np.arange(900)), "right")
    for start in (0, 450, 620):
        first = {}
        for position, block in enumerate(blocks[start:].tolist(), start):
            first.setdefault(block, position)
        needs = list(order.needs_from(2, start))
        assert needs == sorted(needs, key=lambda need: need[0])
        assert {block for _, block in needs} >= first.keys()
        for block, position in first.items():
            assert min(place for place, each in needs if each == block) <= position


def rows_of_ranks(samplers, batches):
    rows = []
    for each in zip(*(sampler.batches() for sampler in samplers), strict=True):
        if len(rows) == batches:
            break
        rows.append(np.concatenate(each).tolist())
    for sampler in samplers:
        sampler.advance(len(rows))
    return rows


def samplers_of(ranks, weights=RAMP, **options):
    options = {"num_rows": 960, "batch_size": 12 // ranks, "seed": 5, **options}
    return [MixtureSampler(SOURCES, ranks, rank, weights=weights, **options) for rank in range(ranks)]


def test_a_resume_inside_a_ramp_on_other_ranks_reads_what_an_uninterrupted_run_does():
    [alone] = samplers_of(1)
    expected = [batch.tolist() for batch in alone.batches()]
    found, state = [], None
    for ranks, batches in ((4, 17), (3, 21), (1, 1000)):
        samplers = samplers_of(ranks)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        found += rows_of_ranks(samplers, batches)
        [state] = {json.dumps(sampler.state_dict()): sampler.state_dict() for sampler in samplers}.values()
        assert len(json.dumps(state)) <= 4096
    assert found == expected


def test_a_resume_keeps_the_schedule_of_the_state_and_says_so(caplog):
    [alone], [other] = samplers_of(1), samplers_of(1, [1, 1, 1])
    expected = [batch.tolist() for batch in alone.batches()]
    rows_of_ranks([alone], 30)
    other.load_state_dict(json.loads(json.dumps(alone.state_dict())))
    assert "the state has schedule={0: [6, 3, 1], 500: [1, 1, 8], 600: [0, 1, 1]}, ramp=True, which" in caplog.text
    assert rows_of_ranks([other], 1000) == expected[30:]
    assert other.order.weights == RAMP
    other.set_weights([1, 1, 1])
    assert other.order.weights == (1, 1, 1)


def test_a_long_schedule_is_a_digest_in_the_state():
    long = weights_of(None, {row * 10: [row + 1, 7919 + row, 3] for row in range(400)}, ramp=True)
    [sampler], [same], [other] = samplers_of(1, long), samplers_of(1, long), samplers_of(1)
    rows_of_ranks([sampler], 3)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert isinstance(state["weights"], str)
    assert len(json.dumps(state)) <= 4096
    same.load_state_dict(state)
    assert same.cursor == 36
    with pytest.raises(ConfigError, match="only a digest of its weights, which are too long for it"):
        other.load_state_dict(state)


@pytest.mark.parametrize("broken", [[[0, 5], [[1, 1, 1]], False], [[0, -5], [[1, 1, 1]] * 2, True], [[0], [1], 3]])
def test_a_broken_schedule_in_a_state_is_an_error(broken):
    [sampler] = samplers_of(1)
    with pytest.raises(ConfigError):
        sampler.load_state_dict({**sampler.state_dict(), "weights": broken})


def test_schedules_that_mean_the_same_are_the_same():
    assert weights_of(None, {0: [3, 1], 5: [6, 2]}) == (3, 1)
    assert weights_of([0.5, 0.5], {7: [2, 1]}) == weights_of(None, {7: [20, 10], 0: [4, 4]})
    assert weights_of(plain(RAMP)) == RAMP


@pytest.mark.parametrize(
    ("weights", "schedule", "error"),
    [
        (None, {-1: [1, 1]}, "whole numbers from 0 on"),
        (None, {1.5: [1, 1]}, "whole numbers from 0 on"),
        (None, {"0": [1, 1]}, "whole numbers from 0 on"),
        (None, {2**40: [1, 1]}, "below 2\\*\\*40"),
        (None, {}, "must map rows"),
        (None, [[1, 1]], "must map rows"),
        (None, {5: [1, 1]}, "lacks row 0"),
        ([1, 1], {0: [1, 1]}, "leave out one"),
        (None, {0: [1, 1], 5: [0, 0]}, "at least one of them must be positive"),
        (None, {0: [1, -1]}, "zero or positive"),
        (None, {0: [1, 0], 5: [2, 0]}, "source 1 has the weight 0 at each row"),
        (None, {0: [1, 1], 5: [1, 1, 1]}, "for 2 and for 3 sources"),
        (None, {row: [1, 1 + row] for row in range(2000)}, "use ramp=True"),
    ],
)
def test_schedules_that_cannot_work(weights, schedule, error):
    with pytest.raises(ConfigError, match=error):
        weights_of(weights, schedule)


@pytest.mark.parametrize(
    ("weights", "schedule", "error"),
    [
        ({"web": 1, "code": -1}, None, "^weight -1 of source 'code': weights must be positive"),
        ({"web": 1, "cod": 1}, None, "differ in 'cod', 'code'"),
        ([1, 1, 1], None, "^3 weights for 2 sources"),
        (None, {0: [1, 1], 700: {"web": 0, "code": 0}}, "^from row 700 of the schedule on: .*one of them must be pos"),
        (None, {0: [1, 1], 700: {"web": 0, "code": -2}}, "^from row 700 of the .* on: weight -2 of source 'code'"),
        (None, {0: [1, 1], 700: {"web": 1}}, "^from row 700 of the schedule on: the names of .* differ in 'code'"),
        (None, {0: [1, 1], 700: 3}, "^from row 700 of the schedule on: weights=3: give a number for each source"),
        (None, {0: [1, 0], 700: [2, 0]}, "^source 'code' has the weight 0 at each row"),
    ],
)
def test_errors_name_the_source_and_the_row(weights, schedule, error):
    with pytest.raises(ConfigError, match=error):
        weights_of(weights, schedule, names=["web", "code"])


def test_ramps_need_a_schedule():
    with pytest.raises(ConfigError, match="needs schedule="):
        weights_of([1, 1], ramp=True)
    with pytest.raises(ConfigError, match="True or False"):
        weights_of([1, 1], {5: [2, 1]}, ramp="linear")
    with pytest.raises(ConfigError, match="4 weights for 3 sources"):
        MixtureOrder(SOURCES, weights_of(None, {0: [1] * 4, 9: [1, 2, 3, 4]}))
    with pytest.raises(ConfigError, match="'c' has the weight 0 at the end of the schedule"):
        MixtureOrder(SOURCES, weights_of(None, {0: [1, 1, 1], 9: [1, 1, 0]}), stop="all_exhausted")

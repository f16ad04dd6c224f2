"""Batches within a token budget: each row once, never above it, equally many on each rank."""

from __future__ import annotations

import json
import pickle
from itertools import islice

import numpy as np
import pytest

from dataload.errors import ConfigError
from dataload.loader.trainer_batches import TrainerBatches
from dataload.samplers.mixture.sampler import MixtureSampler
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.sharded import ShardedSampler
from dataload.samplers.token_batches import TokenBudget

BLOCKS = [500, 0, 700, 300] * 8
ROWS = sum(BLOCKS)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(4.5, 1, ROWS).astype(np.int64), 0, 2048)
BUDGET = 4096


def budget_of(tokens=BUDGET, multiple=1, lengths=LENGTHS):
    return TokenBudget(tokens, lengths.__getitem__, float(lengths.mean()), multiple, "n")


def samplers_of(ranks, *, budget=None, blocks=BLOCKS, **options):
    budget = budget_of() if budget is None else budget
    return [ShardedSampler(blocks, ranks, rank, **{"window": 6, "budget": budget, **options}) for rank in range(ranks)]


def steps_of(samplers, epoch=0):
    """Return the batches of all ranks, step by step."""
    return list(zip(*(sampler.batches(epoch) for sampler in samplers), strict=True))


def padded(rows, multiple=1):
    return int(-(-max(LENGTHS[rows].max(), 1) // multiple) * multiple) * len(rows)


@pytest.mark.parametrize("shuffle", ["block", "full", False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 3])
def test_each_row_comes_once_within_the_budget_in_equally_many_steps(ranks, shuffle):
    multiple = 8 if ranks > 1 else 1
    samplers = samplers_of(ranks, budget=budget_of(multiple=multiple), shuffle=shuffle)
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        steps = steps_of(samplers, epoch)  # strict: equally many on each rank
        batches = [batch for step in steps for batch in step]
        assert all(padded(batch, multiple) <= BUDGET for batch in batches)
        assert sorted(np.concatenate(batches).tolist()) == list(range(ROWS))
        assert {sampler.steps.left(epoch, 0) for sampler in samplers} == {len(steps)}
        assert not any(sampler.padding for sampler in samplers)


@pytest.mark.parametrize("ranks", [1, 8])
def test_padding_is_that_of_rows_sorted_in_their_window(ranks):
    samplers = samplers_of(ranks)
    borders, base = samplers[0].order.borders(0), ShardedSampler(BLOCKS, 1, 0, window=6).order
    best = 0
    for start, end in zip(borders, borders[1:]):  # noqa: B905, RUF007
        lengths = np.sort(np.maximum(LENGTHS[base.rows(0, np.arange(start, end))], 1))[::-1]
        while len(lengths):
            first = lengths[: BUDGET // lengths[0]]
            best += len(first) * int(lengths[0])
            lengths = lengths[len(first) :]
    used = sum(padded(batch) for step in steps_of(samplers) for batch in step)
    assert used - LENGTHS.sum() <= 1.1 * (best - LENGTHS.sum())
    assert used - LENGTHS.sum() < 0.05 * used


def test_the_batches_of_a_step_are_similar():
    ratios = [min(sizes) / max(sizes) for sizes in (list(map(padded, step)) for step in steps_of(samplers_of(4)))]
    assert np.median(ratios) > 0.9


def test_each_epoch_has_other_batches_in_another_order():
    [sampler] = samplers_of(1, blocks=[ROWS], budget=budget_of(lengths=np.arange(1, ROWS + 1)[::-1] % 2000))
    first, second = ([frozenset(batch.tolist()) for batch in sampler.batches(epoch)] for epoch in (0, 1))
    assert len(set(first) & set(second)) < len(first) / 4
    longest = [max(batch) for batch in first]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))
    assert [frozenset(batch.tolist()) for batch in sampler.batches(0)] == first


def test_a_resume_in_mid_epoch_on_other_ranks_loses_and_repeats_no_row():
    seen, state = [], None
    for ranks, steps in ((4, 20), (3, 31), (1, 10**6)):
        samplers = samplers_of(ranks)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        taken = list(islice(zip(*(sampler.batches() for sampler in samplers), strict=True), steps))
        batches = [batch for step in taken for batch in step]
        assert all(padded(batch) <= BUDGET for batch in batches)
        seen += np.concatenate(batches).tolist()
        for sampler in samplers:
            sampler.advance(len(taken))
        [state] = {json.dumps(sampler.state_dict()) for sampler in samplers}
        assert len(state) <= 4096
        state = json.loads(state)
    assert sorted(seen) == list(range(ROWS))


def test_a_resume_on_the_same_ranks_goes_on_with_the_same_batches():
    whole = steps_of(samplers_of(2))
    samplers = samplers_of(2)
    for sampler in samplers:
        sampler.advance(40)
    resumed = samplers_of(2)
    for sampler in resumed:
        sampler.load_state_dict(samplers[0].state_dict())
    rest = steps_of(resumed)
    assert [[batch.tolist() for batch in step] for step in rest] == [
        [batch.tolist() for batch in step] for step in whole[40:]
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_with_fewer_rows_than_ranks_only_the_last_step_repeats_rows(ranks):
    """Rows that fill a batch each cannot be divided any further."""
    lengths = np.full(13, 4096)
    samplers = samplers_of(ranks, blocks=[13], budget=budget_of(lengths=lengths))
    steps = steps_of(samplers)
    assert all(len(batch) == 1 for step in steps for batch in step)
    rows = [int(batch[0]) for step in steps for batch in step]
    assert len(steps) == -(-13 // ranks)
    assert len(set(rows)) == 13
    assert sum(sampler.padding for sampler in samplers) == len(rows) - 13 == -13 % ranks
    last = {sampler.rank: int(steps[-1][sampler.rank][0]) for sampler in samplers}
    own = {row for rank, row in last.items() if not samplers[rank].padding}
    assert {row for rank, row in last.items() if samplers[rank].padding} <= own
    dropping = samplers_of(ranks, blocks=[13], budget=budget_of(lengths=lengths), drop_last=True)
    assert len(steps_of(dropping)) == 13 // ranks == dropping[0].here.left
    assert not any(sampler.padding for sampler in dropping)
    assert dropping[0].finished_at(13 - 13 % ranks)
    assert not dropping[0].finished_at(13 - ranks - 13 % ranks)


def test_a_mixture_has_batches_within_the_budget():
    sources = [MixtureSource([600, 400], "a"), MixtureSource([900], "b")]
    samplers = [
        MixtureSampler(sources, 2, rank, weights=[3, 1], num_rows=4000, budget=budget_of()) for rank in range(2)
    ]
    batches = [batch for step in steps_of(samplers) for batch in step]
    assert all(padded(batch) <= BUDGET for batch in batches)
    rows = np.concatenate(batches)
    assert len(rows) == 4000
    assert sorted(rows.tolist()) == sorted(samplers[0].order._base.rows(0, np.arange(4000)).tolist())


def test_plan_windows_of_a_mixture_are_sized_by_its_weights():
    """Of short rows by the million and a few long ones, an epoch may have mostly the long ones."""
    lengths = np.repeat([1, 1000], [10_000, 500])
    sources = [MixtureSource([10_000], "short"), MixtureSource([500], "long")]

    def plan_windows(*weights):
        budget = TokenBudget(4000, lengths.__getitem__, float(lengths.mean()), means=(1.0, 1000.0))
        order = MixtureSampler(sources, 1, 0, weights=list(weights), num_rows=20_000, budget=budget).order
        return len(order.borders(0)) - 1, order

    few, order = plan_windows(1000, 1)
    many, _ = plan_windows(1, 1000)
    assert few < many
    assert order.budget.mean_of(order.weights) == pytest.approx((1000 + 1000) / 1001)
    resumed = order.with_options(weights=[1, 1000])
    assert len(resumed.borders(0)) - 1 == many


def test_tokens_and_padding_of_an_epoch_are_those_of_its_batches():
    [sampler] = samplers_of(1, budget=budget_of(multiple=8))
    tokens, padding = sampler.order.tokens_of_epoch(1)
    assert tokens == LENGTHS.sum()
    assert tokens + padding == sum(padded(batch, 8) for batch in sampler.batches(1))


def test_row_groups_are_needed_from_the_begin_of_their_window_on():
    [sampler] = samplers_of(1)
    order = sampler.order
    rows = order.rows(1, np.arange(ROWS))
    blocks = np.searchsorted(np.cumsum(BLOCKS), rows, "right")
    start = next(order.ends_from(1, order.borders(1)[1]))
    first = {}
    for position, block in enumerate(blocks[start:].tolist(), start):
        first.setdefault(block, position)
    needs = dict(reversed([(block, position) for position, block in order.needs_from(1, start)]))
    assert needs.keys() >= first.keys()
    assert all(needs[block] <= position for block, position in first.items())


def test_torch_takes_the_rows_of_the_batches():
    [sampler] = samplers_of(1)
    batches = [batch.tolist() for batch in sampler.batches(0)]
    assert list(sampler) == [row for batch in batches for row in batch]
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    taken = list(TrainerBatches(sampler, sampler.batch_size, False))
    assert taken == batches
    assert [rows.place[1] for rows in taken] == [0, *np.cumsum([*map(len, batches)])[:-1].tolist()]
    assert sampler.epoch == 1


def test_samplers_are_pickled_small():
    lengths = LENGTHS[:13]
    [sampler] = samplers_of(1, blocks=[13], budget=budget_of(lengths=lengths))
    batches = [batch.tolist() for batch in sampler.batches(3)]
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(sampler)).batches(3)] == batches


def test_states_of_other_batches_are_refused():
    [sampler] = samplers_of(1)
    begin = sampler.state_dict()
    sampler.advance(9)
    state = sampler.state_dict()
    for other in (budget_of(2048), budget_of(multiple=16)):
        [resumed] = samplers_of(1, budget=other)
        with pytest.raises(ConfigError, match="until the epoch ends"):
            resumed.load_state_dict(state)
        resumed.load_state_dict(begin)  # No batch has been taken: those of this loader come.
        assert max(map(padded, resumed.batches())) <= other.tokens
    [resumed] = samplers_of(1)
    with pytest.raises(ConfigError, match="inside a batch"):
        resumed.load_state_dict({**state, "cursor": state["cursor"] - 1})
    [by_rows] = [ShardedSampler(BLOCKS, 1, 0, window=6)]
    with pytest.raises(ConfigError, match="batches that are cut otherwise"):
        by_rows.load_state_dict(state)
    with pytest.raises(ConfigError, match="in place of batch_tokens"):
        resumed.load_state_dict(by_rows.state_dict())


def test_an_epoch_of_no_rows_has_no_batches():
    [sampler] = samplers_of(1, blocks=[0])
    assert list(sampler.batches()) == []
    assert sampler.here.left == sampler.padding == 0

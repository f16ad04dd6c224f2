"""Ranks share the epochs of a mixture as they share those of one dataset, and resume where they stopped."""

from __future__ import annotations

import json
import math
import random
from itertools import islice, pairwise, product

import numpy as np
import pytest
from nightly import NIGHTLY
from torch.utils.data import DataLoader

from dataload.errors import ConfigError
from dataload.samplers.mixture.sampler import MixtureSampler
from dataload.samplers.mixture.source import MixtureSource

LENGTHS = [[40, 0, 25, 60, 31], [7, 9], [300, 250, 100]]
SOURCES = [MixtureSource(lengths, name) for lengths, name in zip(LENGTHS, "abc", strict=True)]
WEIGHTS = [3, 1, 4]


def ranks(num_replicas, sources=SOURCES, **arguments):
    return [MixtureSampler(sources, num_replicas, rank, **arguments) for rank in range(num_replicas)]


def global_batches(samplers, epoch=0, cursor=0):
    """Return the rows of each global batch, over all ranks."""
    return [np.concatenate(batch).tolist() for batch in zip(*(s.batches(epoch, cursor) for s in samplers), strict=True)]


@pytest.mark.parametrize("batching", ["mixed", "homogeneous"])
@pytest.mark.parametrize("num_streams", [1, 4])
def test_resuming_on_2_4_and_1_ranks_gives_the_same_rows(batching, num_streams):
    """The smallest source has wrapped many times before each change."""
    arguments = {"weights": WEIGHTS, "num_rows": 1003, "batching": batching, "num_streams": num_streams, "seed": 3}
    whole = MixtureSampler(SOURCES, 1, 0, batch_size=16, **arguments)
    expected = whole.order.rows(5, np.arange(1003)).tolist()
    samplers, seen, state = ranks(2, batch_size=8, **arguments), [], None
    for num_replicas, batches in ((2, 21), (4, 19), (1, 23)):
        if state is not None:
            samplers = ranks(num_replicas, batch_size=16 // num_replicas)
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(5)
            else:
                sampler.load_state_dict(json.loads(state))
        taken = global_batches(samplers, 5, samplers[0].cursor)
        assert len(taken) == -(-(1003 - samplers[0].cursor) // 16)
        if num_replicas == 1:
            seen += taken
            break
        seen += taken[:batches]
        for sampler in samplers:
            sampler.advance(batches)
        [state] = {json.dumps(sampler.state_dict()) for sampler in samplers}
    assert [sorted(batch) for batch in seen] == [sorted(expected[start : start + 16]) for start in range(0, 1003, 16)]
    source_of = np.searchsorted(whole.order.first_rows, expected, "right")
    assert np.bincount(source_of)[2] > 5 * 16
    if batching == "homogeneous":
        assert all(len(set(source_of[start : start + 16].tolist())) == 1 for start in range(0, 1003, 16))


def test_resuming_elsewhere_loses_and_repeats_nothing():
    chance = random.Random(0)
    worlds = [(1, 1), (2, 3), (3, 8), (4, 4), (7, 5)]
    for _ in range(40 if NIGHTLY else 15):
        first, second = chance.choice(worlds), chance.choice(worlds)
        arguments = {"weights": WEIGHTS, "num_rows": chance.randint(1, 900), "num_streams": chance.choice([1, 2, 3])}
        samplers = ranks(first[0], batch_size=first[1], **arguments)
        expected = samplers[0].order.rows(4, np.arange(samplers[0].num_rows))
        taken = chance.randint(0, samplers[0].num_rows // samplers[0].global_batch_size)
        for sampler in samplers:
            sampler.set_epoch(4)
            sampler.advance(taken)
        [state] = {json.dumps(sampler.state_dict()) for sampler in samplers}
        resumed = ranks(second[0], batch_size=second[1])
        for sampler in resumed:
            sampler.load_state_dict(json.loads(state))
        cursor = resumed[0].cursor
        padding = [sampler.padding_from(cursor) for sampler in resumed]
        rest = [np.concatenate([*sampler.batches(), []]).astype(int).tolist() for sampler in resumed]
        rows = [row for mine, pad in zip(rest, padding, strict=True) for row in mine[: len(mine) - pad]]
        assert sorted(rows) == sorted(expected[cursor:].tolist())
        assert len({len(mine) for mine in rest}) == 1
        assert sum(padding) < second[0]


@pytest.mark.parametrize("batching", ["mixed", "homogeneous"])
def test_global_batches_do_not_depend_on_the_world(batching):
    seen = set()
    for num_replicas, batch_size, num_nodes in [(1, 24, 1), (2, 12, 2), (3, 8, 1), (6, 4, 3), (24, 1, 6)]:
        samplers = ranks(
            num_replicas,
            batch_size=batch_size,
            num_nodes=num_nodes,
            num_streams=6,
            drop_last=True,
            batching=batching,
            weights=WEIGHTS,
            num_rows=1000,
        )
        assert {len(sampler) for sampler in samplers} == {41 * batch_size}
        assert {sampler.padding for sampler in samplers} == {0}
        seen.add(str([sorted(batch) for batch in global_batches(samplers, epoch=2)]))
    assert len(seen) == 1


def test_padding_repeats_the_first_rows_at_the_very_end():
    for num_replicas, batch_size in product((1, 2, 3, 7), (1, 4)):
        samplers = ranks(num_replicas, batch_size=batch_size, weights=WEIGHTS, num_rows=101)
        expected = samplers[0].order.rows(0, np.arange(101)).tolist()
        batches = global_batches(samplers)
        assert sum(sampler.padding for sampler in samplers) == -101 % num_replicas
        rows = [row for batch in batches for row in batch]
        assert sorted(rows) == sorted(expected + expected[: -101 % num_replicas])
        assert rows[:101] == expected


@pytest.mark.variants
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_replicas", "batch_size"), [(1, 24), (3, 8), (6, 4), (8, 3), (4, 3), (3, 1)])
def test_homogeneous_batches_keep_to_one_source_at_the_end(num_replicas, batch_size, drop_last):
    """Each epoch ends with a partial global batch, whose padding repeats its own rows."""
    options = {"weights": WEIGHTS, "batching": "homogeneous", "drop_last": drop_last}
    for num_rows in (961, 965, 969, 976, 983, 984):
        state = MixtureSampler(SOURCES, 1, 0, num_rows=num_rows, batch_size=24, **options).state_dict()
        samplers = ranks(num_replicas, batch_size=batch_size, drop_last=drop_last)
        size = num_replicas * batch_size
        for sampler in samplers:
            sampler.load_state_dict(state)
        order = samplers[0].order
        for epoch, cursor in ((0, 0), (3, 960 - 2 * size), (4, num_rows - num_rows % size)):
            expected = order.rows(epoch, np.arange(cursor, num_rows)).tolist()
            left = len(expected) - (len(expected) % size if drop_last else 0)
            assert len({sum(map(len, sampler.batches(epoch, cursor))) for sampler in samplers}) == 1
            batches = global_batches(samplers, epoch, cursor)
            assert [len(batch) for batch in batches[:-1]] == [size] * max(0, len(batches) - 1)
            for batch in batches:
                assert len(set(np.searchsorted(order.first_rows, batch, "right"))) == 1
            whole = [row for batch in batches for row in batch]
            assert whole[:left] == expected[:left]
            assert set(whole[left:]) <= set(expected[-(len(expected) % size or 1) :])
            assert len(whole) - left == (0 if drop_last else -left % num_replicas)


def test_a_start_inside_a_homogeneous_batch():
    sampler = MixtureSampler(SOURCES, 1, 0, weights=WEIGHTS, num_rows=107, batch_size=16, batching="homogeneous")
    for cursor, sizes, wrong in ((8, (8, 4), (16,)), (100, (16, 4), ()), (104, (8, 16), ()), (107, (16,), ())):
        state = {**sampler.state_dict(), "cursor": cursor}
        for size in (*sizes, *wrong):
            resumed = MixtureSampler(SOURCES, 1, 0, batch_size=size)
            if size in wrong:
                with pytest.raises(ConfigError, match="all ranks together have 8 rows"):
                    resumed.load_state_dict(state)
                continue
            resumed.load_state_dict(state)
            for rows in resumed.batches():
                assert len(set(np.searchsorted(resumed.order.first_rows, rows, "right"))) == 1


@pytest.mark.parametrize(("num_nodes", "num_streams", "per_node", "batch_size"), [(2, 2, 1, 8), (3, 6, 2, 4)])
def test_nodes_keep_to_their_own_row_groups(num_nodes, num_streams, per_node, batch_size):
    chance = random.Random(1)
    sources = [MixtureSource([chance.randint(0, 60) for _ in range(60)], str(number)) for number in range(3)]
    read = [set() for _ in range(num_nodes)]
    samplers = ranks(
        num_nodes * per_node,
        sources,
        weights=[2, 1, 5],
        num_rows=12_000,  # several epochs of each source
        batch_size=batch_size,
        num_streams=num_streams,
        num_nodes=num_nodes,
        drop_last=True,
    )
    order = samplers[0].order
    block_of = np.repeat(np.arange(180), order.block_lengths)
    foreign = 0
    for rank, sampler in enumerate(samplers):
        for epoch in (0, 1, 5):
            used = block_of[np.concatenate(list(sampler.batches(epoch)))]
            needed = set(sampler.blocks_from(epoch))
            read[rank // per_node] |= needed
            foreign += sum(block not in needed for block in used.tolist())
    # Two nodes need a row group only if it lies on a border of streams.
    assert sum(map(len, read)) <= len(set(block_of)) + 3 * (num_streams - 1)
    wraps = sum(12_000 // sum(source.block_lengths) + 1 for source in sources)
    assert foreign <= 3 * (num_streams - 1) * wraps
    assert foreign < 0.01 * 3 * 12_000


def test_weights_change_between_epochs_and_are_in_the_state():
    sampler = MixtureSampler(SOURCES, 1, 0, batch_size=10, num_rows=500)
    assert sampler.state_dict()["weights"] == [156 // 2, 16 // 2, 650 // 2]
    list(sampler)
    sampler.set_weights([0.5, 0.25, 0.25])
    assert (sampler.epoch, sampler.cursor) == (1, 0)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state["weights"] == [2, 1, 1]
    sources = np.searchsorted(sampler.order.first_rows, list(sampler), "right") - 1
    assert np.bincount(sources).tolist() == [250, 125, 125]
    resumed = MixtureSampler(SOURCES, 1, 0, batch_size=10)
    resumed.load_state_dict(state)
    assert resumed.order.weights == (2, 1, 1)
    resumed.seek(1, 500)
    with pytest.raises(ConfigError, match="weight -1 of source 1"):
        resumed.set_weights([1, -1, 1])
    resumed.set_weights([1, 1, 1])
    assert (resumed.epoch, resumed.cursor, resumed.order.weights) == (2, 0, (1, 1, 1))


def test_weights_that_are_set_in_an_epoch_hold_from_the_next_one_on():
    sampler = MixtureSampler(SOURCES, 1, 0, batch_size=10, num_rows=500, weights=WEIGHTS)
    sampler.advance(3)
    sampler.set_weights([2, 2, 1])
    state = json.loads(json.dumps(sampler.state_dict()))
    assert (state["weights"], state["next_weights"]) == (WEIGHTS, [2, 2, 1])
    resumed = MixtureSampler(SOURCES, 1, 0, batch_size=10)
    resumed.load_state_dict(state)
    for each in (sampler, resumed):
        assert each.order.weights == (3, 1, 4)
        assert len(list(each)) == 470
        assert (each.order.weights, each.next_weights) == ((2, 2, 1), None)
        each.advance(3)
    resumed.load_state_dict({**state, "next_weights": None})  # An earlier change does not hold any more.
    list(resumed)
    assert resumed.order.weights == (3, 1, 4)


def test_weights_that_are_set_in_an_iteration_hold_from_the_next_epoch_on():
    """StatefulDataLoader saves the sampler and its iterator, and marks no batches."""
    sampler, resumed, plain = (MixtureSampler(SOURCES, 1, 0, batch_size=10, weights=WEIGHTS) for _ in range(3))
    rows = iter(sampler)
    begun = list(islice(rows, 20))
    sampler.set_weights([1, 1, 1])
    resumed.load_state_dict(sampler.state_dict())
    rest = iter(resumed)
    rest.load_state_dict(rows.state_dict())
    assert [*begun, *rest] == [*begun, *rows] == list(plain)
    assert resumed.order.weights == sampler.order.weights == (1, 1, 1)
    assert list(resumed) == list(sampler)
    sampler.set_weights(WEIGHTS)  # No iteration goes on.
    assert sampler.order.weights == (3, 1, 4)


def test_other_arguments_and_weights_hold_from_the_next_epoch_on(caplog):
    sampler = MixtureSampler(SOURCES, 1, 0, batch_size=10, num_rows=500, weights=WEIGHTS)
    sampler.advance(3)
    sampler.set_weights([2, 2, 1])
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = MixtureSampler(SOURCES, 1, 0, batch_size=10, seed=4, shuffle="full", windows=[1, 2, 3])
    resumed.load_state_dict(state)
    assert "seed=4, windows=[1, 2, 3], as passed here, holds from epoch 1 on" in caplog.text
    assert list(resumed) == list(sampler)
    fresh = MixtureSampler(
        SOURCES, 1, 0, batch_size=10, num_rows=500, weights=[2, 2, 1], seed=4, shuffle="full", windows=[1, 2, 3]
    )
    fresh.set_epoch(1)
    assert list(resumed) == list(fresh)


def test_arguments_that_a_state_replaces_are_named(caplog):
    sampler = MixtureSampler(SOURCES, 1, 0, batch_size=10, num_rows=500, weights=WEIGHTS)
    sampler.advance(3)
    state = sampler.state_dict()
    given = {"stop": "all_exhausted", "num_rows": 400, "batching": "homogeneous"}
    for rank in range(2):  # Rank 0 warns for all.
        resumed = MixtureSampler(SOURCES, 2, rank, batch_size=5, weights=[1, 1, 1], **given)
        resumed.load_state_dict(state)
        assert (resumed.order.weights, resumed.num_rows, resumed.order.stop) == ((3, 1, 4), 500, "first_exhausted")
    [warning] = caplog.messages
    assert warning == (
        "the state has weights=[3, 1, 4], stop='first_exhausted', num_rows=500, batching='mixed', which the loader "
        "keeps instead of weights=[1, 1, 1], stop='all_exhausted', num_rows=400, batching='homogeneous', as passed "
        "here: to change the weights of the next epochs, call set_weights after load_state_dict (with fit: in its "
        "evaluate=); to change the others, call set_epoch instead of load_state_dict"
    )
    caplog.clear()
    sampler.set_weights([1, 1, 1])  # from the next epoch on
    resumed = MixtureSampler(SOURCES, 1, 0, batch_size=10, num_rows=500, weights=[1, 1, 1])
    resumed.load_state_dict(sampler.state_dict())
    sampler.load_state_dict(sampler.state_dict())
    assert not caplog.messages


def test_weights_change_the_length_of_an_epoch():
    sampler = MixtureSampler(SOURCES, 2, 1, batch_size=10)
    assert len(sampler) == 822 // 2
    sampler.set_weights([1, 1, 1])
    assert sampler.num_rows == 3 * 16
    assert len(sampler) == 24
    assert sum(map(len, sampler.batches())) == 24


def test_a_run_of_homogeneous_batches_resumes_between_epochs_on_any_ranks():
    sources = [MixtureSource([300], "a"), MixtureSource([200], "b")]
    saved = MixtureSampler(sources, 1, 0, batching="homogeneous", batch_size=64)
    saved.seek(1, 0)
    resumed = MixtureSampler(sources, 3, 0, batching="homogeneous", batch_size=32)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.epoch, resumed.order.batch_rows) == (1, 96)
    assert len(next(iter(resumed.batches()))) == 32


def test_later_epochs_of_a_resumed_run_have_its_own_homogeneous_batches():
    sources = [MixtureSource([300], "a"), MixtureSource([200], "b")]
    saved = MixtureSampler(sources, 1, 0, batching="homogeneous", batch_size=64)
    saved.advance()
    resumed = MixtureSampler(sources, 1, 0, batching="homogeneous", batch_size=32)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.order.batch_rows == 64
    resumed.advance(len(list(resumed.batches())))
    again = MixtureSampler(sources, 1, 0, batching="homogeneous", batch_size=32)
    again.load_state_dict(resumed.state_dict())
    resumed.set_epoch(1)
    again.set_epoch(1)
    fresh = MixtureSampler(sources, 1, 0, batching="homogeneous", batch_size=32)
    fresh.set_epoch(1)
    assert list(resumed) == list(again) == list(fresh)


def test_a_homogeneous_epoch_that_is_over_resumes_on_any_ranks():
    sources = [MixtureSource([300], "a"), MixtureSource([200], "b")]
    saved = MixtureSampler(sources, 1, 0, batching="homogeneous", batch_size=64)
    saved.seek(0, saved.num_rows)
    resumed, fresh = (MixtureSampler(sources, 3, 0, batching="homogeneous", batch_size=32) for _ in range(2))
    resumed.load_state_dict(saved.state_dict())
    assert list(resumed) == []
    fresh.set_epoch(1)
    assert list(resumed) == list(fresh)


def test_a_small_source_that_ends_the_epoch_is_named(caplog):
    sources = [MixtureSource([1_000_000], "big"), MixtureSource([5], "rare")]
    for streams, rows in ((1, 1_000_005), (8, 5)):
        caplog.clear()
        sampler = MixtureSampler(sources, 8, 0, num_streams=streams, num_nodes=1)
        assert sampler.num_rows == rows
        assert len(caplog.messages) == (streams > 1)
    assert "has 5 rows, not about 1000005: source 'rare' has 5 rows and comes 8 rows at a time" in caplog.text
    assert "num_rows=1000005 in mix gives an epoch of that length" in caplog.text
    caplog.clear()
    assert MixtureSampler(sources, 8, 0, num_streams=8, num_nodes=1, num_rows=1_000_005).num_rows == 1_000_005
    MixtureSampler(sources, 8, 1, num_streams=8, num_nodes=1)  # Another rank is silent.
    assert not caplog.messages


@pytest.mark.parametrize(
    ("stop", "rows", "weights", "named"),
    [("all_exhausted", [600, 5000], [1, 1000], "a"), ("first_exhausted", [700, 100_000], [1, 150], "a")],
)
def test_the_source_that_ends_the_epoch_is_named(caplog, stop, rows, weights, named):
    sources = [MixtureSource([count], name) for count, name in zip(rows, "ab", strict=True)]
    MixtureSampler(sources, 1, 0, weights=weights, stop=stop, batching="homogeneous", batch_size=512)
    [message] = caplog.messages
    assert f"source {named!r} has" in message


def test_a_state_that_does_not_suit():
    saved = MixtureSampler(SOURCES, 2, 0, batch_size=8, batching="homogeneous")
    saved.advance()
    state = saved.state_dict()
    for num_replicas, batch_size in ((4, 4), (4, 2), (1, 16), (1, 1)):
        resumed = MixtureSampler(SOURCES, num_replicas, 0, batch_size=batch_size)
        resumed.load_state_dict(state)
        assert resumed.order.batch_rows == 16
    for num_replicas, batch_size in ((2, 16), (3, 4)):
        with pytest.raises(ConfigError, match="together have 16"):
            MixtureSampler(SOURCES, num_replicas, 0, batch_size=batch_size).load_state_dict(state)
    renamed = [MixtureSource(lengths, name) for lengths, name in zip(LENGTHS, "abd", strict=True)]
    for sources in (SOURCES[::-1], SOURCES[:2], renamed):
        with pytest.raises(ConfigError, match=r"another dataset .* sources of other names, .* or in another order"):
            MixtureSampler(sources, 1, 0).load_state_dict(state)
    with pytest.raises(ConfigError, match="lacks weights"):
        MixtureSampler(SOURCES, 1, 0, batch_size=16).load_state_dict({n: v for n, v in state.items() if n != "weights"})


@pytest.mark.parametrize("batching", ["mixed", "homogeneous"])
def test_a_refused_state_changes_nothing(batching):
    saved = MixtureSampler(SOURCES, 1, 0, batch_size=8, batching=batching, seed=3, weights=WEIGHTS)
    saved.advance()
    state = saved.state_dict()
    sampler, fresh = (MixtureSampler(SOURCES, 1, 0, batch_size=8, batching=batching) for _ in range(2))
    wrong = [{"cursor": 8.0}, {"epoch": "1"}, {"cursor": 10**6}, {"next_weights": [1, 2]}, {"next_weights": [1, 2, 0]}]
    numbers = product(("seed", "batch_rows", "num_streams", "num_rows", "windows", "weights"), ("x", 1.5, [], math.inf))
    wrong += [{name: value} for name, value in numbers]
    for refused in (None, {}, [], *({**state, **each} for each in wrong)):
        with pytest.raises(ConfigError):
            sampler.load_state_dict(refused)
        assert sampler.state_dict() == fresh.state_dict()
        assert sampler.next_weights is None
    for _ in range(2):
        assert list(sampler) == list(fresh)


@pytest.mark.parametrize("count", [2, 100, 250, 1024])
def test_the_state_of_many_sources_is_small_and_exact(count):
    chance = random.Random(0)
    lengths = [chance.randint(1, 10**8) for _ in range(count)]
    sources = [MixtureSource([rows] * 10, f"source number {number}") for number, rows in enumerate(lengths)]
    weights = [chance.random() for _ in sources]
    sampler = MixtureSampler(sources, 1, 0, weights=weights, num_rows=10**6, batch_size=100)
    sampler.advance(5)
    sampler.set_weights(lengths)
    text = json.dumps(sampler.state_dict())
    assert len(text) <= 4096
    known = {} if count <= 100 else {"weights": weights}
    resumed = MixtureSampler(sources, 1, 0, num_rows=10, **known)
    if count == 1024:
        with pytest.raises(ConfigError, match="digest of its weights of the next epoch"):
            resumed.load_state_dict(json.loads(text))
        resumed.advance()
        resumed.set_weights(lengths)
    resumed.load_state_dict(json.loads(text))
    assert json.dumps(resumed.state_dict()) == text
    if count > 100:
        with pytest.raises(ConfigError, match="digest of its weights"):
            MixtureSampler(sources, 1, 0).load_state_dict(json.loads(text))


def test_under_a_plain_dataloader():
    samplers = ranks(3, batch_size=4, weights=WEIGHTS, num_rows=100)
    loaders = [DataLoader(range(822), batch_size=4, sampler=sampler) for sampler in samplers]
    for epoch in range(2):
        for loader, sampler in zip(loaders, samplers, strict=True):
            sampler.set_epoch(epoch)
            expected = [batch.tolist() for batch in sampler.batches()]
            assert [batch.tolist() for batch in loader] == expected


def test_runs_grow_and_are_the_batches():
    [sampler] = ranks(1, batch_size=8, weights=WEIGHTS, num_rows=1000)
    sizes = [len(run) for run, _, _ in sampler.runs()]
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes))
    assert sum(sizes) == 125


@pytest.mark.parametrize("late", [False, True])
def test_the_state_of_late_batches_has_the_next_weights(late: bool) -> None:
    """Torch takes the last rows before the consumer has the earlier ones; the sampler then is in the next epoch."""
    sampler, resumed = (MixtureSampler(SOURCES, 1, 0, batch_size=10, num_rows=50, weights=WEIGHTS) for _ in range(2))
    sampler.advance()
    for _ in range(late):
        list(sampler)
    sampler.set_weights([2, 2, 1])
    for _ in range(not late):
        list(sampler)
    state = sampler.state_dict()
    assert (state["epoch"], state["cursor"], state["weights"], state["next_weights"]) == (0, 10, WEIGHTS, [2, 2, 1])
    resumed.load_state_dict(state)
    list(resumed)
    assert list(resumed) == list(sampler)


def test_weights_that_are_set_in_a_restored_epoch_replace_its_next_ones() -> None:
    sampler, resumed = (MixtureSampler(SOURCES, 1, 0, batch_size=10, num_rows=50, weights=WEIGHTS) for _ in range(2))
    sampler.advance()
    sampler.set_weights([2, 2, 1])
    sampler.seek(0, 0)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_weights([1, 1, 1])
    assert (resumed.order.weights, resumed.next_weights) == (tuple(WEIGHTS), [1, 1, 1])
    list(resumed)
    assert (resumed.order.weights, resumed.next_weights) == ((1, 1, 1), None)

"""The order of a mixture is that of a plain walk through its sources."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
from collections import Counter
from fractions import Fraction
from itertools import islice, pairwise

import numpy as np
import pytest
from seeds import seeds

from dataload.errors import ConfigError
from dataload.samplers.epoch import EpochOrder
from dataload.samplers.keys import derive_key, mix
from dataload.samplers.mixture import order as mixture_order
from dataload.samplers.mixture import sequence
from dataload.samplers.mixture.borders import BLOCK
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.quotas import Quotas
from dataload.samplers.mixture.schedule import schedule
from dataload.samplers.mixture.source import MixtureSource, SourceRows, source_epoch
from dataload.samplers.order import Order

LENGTHS = [[40, 0, 25, 60, 31], [7, 9], [300, 250, 100]]
SOURCES = [MixtureSource(lengths, name, name.encode()) for lengths, name in zip(LENGTHS, "abc", strict=True)]
ROWS = [156, 16, 650]
UNITS = [{}, {"num_streams": 3}, {"batching": "homogeneous", "batch_rows": 8}]


def walk(order, epoch):
    """Return (source, index, row in the source) position by position: one counter for each source."""
    sources, _ = order.draws(epoch, np.arange(order.n))
    counts, expected = [0] * len(order.sources), []
    cache = {}
    for source in sources.tolist():
        index, counts[source] = counts[source], counts[source] + 1
        wrap, position = divmod(index, ROWS[source])
        streams = order.num_streams
        if position < ROWS[source] - ROWS[source] % streams:  # Index i of a source belongs to stream i mod streams.
            position += index % streams - position % streams
        if (source, wrap) not in cache and ROWS[source] <= 200:
            cache[source, wrap] = small_epoch(order, source, epoch, wrap)
        elif (source, wrap) not in cache:
            alone = Order(
                LENGTHS[source],
                seed=derive_key("source", order.seed, order.sources[source].name),
                num_streams=streams,
                dataset_key=order.sources[source].dataset_key,
            )
            cache[source, wrap] = alone.rows(source_epoch(epoch, wrap), np.arange(alone.n))
        expected.append((source, index, int(cache[source, wrap][position])))
    return expected


def small_epoch(order, source, epoch, wrap):
    """Return the rows of a small source in one of its epochs: those of each stream, sorted by hash."""
    alone, rows = order.orders[source], ROWS[source]
    key = derive_key("small source", derive_key("source", order.seed, order.sources[source].name), epoch)
    hashes = mix(key, np.arange(wrap * rows, (wrap + 1) * rows, dtype=np.uint64)) >> np.uint64(16)
    line, cuts = alone.line()
    drawn = np.empty(rows, np.int64)
    for stream, (first, end) in enumerate(pairwise(cuts.tolist())):
        by_hash = sorted(range(first, end), key=hashes.__getitem__)
        drawn[stream :: alone.num_streams] = line[by_hash]
    assert sorted(drawn.tolist()) == list(range(rows))
    return drawn


def random_sources(chance):
    count = chance.randint(2, 50)
    sizes = [[chance.randint(1, 400) for _ in range(chance.randint(1, 6))] for _ in range(count)]
    return [MixtureSource(lengths, str(number)) for number, lengths in enumerate(sizes)]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("weights", [None, [1, 1, 1], [0.05, 0.9, 0.05]])
def test_rows_are_those_of_a_walk(weights, unit):
    order = MixtureOrder(SOURCES, weights, seed=4, num_rows=4000, **unit)
    expected = walk(order, 2)
    sources, indices = order.draws(2, np.arange(order.n))
    assert list(zip(sources.tolist(), indices.tolist(), strict=True)) == [(s, i) for s, i, _ in expected]
    rows = [row + int(order.first_rows[source]) for source, _, row in expected]
    assert order.rows(2, np.arange(order.n)).tolist() == rows
    some = random.Random(0).choices(range(order.n), k=300)
    assert order.rows(2, some).tolist() == [rows[position] for position in some]
    assert order.rows(2, []).tolist() == []


@pytest.mark.parametrize("seed", seeds(10, 100))
def test_quotas_and_source_epochs_of_random_mixtures(seed):
    chance = random.Random(seed)
    sources = random_sources(chance)
    weights = [chance.choice([chance.random() + 1e-9, chance.randint(1, 9)]) for _ in sources] if seed % 4 else None
    order = MixtureOrder(sources, weights, seed=seed, num_rows=chance.randint(1, 12_000))
    drawn, _ = order.draws(seed, np.arange(order.n))
    rows = order.rows(seed, np.arange(order.n))
    shares = [sum(lengths.block_lengths) for lengths in sources] if weights is None else weights
    exact = [Fraction(str(share)) for share in shares]
    positions = np.arange(1, order.n + 1)
    for source, (weight, (first, end)) in enumerate(zip(exact, pairwise(order.first_rows.tolist()), strict=True)):
        quotas = positions * float(weight / sum(exact))
        assert np.abs(np.cumsum(drawn == source) - quotas).max() < 1 + 1e-6
        mine = rows[drawn == source] - first
        for start in range(0, len(mine), end - first):  # each row once before any row twice
            once = mine[start : start + end - first]
            assert len(set(once.tolist())) == len(once)
            assert 0 <= once.min() <= once.max() < end - first


@pytest.mark.parametrize("weights", [None, [3, 1, 2], [1, 1, 1000]])
@pytest.mark.parametrize("unit", UNITS)
def test_quotas_of_units(weights, unit):
    order = MixtureOrder(SOURCES, weights, num_rows=70_000 * 8, **unit)
    positions = np.arange(0, order.n - order.n % order.unit, order.unit)
    sources, _ = order.draws(1, positions)
    for offset in range(order.unit):
        assert np.array_equal(order.draws(1, positions + offset)[0], sources)
    integers = order.weights
    for source, weight in enumerate(integers):
        errors = np.cumsum(sources == source) * sum(integers) - np.arange(1, len(sources) + 1) * weight
        assert np.abs(errors).max() < sum(integers)


@pytest.mark.parametrize("weights", [None, [5, 3, 2]])
def test_without_a_shuffle_all_epochs_are_the_same(weights):
    """An evaluation of the first rows has the same rows each time."""
    order = MixtureOrder(SOURCES, weights, shuffle=False, num_rows=1000)
    first, *others = (order.rows(epoch, np.arange(order.n)).tolist() for epoch in range(3))
    assert others == [first] * 2
    shuffled = order.with_options(shuffle=True)
    assert shuffled.rows(0, np.arange(order.n)).tolist() != shuffled.rows(1, np.arange(order.n)).tolist()


def test_by_rows_each_row_comes_once():
    for stop in ("first_exhausted", "all_exhausted"):
        order = MixtureOrder(SOURCES, stop=stop)
        assert order.n == sum(ROWS)
        for epoch in range(3):
            assert sorted(order.rows(epoch, np.arange(order.n)).tolist()) == list(range(sum(ROWS)))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seed", seeds(3, 12))
def test_an_epoch_ends_where_a_source_is_exhausted(seed, unit):
    """Before a row can come again, or after each row has come; early or late by less than a unit of a source."""
    chance = random.Random(seed)
    weights = [chance.choice([0.3 + chance.random(), 0.25, chance.randint(1, 3)]) for _ in SOURCES]
    for epoch in range(3):
        order = MixtureOrder(SOURCES, weights, seed=seed, **unit)
        rows = order.rows(epoch, np.arange(order.n))
        assert len(np.unique(rows)) == order.n
        longer = order.with_options(num_rows=order.n + 2 * order.unit * sum(order.weights) // min(order.weights))
        assert longer.rows(epoch, np.arange(order.n)).tolist() == rows.tolist()
        more = longer.rows(epoch, np.arange(longer.n))
        assert len(np.unique(more)) < longer.n
    order = MixtureOrder(SOURCES, weights, seed=seed, stop="all_exhausted", **unit)
    rows = order.rows(5, np.arange(order.n))
    assert len(np.unique(rows)) == sum(ROWS)
    slack = 2 * order.unit * sum(order.weights) // min(order.weights)
    assert order.n <= slack or len(np.unique(rows[:-slack])) < sum(ROWS)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("weights", [None, [1, 1, 1]])
def test_needs_come_before_the_first_use_and_soon(weights, unit, monkeypatch):
    monkeypatch.setattr(mixture_order, "NEEDS_APART", 1)
    order = MixtureOrder(SOURCES, weights, num_rows=3000, seed=1, **unit)
    sources, indices = order.draws(1, np.arange(order.n))
    rows = order.rows(1, np.arange(order.n))
    groups = np.searchsorted(np.cumsum(order.block_lengths), rows, "right")
    wraps = indices // np.array(ROWS)[sources]
    for start in (0, 1, 700, 1999, 2999, 3000):
        uses = {}
        for position in range(start, order.n):
            uses.setdefault((int(groups[position]), int(wraps[position])), position)
        needs = list(order.needs_from(1, start))
        assert needs == sorted(needs, key=lambda need: need[0])
        if order.num_streams > 1:  # A need may be one that the rest of the stripe at the start had.
            assert Counter(group for group, _ in uses) <= Counter(group for _, group in needs)
            continue
        assert Counter(group for _, group in needs) == Counter(group for group, _ in uses)
        used = dict.fromkeys(groups.tolist(), ())
        for (group, _), position in sorted(uses.items(), key=lambda use: use[1]):
            used[group] = (*used[group], position)
        for position, group in needs:
            first, *used[group] = used[group]
            source = int(np.searchsorted(order.first_blocks, group, "right")) - 1
            assert start <= position <= first
            assert first < position + 2 * order.unit * (1 + sum(order.weights) / order.weights[source])


@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 1000, 65_537, 66_000, 131_072])
def test_the_order_does_not_depend_on_the_length_of_the_epoch(num_rows):
    """The last block of an epoch is drawn only as far as the epoch needs it."""
    order = MixtureOrder(SOURCES, [5, 3, 2], num_rows=num_rows)
    positions = np.arange(max(0, num_rows - 1500), num_rows)
    whole = order.with_options(num_rows=200_000)
    assert order.rows(3, positions).tolist() == whole.rows(3, positions).tolist()
    assert list(order.needs_from(3, num_rows)) == []


@pytest.mark.parametrize("unit", [{}, {"num_streams": 3}])
def test_a_small_source_that_repeats_often_needs_its_row_groups_seldom(unit):
    sources = [MixtureSource([4, 3, 2], "small"), MixtureSource([1], "one"), SOURCES[2]]
    order = MixtureOrder(sources, [5, 4, 1], num_rows=20_000, seed=1, **unit)
    rows = order.rows(1, np.arange(order.n))
    groups = np.searchsorted(np.cumsum(order.block_lengths), rows, "right")
    for start in (0, 12_345):
        needs = [need for need in order.needs_from(1, start) if need[1] < 4]
        assert len(needs) < 4 * ((order.n - start) / mixture_order.NEEDS_APART + 2)
        for group in range(4):
            needed = np.array([position for position, number in needs if number == group])
            used = np.flatnonzero(groups[start:] == group) + start
            latest = needed[np.searchsorted(needed, used, "right") - 1]
            assert needed[0] <= used[0]
            assert (used - latest).max() < mixture_order.NEEDS_APART + 100


def test_a_source_of_one_row_with_a_large_share_takes_no_order_for_each_row(monkeypatch):
    """Its 50,000 epochs are one permutation, and so are 4,000 epochs of a source of 12 rows."""
    made = []
    make = EpochOrder.__init__
    monkeypatch.setattr(EpochOrder, "__init__", lambda self, *arguments: (made.append(1), make(self, *arguments))[0])
    order = MixtureOrder(
        [MixtureSource([1], "one"), MixtureSource([5, 7], "few"), SOURCES[2]], [1, 1, 1], num_rows=150_000
    )
    drawn = order.rows(0, np.arange(order.n))
    assert np.bincount(drawn[drawn < 13]).tolist()[0] == 50_000
    assert len(made) < 50_000 // 650 + 10


def test_needs_of_streams():
    order = MixtureOrder(SOURCES, num_rows=3000, num_streams=3, seed=1)
    rows = order.rows(1, np.arange(order.n))
    groups = np.searchsorted(np.cumsum(order.block_lengths), rows, "right")
    needs = []
    for stream in range(3):
        needed = {group for _, group in order.needs_from(1, 0, [stream])}
        used = Counter(groups[stream::3].tolist())
        # Up to two rows at the end of each epoch of a source are of other streams.
        foreign = sum(count for group, count in used.items() if group not in needed)
        assert foreign <= 2 * sum(-(-len(rows) // size) for size in ROWS)
        assert needed <= set(used)
        needs.append(needed)
    assert len(needs[0] & needs[1]) <= 3


def test_an_epoch_that_is_over_needs_nothing():
    sources = [MixtureSource([7, 9, 4], "a"), MixtureSource([5, 3], "b")]
    for rows in range(20, 40):  # A stripe of streams may end after the epoch.
        order = MixtureOrder(sources, [2, 1], num_streams=3, num_rows=rows)
        assert list(order.needs_from(1, rows)) == []
        last = order.rows(1, [rows - 1])
        groups = np.searchsorted(np.cumsum(order.block_lengths), last, "right")
        assert set(groups.tolist()) <= {group for _, group in order.needs_from(1, rows - 1)}


def test_a_seek_costs_the_same_everywhere():
    sources = [MixtureSource([10**9] * 50, str(number)) for number in range(5)]
    order = MixtureOrder(sources, [1, 2, 3, 10**6, 4])
    tracemalloc.start()
    drawn = []
    for position in (0, order.n // 2, order.n - 1000):
        drawn += order.rows(0, np.arange(position, position + 1000)).tolist()
        assert len(list(islice(order.needs_from(0, position), 20))) >= 3
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6
    assert len(set(drawn)) == 3000


def test_epochs_and_seeds_are_unrelated_and_copies_are_not():
    def rows(order, epoch):
        return tuple(order.rows(epoch, np.arange(500)).tolist())

    order = MixtureOrder(SOURCES)
    drawn = {rows(order.with_options(seed=seed), epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)}
    assert len(drawn) == 9
    sources = {tuple(order.draws(epoch, np.arange(500))[0].tolist()) for epoch in range(3)}
    assert len(sources) == 3
    assert rows(pickle.loads(pickle.dumps(order)), 1) == rows(order, 1)
    options = json.loads(json.dumps(order.options))
    assert rows(MixtureOrder(SOURCES, **options), 1) == rows(order, 1)
    assert order.digest == MixtureOrder(SOURCES, [1, 2, 3], seed=5).digest
    assert order.digest != MixtureOrder(SOURCES[::-1]).digest


def test_a_source_that_wraps_is_permuted_afresh():
    order = MixtureOrder(SOURCES, [1, 1, 1], num_rows=4000)
    drawn, _ = order.draws(0, np.arange(order.n))
    small = order.rows(0, np.flatnonzero(drawn == 1))
    epochs = {tuple(small[start : start + 16].tolist()) for start in range(0, len(small) - 15, 16)}
    assert len(epochs) == len(small) // 16


def test_file_order():
    order = MixtureOrder(SOURCES, [1, 1, 2], shuffle=False, num_rows=60, num_streams=2)
    drawn, indices = order.draws(0, np.arange(60))
    assert (order.unit, order.num_streams) == (1, 1)
    assert np.array_equal(order.rows(0, np.arange(60)), indices + order.first_rows[drawn])


def test_the_order_is_golden():
    order = MixtureOrder(SOURCES, [5, 3, 2], seed=7, num_rows=100_000)
    assert order.rows(3, np.arange(16)).tolist() == [
        763,
        85,
        163,
        96,
        157,
        112,
        135,
        167,
        795,
        63,
        23,
        171,
        142,
        722,
        152,
        165,
    ]
    assert order.rows(3, np.arange(99_990, 100_000)).tolist() == [38, 730, 54, 170, 151, 157, 70, 541, 11, 164]
    order = MixtureOrder(SOURCES, seed=7, num_streams=2, windows=[2, 2, 2])
    assert order.rows(3, np.arange(16)).tolist() == [
        439,
        617,
        317,
        474,
        7,
        84,
        350,
        679,
        471,
        672,
        468,
        514,
        319,
        490,
        213,
        717,
    ]
    order = MixtureOrder(SOURCES, seed=7, batching="homogeneous", batch_rows=4)
    assert order.rows(3, np.arange(16)).tolist() == [
        763,
        795,
        722,
        819,
        727,
        752,
        797,
        781,
        85,
        96,
        112,
        135,
        805,
        818,
        731,
        796,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": []}, "0 sources"),
        ({"sources": [*SOURCES, MixtureSource([0, 0], "empty")]}, "'empty' has no rows"),
        ({"sources": [MixtureSource([1], "same"), MixtureSource([2], "same")]}, "names"),
        ({"weights": [1, 2]}, "2 weights for 3 sources: give one for each"),
        ({"weights": [1, 0, 2]}, "weight 0 of source 1"),
        ({"windows": [1]}, "1 windows for 3 sources"),
        ({"stop": "never"}, "stop='never'"),
        ({"batching": "none"}, "batching='none'"),
        ({"batching": "homogeneous"}, "batch_rows"),
        ({"num_rows": 0}, "num_rows=0"),
        ({"weights": [1, 2**45, 2**45], "stop": "all_exhausted"}, "too long"),
    ],
)
def test_arguments_that_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MixtureOrder(**{"sources": SOURCES, **arguments})


def test_positions_outside_the_epoch():
    order = MixtureOrder(SOURCES, num_rows=10)
    for position in (-1, 10):
        with pytest.raises(IndexError):
            order.rows(0, [0, position])
    for position in (-1, 11):
        with pytest.raises(IndexError):
            order.needs_from(0, position)
    assert list(order.needs_from(0, 10)) == []


@pytest.mark.parametrize("lengths", [[3000, 4000, 2000], [300, 400], [3, 4]])
@pytest.mark.parametrize("streams", [1, 4])
def test_consecutive_rows_are_those_of_any_indices(lengths, streams):
    order = Order(lengths, seed=5, num_streams=streams)
    rows, n = SourceRows(order, stretch=2048), order.n
    for start, end in (
        (0, 1),
        (0, 3 * n),
        (n - 1, n + 1),
        (100, 700),
        (255, 257),
        (511, 513),
        (2 * n + 5, 2 * n + 5000),
    ):
        for epoch in (0, 3):
            expected = rows.rows(epoch, np.arange(start, end))
            assert rows.consecutive(epoch, start, end).tolist() == expected.tolist()


def test_the_first_batch_does_not_wait_for_a_whole_block(monkeypatch):
    made = []
    monkeypatch.setattr(sequence, "schedule", lambda *given: made.append(given[2]) or schedule(*given))
    units = sequence.UnitSequence(Quotas((3, 2)), 0, 4 * BLOCK)
    [(_, first, _), (_, second, _)] = units.parts(0, 0, 256)
    assert sorted([*first, *second]) == [*range(256)]
    assert made == [sequence.BEGINNING]
    assert units.counts(0, 256).tolist() == [len(first), len(second)]
    assert units.draws(0, first)[0].tolist() == [0] * len(first)
    assert made == [sequence.BEGINNING]


def test_a_long_epoch_keeps_the_schedules_that_fit(monkeypatch):
    made = []
    monkeypatch.setattr(sequence, "SCHEDULES", 2)
    monkeypatch.setattr(sequence, "schedule", lambda *given: made.append(given[1]) or schedule(*given))
    units = sequence.UnitSequence(Quotas((3, 2)), 0, 4 * BLOCK)
    for epoch in (0, 1):
        for start in range(0, 4 * BLOCK, BLOCK):
            assert sum(len(places) for _, places, _ in units.parts(epoch, start, start + BLOCK)) == BLOCK
    assert made == [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 2 * BLOCK, 3 * BLOCK]

"""Ranks get each row exactly once, in an order independent of the world, and resume where they stopped."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import re
import sys
from collections import Counter, deque
from itertools import chain, islice, product
from typing import Any

import numpy as np
import pytest
from nightly import NIGHTLY
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dataload.errors import ConfigError
from dataload.samplers import ShardedSampler
from dataload.samplers.partition import stream_owners
from dataload.samplers.permutation import Images
from dataload.samplers.share import Share

LENGTHS = [7, 0, 19, 1, 30, 12, 12, 5, 8, 23]
ROWS = sum(LENGTHS)
WORLDS = [(1, 1), (2, 3), (3, 8), (4, 4), (8, 1), (7, 5), (16, 16), (200, 2)]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def ranks(num_replicas, lengths=LENGTHS, **arguments):
    return [ShardedSampler(lengths, num_replicas, rank, **arguments) for rank in range(num_replicas)]


def global_batches(samplers, epoch=0, cursor=0):
    """Return the rows of each global batch, over all ranks."""
    return [np.concatenate(batch).tolist() for batch in zip(*(s.batches(epoch, cursor) for s in samplers), strict=True)]


def test_narrow_integers_of_numpy_do_not_overflow():
    narrow = ShardedSampler([1000] * 3, np.uint8(8), np.uint8(1), batch_size=np.uint8(64), num_nodes=np.uint8(1))
    plain = ShardedSampler([1000] * 3, 8, 1, batch_size=64)
    assert narrow.global_batch_size == 512
    assert list(narrow) == list(plain)
    assert json.dumps(narrow.state_dict()) == json.dumps(plain.state_dict())


def test_the_table_in_the_docstring():
    def positions(rank, **streams):
        share = Share(num_replicas=2, rank=rank, batch_size=2, **streams)
        return [batch.tolist() for run in share.runs(0, 11) for batch in run]

    assert positions(0) == [[0, 1], [4, 5], [8, 9]]
    assert positions(1) == [[2, 3], [6, 7], [10, 0]]
    assert positions(0, drop_last=True) == [[0, 1], [4, 5]]
    assert positions(1, drop_last=True) == [[2, 3], [6, 7]]
    assert positions(0, num_streams=2, num_nodes=2) == [[0, 2], [4, 6], [8, 10]]
    assert positions(1, num_streams=2, num_nodes=2) == [[1, 3], [5, 7], [9, 0]]


@pytest.mark.parametrize("shuffle", ["block", "full", False])
def test_exactly_once_in_equal_parts(shuffle):
    for num_replicas, batch_size in WORLDS:
        samplers = ranks(num_replicas, batch_size=batch_size, shuffle=shuffle, num_streams=3)
        rows = [np.concatenate(list(sampler.batches())).tolist() for sampler in samplers]
        assert {len(mine) for mine in rows} == {len(samplers[0])}
        counts = Counter(row for mine in rows for row in mine)
        assert set(counts) == set(range(ROWS))
        assert counts.total() - ROWS == sum(sampler.padding for sampler in samplers) <= num_replicas - 1
        # Without the padding at the end of each rank, no row appears twice.
        unpadded = [
            row for mine, sampler in zip(rows, samplers, strict=True) for row in mine[: len(mine) - sampler.padding]
        ]
        assert sorted(unpadded) == list(range(ROWS))


def test_drop_last_leaves_out_less_than_a_global_batch():
    for num_replicas, batch_size in WORLDS:
        samplers = ranks(num_replicas, batch_size=batch_size, drop_last=True, num_streams=3)
        rows = [row for sampler in samplers for batch in sampler.batches() for row in batch.tolist()]
        assert len(rows) == len(set(rows)) == len(samplers[0]) * num_replicas
        assert 0 <= ROWS - len(rows) < num_replicas * batch_size
        assert {len(batch) for sampler in samplers for batch in sampler.batches()} <= {batch_size}
        assert {sampler.padding for sampler in samplers} == {0}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("lengths", [[5, 0, 1, 9], [1], [0], [], [2, 0, 1], [40, 1, 0, 17]])
def test_every_small_world(lengths, drop_last):
    """With more ranks than row groups, fewer rows than ranks, and row groups of one row or none."""
    n = sum(lengths)
    for num_replicas, batch_size in product(range(1, 17), (1, 3, 8)):
        samplers = ranks(num_replicas, lengths, batch_size=batch_size, drop_last=drop_last, num_streams=2)
        batches = [[rows.tolist() for rows in sampler.batches()] for sampler in samplers]
        global_batch = num_replicas * batch_size
        expected = n // global_batch if drop_last else math.ceil(n / global_batch)
        assert {len(mine) for mine in batches} == {expected}
        assert len({tuple(map(len, mine)) for mine in batches}) == 1
        rows = [list(chain(*mine)) for mine in batches]
        unpadded = [row for mine, s in zip(rows, samplers, strict=True) for row in mine[: len(mine) - s.padding]]
        assert len(set(unpadded)) == len(unpadded) == (n // global_batch * global_batch if drop_last else n)
        assert set(chain(*rows)) == set(unpadded)


@pytest.mark.parametrize(("batch_size", "drop_last"), [(1, False), (4, False), (1, True)])
def test_lengths_are_those_of_torch(batch_size, drop_last):
    for n, num_replicas in product([0, 1, 5, 31, 32, 33, 100], [1, 2, 7, 32, 40]):
        ours = ShardedSampler([n], num_replicas, 0, batch_size=batch_size, drop_last=drop_last)
        theirs = DistributedSampler(range(n), num_replicas, 0, drop_last=drop_last)
        assert isinstance(ours, DistributedSampler)
        assert len(ours) == ours.num_samples == len(theirs)
        assert ours.total_size == theirs.total_size
        assert len(list(ours)) == len(theirs)


def test_global_batches_do_not_depend_on_the_world():
    worlds = [(1, 24, 1), (2, 12, 1), (2, 12, 2), (3, 8, 1), (6, 4, 3), (24, 1, 6)]
    seen = set()
    for num_replicas, batch_size, num_nodes in worlds:
        samplers = ranks(num_replicas, batch_size=batch_size, num_nodes=num_nodes, num_streams=6, drop_last=True)
        seen.add(str([sorted(batch) for batch in global_batches(samplers, epoch=2)]))
    assert len(seen) == 1


@pytest.mark.parametrize("shuffle", ["block", "full"])
def test_global_batches_of_1_2_4_and_8_ranks(shuffle):
    """This includes the partial last batch without its padding."""
    seen = set()
    for num_replicas in (1, 2, 4, 8):
        samplers = ranks(num_replicas, batch_size=16 // num_replicas, shuffle=shuffle, num_streams=4)
        batches = global_batches(samplers, epoch=3)
        batches[-1] = batches[-1][: ROWS % 16]
        seen.add(str([sorted(batch) for batch in batches]))
    assert len(seen) == 1


def test_resuming_elsewhere_loses_and_repeats_nothing():
    chance = random.Random(0)
    for _ in range(100 if NIGHTLY else 25):
        first, second, streams = chance.choice(WORLDS), chance.choice(WORLDS), chance.choice([1, 2, 3, 6])
        samplers = ranks(first[0], batch_size=first[1], num_streams=streams, seed=chance.randrange(9))
        whole = global_batches(samplers, epoch=4)
        taken = chance.randint(0, ROWS // samplers[0].global_batch_size)
        for sampler in samplers:
            sampler.set_epoch(4)
            sampler.advance(taken)
        states = {json.dumps(sampler.state_dict()) for sampler in samplers}
        assert len(states) == 1
        resumed = ranks(second[0], batch_size=second[1])
        for sampler in resumed:
            sampler.load_state_dict(json.loads(next(iter(states))))
        rest = [list(sampler) for sampler in resumed]
        padding = [sampler.padding_from(samplers[0].cursor) for sampler in resumed]
        rows = [row for batch in whole[:taken] for row in batch]
        rows += [row for mine, pad in zip(rest, padding, strict=True) for row in mine[: len(mine) - pad]]
        assert sorted(rows) == list(range(ROWS))
        assert len({len(mine) for mine in rest}) == 1
        assert sum(padding) < second[0]


@pytest.mark.parametrize(
    ("num_nodes", "num_streams", "per_node", "batch_size"), [(2, 2, 1, 8), (3, 6, 2, 4), (4, 4, 3, 5)]
)
def test_nodes_keep_to_their_own_row_groups(num_nodes, num_streams, per_node, batch_size):
    chance = random.Random(1)
    lengths = [chance.randint(0, 60) for _ in range(100)]
    block_of = np.repeat(np.arange(100), lengths)
    read = [set() for _ in range(num_nodes)]
    for rank in range(num_nodes * per_node):
        sampler = ShardedSampler(
            lengths,
            num_nodes * per_node,
            rank,
            batch_size=batch_size,
            num_streams=num_streams,
            num_nodes=num_nodes,
            drop_last=True,
        )
        mine = {epoch: set(block_of[np.concatenate(list(sampler.batches(epoch)))]) for epoch in (0, 1, 5)}
        for epoch, blocks in mine.items():
            read[rank // per_node] |= blocks
            assert blocks <= set(sampler.blocks_from(epoch))
        assert sum(map(len, map(set, map(sampler.blocks_from, mine)))) < 3 * (100 / num_nodes + 10)
    # Two nodes read a row group only if it lies on a border of streams.
    assert sum(map(len, read)) <= len(set(block_of)) + num_streams - 1
    assert max(map(len, read)) < 100 / num_nodes + 15


@pytest.mark.parametrize(("num_replicas", "batch_size"), [(2, 4), (3, 2)])
def test_streams_that_cannot_be_local_are_everybodys(num_replicas, batch_size):
    """If a state's streams do not suit the world, `blocks_from` still names all row groups that a node reads."""
    state = ShardedSampler(LENGTHS, 1, 0, num_streams=3).state_dict()
    block_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for sampler in ranks(num_replicas, batch_size=batch_size, num_nodes=2):
        sampler.load_state_dict(state)
        read = set(block_of[np.concatenate(list(sampler.batches()))].tolist())
        assert read <= set(sampler.blocks_from())


def blocks_by_node(num_nodes, epoch, num_streams=12, per_node=2, batch_size=6):
    """Return the row groups that each node reads in an epoch of 100 uneven ones. Their rows fill whole batches."""
    chance = random.Random(1)
    lengths = [chance.randint(0, 60) for _ in range(99)]
    lengths.append(-sum(lengths) % 72 + 72)
    block_of = np.repeat(np.arange(100), lengths)
    samplers = ranks(
        num_nodes * per_node, lengths, batch_size=batch_size, num_streams=num_streams, num_nodes=num_nodes, seed=epoch
    )
    rows = [np.concatenate(list(sampler.batches(epoch))) for sampler in samplers]
    nodes = [np.concatenate(rows[node * per_node : node * per_node + per_node]) for node in range(num_nodes)]
    return [set(block_of[mine].tolist()) for mine in nodes], lengths


@pytest.mark.parametrize("num_nodes", [2, 3, 6])
def test_a_node_reads_its_row_groups_and_the_border_ones(num_nodes):
    blocks, lengths = blocks_by_node(num_nodes, 0)
    assert all(blocks_by_node(num_nodes, epoch)[0] == blocks for epoch in (1, 2, 7))
    share = sum(lengths) // num_nodes
    for node, mine in enumerate(blocks):
        alone = mine.difference(*(blocks[other] for other in range(num_nodes) if other != node))
        assert sum(lengths[block] for block in alone) <= share
        assert len(mine) - len(alone) <= 2 * 12 // num_nodes  # at both borders of each of its streams


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_node_that_joins_takes_only_the_surplus(num_nodes):
    batch_size = 12 // num_nodes
    before, lengths = blocks_by_node(num_nodes, 0, per_node=1, batch_size=batch_size)
    after, _ = blocks_by_node(num_nodes + 1, 0, per_node=1, batch_size=12 // (num_nodes + 1))
    assert all(new <= old for old, new in zip(before, after, strict=False))
    moved = sum(lengths[block] for block in after[-1])
    assert moved <= sum(lengths) / (num_nodes + 1) + 24 * max(lengths)


@pytest.mark.parametrize("num_streams", [1, 2, 6, 12, 13, 64])
def test_owners_move_only_the_surplus(num_streams):
    before = stream_owners(num_streams, 1)
    assert before.tolist() == [0] * num_streams
    for num_nodes in range(2, 20):
        after = stream_owners(num_streams, num_nodes)
        assert set(after[after != before].tolist()) <= {num_nodes - 1}
        shares = np.bincount(after, minlength=num_nodes)
        assert shares.max() - shares.min() <= 1
        before = after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_streams": 3, "num_nodes": 2}, "num_streams=2"),
        ({"num_streams": 10, "num_nodes": 4}, "num_streams=8"),
        ({"num_streams": 64, "num_nodes": 2}, "num_streams=32"),
        ({"num_streams": 3, "num_nodes": 3}, r"num_nodes=(2|4)"),
        ({"num_streams": 3, "num_nodes": 3, "batch_size": 3}, r"num_nodes=(2|4)"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"rank": 8}, "rank=8"),
        ({"window": 0}, "window=0"),
        ({"shuffle": "random"}, "shuffle='random'"),
        ({"rank": "0"}, "rank='0' must be a whole number"),
        ({"num_replicas": 8.0}, r"num_replicas=8\.0 must be a whole number"),
        ({"seed": None}, "seed=None must be a whole number"),
    ],
)
def test_arguments_that_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ShardedSampler(**{"block_lengths": LENGTHS, "num_replicas": 8, "rank": 0, "batch_size": 4, **arguments})


@pytest.mark.parametrize("epoch", ["a", 1.5, None])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    sampler = ShardedSampler(LENGTHS, 8, 0)
    with pytest.raises(ConfigError, match=f"epoch={epoch!r} must be a whole number"):
        sampler.set_epoch(epoch)
    sampler.set_epoch(np.int16(3))
    assert sampler.state_dict()["epoch"] == 3
    assert type(sampler.epoch) is int


@pytest.mark.parametrize(("num_streams", "num_nodes"), [(3, 2), (10, 4), (64, 2), (3, 3)])
def test_numbers_named_by_errors_work(num_streams, num_nodes):
    """The errors name first the number of nodes that works, and then the number of streams."""
    options = {"num_replicas": 8, "rank": 0, "batch_size": 4, "num_streams": num_streams, "num_nodes": num_nodes}
    for name in ("num_nodes", "num_streams"):
        if name == "num_streams" or 8 % num_nodes:
            with pytest.raises(ConfigError) as raised:
                ShardedSampler(LENGTHS, **options)
            named = re.search(rf"(?:use|nearest is) {name}=(\d+)", str(raised.value))
            options[name] = int(named[1])
    ShardedSampler(LENGTHS, **options)


def test_one_stream_and_file_order_work_on_any_nodes():
    ShardedSampler(LENGTHS, 8, 0, batch_size=4, num_streams=1, num_nodes=3)
    ShardedSampler(LENGTHS, 8, 0, batch_size=4, num_streams=3, num_nodes=2, shuffle=False)


def test_the_world_is_detected(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    alone = ShardedSampler(LENGTHS)
    assert (alone.num_replicas, alone.rank, alone.num_nodes) == (1, 0, 1)
    for name, number in zip(LAUNCHER, (5, 8, 1, 4), strict=False):
        monkeypatch.setenv(name, str(number))
    found = ShardedSampler(LENGTHS, num_streams=2)
    assert (found.num_replicas, found.rank, found.num_nodes) == (8, 5, 2)
    assert ShardedSampler(LENGTHS, 16).num_nodes == 1  # the spread of 16 ranks over hosts is unknown
    given = ShardedSampler(LENGTHS, 3, 1)
    assert (given.num_replicas, given.rank, given.num_nodes) == (3, 1, 1)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError):
        ShardedSampler(LENGTHS)


def test_an_exhausted_iteration_moves_to_the_next_epoch():
    sampler = ShardedSampler(LENGTHS, 2, 1, batch_size=4)
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert len({tuple(rows) for rows in epochs}) == 3
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    assert all(type(row) is int for row in epochs[0])


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize(
    ("rows", "batch_size", "drop_last"), [(103, 10, False), (100, 10, False), (103, 10, True), (7, 10, False)]
)
def test_batches_that_are_consumed_after_the_iteration_are_of_its_epoch(rows, batch_size, drop_last, ahead):
    """Torch takes the last rows, and with workers whole batches, before the consumer has the earlier ones."""
    sampler = ShardedSampler([rows], 1, 0, batch_size=batch_size, drop_last=drop_last)
    whole = rows - rows % batch_size * drop_last
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen, waiting = [], deque()
        batches = iter(BatchSampler(sampler, batch_size, drop_last))
        while waiting.extend(islice(batches, 1 + ahead - len(waiting))) or waiting:
            seen += waiting.popleft()
            sampler.advance()
            state = sampler.state_dict()
            next_epoch = {(epoch + 1, 0)} if len(seen) == whole else set()
            assert (state["epoch"], state["cursor"]) in {(epoch, len(seen)), *next_epoch}
        assert len(set(seen)) == len(seen) == whole


def test_the_state_of_late_batches_has_the_order_of_their_epoch():
    """The next epoch, to which the exhausted sampler has moved, has another seed."""
    saved, own = ShardedSampler([100], 1, 0, batch_size=10, seed=1), {"batch_size": 10, "seed": 2}
    saved.seek(0, 20)
    sampler, resumed = ShardedSampler([100], 1, 0, **own), ShardedSampler([100], 1, 0, **own)
    sampler.load_state_dict(saved.state_dict())
    rows = list(sampler)
    sampler.advance()
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == rows[10:]
    sampler.set_epoch(1)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["cursor"]) == (1, 0)


def test_a_peek_changes_nothing():
    sampler = ShardedSampler(LENGTHS, 2, 1)
    whole = list(islice(sampler, 40))
    assert list(islice(sampler, 5)) == whole[:5]
    assert (sampler.epoch, sampler.cursor) == (0, 0)
    next(sampler.batches())
    list(sampler.batches(3))
    assert list(islice(sampler, 40)) == whole


def test_an_iteration_starts_when_first_asked():
    """Lightning's order: load_state_dict, iter, set_epoch, and only then the first next."""
    sampler = ShardedSampler(LENGTHS, 2, 0)
    rows = iter(sampler)
    sampler.set_epoch(7)
    assert list(rows) == [int(batch[0]) for batch in sampler.batches(7, 0)]
    assert sampler.epoch == 8


def test_of_two_iterations_the_epoch_moves_once():
    sampler = ShardedSampler(LENGTHS, 2, 0)
    first, second = iter(sampler), iter(sampler)
    assert next(first) == next(second)
    list(first)
    list(second)
    assert sampler.epoch == 1
    third = iter(sampler)
    next(third)
    sampler.set_epoch(5)
    list(third)
    assert sampler.epoch == 5


@pytest.mark.parametrize("advances", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 10, 13, 40, 41, 42, 43])
def test_an_iteration_resumes_as_torchdata_does_it(taken, advances):
    """StatefulDataLoader saves the sampler and its iterator. It restores the sampler before it makes the iterator."""
    saved, resumed = (ShardedSampler([103], 2, 1, batch_size=10) for _ in range(2))
    saved.seek(2, 20)
    rows = iter(saved)
    first = list(islice(rows, taken))
    if advances:
        saved.advance(taken // 10)
    state = json.loads(json.dumps([saved.state_dict(), rows.state_dict()]))
    resumed.load_state_dict(state[0])
    rest = iter(resumed)
    rest.load_state_dict(state[1])
    found = [*first, *rest]
    assert found == np.concatenate(list(saved.batches(2, 20))).tolist()
    assert len(found) == 42
    assert (resumed.epoch, resumed.cursor) == (3, 0)
    assert list(resumed) == np.concatenate(list(saved.batches(3, 0))).tolist()


@pytest.mark.parametrize(("num_replicas", "batch_size"), [(4, 10), (2, 5)])
def test_an_iteration_resumes_in_the_same_world_only(num_replicas, batch_size):
    """The state of an iterator counts the rows of its rank."""
    rows = iter(ShardedSampler([103], 2, 1, batch_size=10))
    begun, (_, *_) = rows.state_dict(), islice(rows, 20)
    other = iter(ShardedSampler([103], num_replicas, 1, batch_size=batch_size))
    other.load_state_dict(begun)
    with pytest.raises(ConfigError, match=rf"= \[2, 10\], this one \[{num_replicas}, {batch_size}\]: resume it"):
        other.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    assert len(list(other)) == math.ceil(103 / num_replicas)


def test_set_epoch_keeps_a_cursor_of_the_same_epoch():
    sampler = ShardedSampler(LENGTHS, 2, 0, batch_size=3)
    sampler.set_epoch(2)
    sampler.advance(4)
    assert (sampler.epoch, sampler.cursor) == (2, 24)
    sampler.set_epoch(2)
    assert sampler.cursor == 24
    assert len(list(sampler.batches())) == math.ceil((ROWS - 24) / 6)
    assert len(list(sampler.batches(5))) == math.ceil(ROWS / 6)
    sampler.set_epoch(3)
    assert sampler.cursor == 0


def test_the_cursor_stops_at_the_end():
    sampler = ShardedSampler(LENGTHS, 2, 0, batch_size=50)
    assert not sampler.finished_at(sampler.cursor)
    sampler.advance(2)
    assert sampler.cursor == ROWS
    assert sampler.finished_at(sampler.cursor)
    assert list(sampler.batches()) == []
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == []
    assert (sampler.epoch, sampler.cursor) == (1, 0)
    dropping = ShardedSampler(LENGTHS, 2, 0, batch_size=50, drop_last=True)
    dropping.advance()
    assert dropping.cursor == 100
    assert dropping.finished_at(dropping.cursor)
    for cursor in (-1, ROWS + 1):
        with pytest.raises(ConfigError, match="cursor"):
            sampler.batches(0, cursor)


def test_state_restores_the_order_as_well():
    saved = ShardedSampler(LENGTHS, 1, 0, shuffle="full", seed=5, window=3, num_streams=2, dataset_key=b"key")
    saved.seek(6, 40)
    state = saved.state_dict()
    assert len(json.dumps(state)) < 4096
    assert set(state) == {"version", "dataset", "seed", "epoch", "cursor", "num_streams", "shuffle", "window"}
    resumed = ShardedSampler(LENGTHS, 1, 0, dataset_key=b"key")
    assert list(resumed) != list(saved)
    saved.seek(6, 40)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert (resumed.seed, resumed.epoch, resumed.cursor, resumed.shuffle) == (5, 6, 40, True)
    assert list(resumed) == list(saved)


def test_other_arguments_hold_from_the_next_epoch_on(caplog):
    saved = ShardedSampler(LENGTHS, 1, 0, shuffle="full", seed=5, num_streams=2)
    saved.seek(6, 40)
    rest = list(saved)
    saved.seek(6, 40)
    state = saved.state_dict()
    resumed, fresh = (ShardedSampler(LENGTHS, 1, 0, window=3, num_streams=3) for _ in range(2))
    resumed.load_state_dict(state)
    [warning] = caplog.messages
    assert warning == (
        "the state has shuffle='full', seed=5, window=10: shuffle='block', seed=0, window=3, as passed here, "
        "holds from epoch 7 on"
    )
    assert list(resumed) == rest
    fresh.set_epoch(7)
    assert resumed.state_dict() == fresh.state_dict()
    assert list(resumed) == list(fresh)


@pytest.mark.parametrize("cursor", [0, 40])
def test_equal_arguments_keep_the_order_of_the_state(caplog, cursor):
    """The streams are those of the world that saved the state."""
    saved = ShardedSampler(LENGTHS, 1, 0, shuffle="full", seed=5, num_streams=3)
    saved.seek(6, cursor)
    resumed = ShardedSampler(LENGTHS, 1, 0, shuffle="full", seed=5)
    resumed.load_state_dict(saved.state_dict())
    assert [list(resumed), list(resumed)] == [list(saved), list(saved)]
    assert caplog.messages == []


def test_streams_that_this_number_of_nodes_cannot_share_are_named(caplog):
    saved = ShardedSampler(LENGTHS, 4, 0, batch_size=3, num_streams=4, num_nodes=4)
    for rank in range(3):
        resumed = ShardedSampler(LENGTHS, 3, rank, batch_size=4, num_streams=3, num_nodes=3)
        resumed.load_state_dict(saved.state_dict())
    [warning] = caplog.messages
    assert warning.startswith(
        "the state has num_streams=4, which stays, so each of the 3 nodes reads the whole dataset"
    )


def test_other_arguments_hold_at_once_if_the_epoch_has_not_begun(caplog):
    saved = ShardedSampler(LENGTHS, 1, 0, seed=5)
    saved.set_epoch(6)
    resumed, fresh = (ShardedSampler(LENGTHS, 1, 0, shuffle=False) for _ in range(2))
    resumed.load_state_dict(saved.state_dict())
    assert "holds from epoch 6 on" in caplog.text
    fresh.set_epoch(6)
    assert resumed.state_dict() == fresh.state_dict()
    resumed.load_state_dict(fresh.state_dict())
    assert len(caplog.messages) == 1


def test_seeking_far_is_no_more_work(monkeypatch):
    """Return lookups and calls until the first batches of an epoch resumed near 1 % and near 99 %."""
    lengths = [1000] * 2000
    looked_up, calls = [], []
    look_up = Images.__getitem__

    def counted(images, index):
        found = look_up(images, index)
        looked_up.append(len(images) if isinstance(found, int) else len(images) + found.size)
        return found

    monkeypatch.setattr(Images, "__getitem__", counted)

    def work(share, shuffle):
        """Resume 16 times within the length of a window: only some resumptions meet the end of a window."""
        looked_up.clear()
        calls.clear()
        for step in range(16):
            saved = ShardedSampler(lengths, 4, 1, batch_size=64, shuffle=shuffle)
            saved.seek(2, int(share * saved.num_rows) + 1000 * step)
            resumed = ShardedSampler(lengths, 4, 1, batch_size=64)
            sys.setprofile(lambda frame, event, argument: calls.append(event))
            try:
                resumed.load_state_dict(saved.state_dict())
                list(islice(resumed.batches(), 16))
            finally:
                sys.setprofile(None)
        return sum(looked_up), len(calls)

    for shuffle in ("block", "full"):
        near, far = work(0.01, shuffle), work(0.98, shuffle)
        assert all(late <= 1.05 * early for early, late in zip(near, far, strict=True)), (near, far)


def test_state_of_something_else_is_refused():
    sampler = ShardedSampler(LENGTHS, 1, 0, dataset_key=b"key")
    state = sampler.state_dict()
    regrouped = [LENGTHS[0] + LENGTHS[2], *LENGTHS[3:]]
    others = [(LENGTHS, b"other"), ([*LENGTHS, 1], b"key"), (LENGTHS[::-1], b"key"), (regrouped, b"key")]
    for lengths, key in others:
        with pytest.raises(ConfigError, match="another dataset"):
            sampler.load_state_dict(ShardedSampler(lengths, 1, 0, dataset_key=key).state_dict())
    with pytest.raises(ConfigError, match="version 99"):
        sampler.load_state_dict({**state, "version": 99})
    for nothing in ({}, None):
        with pytest.raises(ConfigError, match=r"version None.*give a state_dict"):
            sampler.load_state_dict(nothing)
    with pytest.raises(ConfigError, match="lacks seed: give all"):
        sampler.load_state_dict({name: value for name, value in state.items() if name != "seed"})
    for wrong in ({"cursor": ROWS + 1}, {"cursor": 64.0}, {"cursor": "64"}, {"epoch": 1.5}, {"epoch": None}):
        [name] = wrong
        with pytest.raises(ConfigError, match=name):
            sampler.load_state_dict({**state, "seed": 3, "shuffle": "full", **wrong})
    assert sampler.state_dict() == state
    assert list(sampler) == list(ShardedSampler(LENGTHS, 1, 0, dataset_key=b"key"))


def test_under_a_plain_dataloader():
    samplers = ranks(3, batch_size=4)
    loaders = [DataLoader(range(ROWS), batch_size=4, sampler=sampler) for sampler in samplers]
    assert {len(loader) for loader in loaders} == {len(list(samplers[0].batches()))}
    for epoch in range(2):
        for loader, sampler in zip(loaders, samplers, strict=True):
            sampler.set_epoch(epoch)
            expected = [batch.tolist() for batch in sampler.batches()]
            assert [batch.tolist() for batch in loader] == expected


def test_copies_go_on_alike():
    sampler = ShardedSampler(LENGTHS, 2, 1, batch_size=2, num_streams=2)
    list(islice(sampler, 5))
    sampler.seek(3, 17)
    for copied in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert copied.state_dict() == sampler.state_dict()
        assert list(copied) == [row for batch in sampler.batches() for row in batch.tolist()]


def test_a_running_iteration_keeps_its_order():
    """The state has another seed, which holds until the end of its epoch. The loop sets the next epoch early."""
    lengths = [1000] * 40
    saved = ShardedSampler(lengths, 1, 0, batch_size=10, seed=1)
    saved.advance(3)
    rest = [batch.tolist() for batch in saved.batches()]
    resumed = ShardedSampler(lengths, 1, 0, batch_size=10, seed=2)
    resumed.load_state_dict(saved.state_dict())
    batches = resumed.batches()
    found = [next(batches).tolist()]
    resumed.set_epoch(1)
    assert found + [batch.tolist() for batch in batches] == rest

"""The order's arithmetic agrees with a reference in loops and lists."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import asdict
from itertools import chain, combinations, groupby, islice, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU
from dataload.samplers.order import Order, default_window
from dataload.samplers.permutation import KeyedPermutation
from dataload.samplers.quality import shuffle_quality
from dataload.samplers.sharded import ShardedSampler
from dataload.samplers.window_size import BATCH, GOAL, MEMORY, WindowTrade, weigh_window


def permuted(items, *key):
    return [items[index] for index in KeyedPermutation(len(items), derive_key(*key))[:].tolist()]


def reference_rows(lengths, epoch, shuffle="block", seed=0, window=16, num_streams=1, dataset_key=b""):
    """Return the rows of an epoch, position by position."""
    blocks = [list(range(sum(lengths[:block]), sum(lengths[: block + 1]))) for block in range(len(lengths))]
    if shuffle is False:
        return [*chain(*blocks)]
    blocks = [block for block in blocks if block]
    if num_streams > 1:
        blocks = permuted(blocks, "placement", dataset_key)
    line = [(number, row) for number, block in enumerate(blocks) for row in block]
    n, streams = len(line), []
    for s in range(num_streams):
        size = math.ceil((n - s) / num_streams)
        mine, line = line[:size], line[size:]
        pieces = [[row for _, row in piece] for _, piece in groupby(mine, key=lambda numbered: numbered[0])]
        pieces = permuted(pieces, "row groups", seed, epoch, s)
        widest = max(1, window // num_streams) if shuffle == "block" else len(pieces)
        width, number, stream = (1 if shuffle == "block" else widest), 0, []
        while pieces:
            stream += permuted([*chain(*pieces[:width])], "rows", seed, epoch, s, number)
            pieces, width, number = pieces[width:], min(2 * width, widest), number + 1
        streams.append(stream)
    return [streams[p % num_streams][p // num_streams] for p in range(n)]


def reference_batches(n, start, num_streams, num_nodes, num_replicas, batch_size, drop_last):
    """Return the positions of each rank's batches, and how many of its last ones are padding."""
    owner = [0] * num_streams
    for new in range(1, num_nodes):
        for node in range(new):
            held = [s for s in range(num_streams) if owner[s] == node]
            for s in held[math.ceil(max(0, num_streams - node) / (new + 1)) :]:
                owner[s] = new
    batches, padding = [[] for _ in range(num_replicas)], [0] * num_replicas
    for first in range(start, n, num_replicas * batch_size):
        rows = range(first, min(first + num_replicas * batch_size, n))
        share = math.ceil(len(rows) / num_replicas)
        if share * num_replicas != num_replicas * batch_size and drop_last:
            break
        batch = sorted(rows, key=lambda p: (owner[p % num_streams], p % num_streams, p))
        if len(batch) < num_replicas * batch_size and drop_last:
            break
        batch = [(p, 0) for p in batch] + [(p % n, 1) for p in range(share * num_replicas - len(batch))]
        for r in range(num_replicas):
            batches[r].append([p for p, _ in batch[r * share : (r + 1) * share]])
            padding[r] += sum(pad for _, pad in batch[r * share : (r + 1) * share])
    return batches, padding


LENGTHS = st.lists(st.integers(0, 9) | st.sampled_from([0, 1, 30]), max_size=14)
ORDERS = st.fixed_dictionaries(
    {
        "shuffle": st.sampled_from(["block", "block", "full", False]),
        "seed": st.integers(-3, 2**40),
        "window": st.integers(1, 20),
        "num_streams": st.integers(1, 6),
        "dataset_key": st.binary(max_size=3),
    }
)
CASES = settings(max_examples=250 if NIGHTLY else 80)


@CASES
@given(LENGTHS, ORDERS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_rows_are_those_of_the_scheme(lengths, arguments, epoch, random):
    expected = reference_rows(lengths, epoch, **arguments)
    order = Order(lengths, **arguments)
    assert order.n == len(expected)
    assert sorted(expected) == list(range(order.n))
    assert order.rows(epoch, np.arange(order.n)).tolist() == expected
    some = random.choices(range(order.n), k=20) if expected else []
    assert order.rows(epoch, np.array(some, np.int64)).tolist() == [expected[position] for position in some]


def blocks_from(order, *arguments):
    return [block for _, block in order.needs_from(*arguments)]


@CASES
@given(LENGTHS, ORDERS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_blocks_come_when_first_needed(lengths, arguments, epoch, random):
    rows = reference_rows(lengths, epoch, **arguments)
    block_of = [block for block, length in enumerate(lengths) for _ in range(length)]
    order = Order(lengths, **arguments)
    start = random.randint(0, order.n)
    assert blocks_from(order, epoch, start) == list(dict.fromkeys(block_of[row] for row in rows[start:]))
    streams = sorted(random.sample(range(order.num_streams), random.randint(1, order.num_streams)))
    needed = [block_of[rows[p]] for p in range(start, order.n) if p % order.num_streams in streams]
    assert blocks_from(order, epoch, start, streams) == list(dict.fromkeys(needed))


@CASES
@given(
    LENGTHS,
    ORDERS,
    st.integers(0, 5),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.booleans()),
    st.floats(0, 1),
)
@example(
    [3, 3], {"shuffle": "block", "seed": 0, "window": 2, "num_streams": 5, "dataset_key": b""}, 0, (2, 9, 1, False), 0
)
@example(
    [40_000, 30_000],
    {"shuffle": "block", "seed": 0, "window": 6, "num_streams": 3, "dataset_key": b""},
    1,
    (3, 2, 7, False),
    0.1,
)
def test_ranks_get_their_slices_from_any_cursor(lengths, arguments, epoch, world, where):
    """The state of one process resumes in any world, with any streams, at any row."""
    num_nodes, num_replicas, batch_size, drop_last = world
    rows = reference_rows(lengths, epoch, **arguments)
    before = ShardedSampler(lengths, 1, 0, **arguments)
    before.seek(epoch, int(where * len(rows)))
    state = json.loads(json.dumps(before.state_dict()))
    num_streams = 1 if arguments["shuffle"] is False else arguments["num_streams"]
    # An epoch that has not begun has the order of the arguments, but for the streams.
    given = {"dataset_key": arguments["dataset_key"]} if before.cursor else {**arguments, "num_streams": 1}
    batches, padding = reference_batches(len(rows), before.cursor, num_streams, *world)
    for rank in range(num_replicas):
        sampler = ShardedSampler(
            lengths,
            num_replicas,
            rank,
            batch_size=batch_size,
            drop_last=drop_last,
            num_nodes=num_nodes,
            **given,
        )
        sampler.load_state_dict(state)
        expected = [[rows[position] for position in batch] for batch in batches[rank]]
        assert [batch.tolist() for batch in sampler.batches()] == expected
        assert sampler.padding_from(sampler.cursor) == padding[rank]
        assert sampler.finished_at(sampler.cursor) == (not expected)


def test_the_order_is_golden():
    order = Order([3, 0, 5, 1, 4, 2], window=2, num_streams=2, seed=7, dataset_key=b"k")
    assert order.rows(3, range(15)).tolist() == [10, 5, 9, 4, 12, 6, 11, 7, 0, 13, 1, 14, 2, 8, 3]
    order = Order([3, 0, 5, 1, 4, 2], window=2, seed=7)
    assert order.rows(3, range(15)).tolist() == [14, 13, 0, 5, 1, 7, 3, 2, 6, 4, 9, 12, 8, 11, 10]
    order = Order([3, 0, 5, 1, 4, 2], shuffle="full", seed=7)
    assert order.rows(3, range(15)).tolist() == [14, 9, 8, 10, 11, 7, 12, 2, 13, 1, 3, 0, 4, 6, 5]


@pytest.mark.parametrize(
    ("shuffle", "num_streams", "length", "first", "last"),
    [
        ("block", 1, 70_000, [91693, 750301, 714965, 69354], 560704),
        ("block", 2, 70_000, [61412, 328308, 26980, 484711], 208089),
        ("full", 1, 70_000, [339757, 594938, 552636, 813100], 542113),
        ("full", 3, 70_000, [520273, 764230, 797583, 44603], 802223),
        ("block", 1, 2**29, [5305556930, 5455586690, 310917411, 5668375642], 2999160100),
        ("block", 2, 2**29, [886888023, 2265049146, 1634316563, 1130324250], 3638797268),
        ("full", 1, 2**29, [3822028748, 5700389450, 373288152, 1505989167], 951426713),
        ("full", 3, 2**29, [4177745391, 4578660736, 3603962570, 1655616118], 1158808101),
    ],
)
def test_the_order_of_many_rows_is_golden(shuffle, num_streams, length, first, last):
    """Windows of more than 2**16 rows, and orders of more than 2**32; a sampler's batches are the same rows."""
    arguments = {"shuffle": shuffle, "window": 8, "num_streams": num_streams, "seed": 7, "dataset_key": b"k"}
    lengths = [length] * 12
    order = Order(lengths, **arguments)
    middle = order.n // 2
    assert order.rows(3, np.arange(middle, middle + 4)).tolist() == first
    assert order.rows(3, [order.n - 1]).tolist() == [last]
    batches = [ShardedSampler(lengths, 2, rank, batch_size=2, **arguments).batches(3, middle) for rank in range(2)]
    assert sorted(row for batch in batches for row in next(batch).tolist()) == sorted(first)


@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("shuffle", ["block", "full"])
def test_many_rows_at_once_are_those_one_by_one(shuffle, num_streams):
    lengths = np.random.default_rng(0).integers(0, 900, 40)
    order = Order(lengths, shuffle=shuffle, window=24, num_streams=num_streams)
    few = [order.rows(1, np.arange(first, min(first + 10, order.n))) for first in range(0, order.n, 10)]
    assert order.rows(1, np.arange(order.n)).tolist() == np.concatenate(few).tolist()


@pytest.mark.parametrize("shuffle", ["block", "full"])
def test_epochs_and_seeds_are_unrelated(shuffle):
    lengths, positions = [50] * 40, np.arange(2000)
    drawn = {
        tuple(Order(lengths, shuffle=shuffle, seed=seed).rows(epoch, positions))
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2)
    }
    assert len(drawn) == 9


def test_windows_begin_small_and_grow():
    """The first batch needs one row group, the next two, and so on; each window is finished before the next."""
    order = Order([10] * 40, window=8)
    blocks = order.rows(0, np.arange(400)) // 10
    borders = [0, 1, 3, 7, 15, 23, 31, 39, 40]
    for first, end in pairwise(borders):
        assert len(set(blocks[10 * first : 10 * end].tolist())) == end - first


def test_a_stream_keeps_its_row_groups_whatever_the_seed_and_epoch():
    lengths = [10, 20, 30, 40] * 6

    def held(stream, dataset_key=b"", **arguments):
        order = Order(lengths, num_streams=3, dataset_key=dataset_key, **arguments)
        return {epoch: frozenset(order.rows(epoch, np.arange(stream, order.n, 3)).tolist()) for epoch in range(3)}

    for stream in range(3):
        streams = [held(stream), held(stream, seed=1), held(stream, window=2), held(stream, shuffle="full")]
        assert len({rows for epochs in streams for rows in epochs.values()}) == 1
    assert held(0)[0] != held(0, dataset_key=b"other")[0]


def test_default_window():
    assert default_window([5] * 100) == 16
    assert default_window([5] * 3) == 3
    assert default_window([]) == 1
    assert Order([5] * 100).window == 16


@pytest.mark.parametrize(("size", "window"), [(2**20, 204), (128 * 2**20, 16), (2**29, 4), (2**32, 2)])
def test_the_default_window_fits_into_memory(size, window):
    lengths, sizes = [5000] * 1000, [size] * 1000
    assert default_window(lengths, sizes) == window
    assert 2 * window * size <= max(MEMORY, 4 * size)
    past_the_small_windows = 1 + (BATCH - 1) * (1 - window / 1000) / window
    assert past_the_small_windows <= GOAL or 2 * (window + 1) * size > MEMORY
    assert window == 2 or 1 + (BATCH - 1) * (1 - (window - 1) / 1000) / (window - 1) > GOAL


def test_the_default_window_of_odd_row_groups():
    assert default_window([5] * 40, [1] * 39 + [2**40]) == 2
    assert default_window([5] * 3, [1] * 3) == 3
    assert default_window([5], [2**40]) == 1
    assert default_window([], []) == 1
    assert weigh_window(16, []) == WindowTrade(1, 1.0)


@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_the_first_batch_waits_for_little(num_streams):
    """With row groups of 128 MB and one stream per node, each node needs at most 256 MB."""
    lengths, sizes, batch_size = [100_000] * 400, [128_000_000] * 400, 4096
    order = Order(lengths, window=default_window(lengths, sizes), num_streams=num_streams)
    blocks = order.rows(0, np.arange(num_streams * batch_size)) // 100_000
    for stream in range(num_streams):
        assert len(np.unique(blocks[stream::num_streams])) * 128_000_000 <= 256_000_000


def test_the_trade_can_be_printed():
    trade = weigh_window(8, [100] * 50, batch_size=150)
    assert json.loads(json.dumps(asdict(trade))) == {
        "window": 8,
        # Windows of 1, 2, 4, five of 8, and 3 row groups. The first has 100 rows, the others at least one batch.
        "variance_ratio": pytest.approx(1 + (99 + 8 * 149) / 9 * (9 - 1) / 50),
    }


def test_true_is_block():
    assert Order([9] * 9, shuffle=True).rows(0, range(81)).tolist() == Order([9] * 9).rows(0, range(81)).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": "blocks"}, "shuffle='blocks'"),
        ({"shuffle": None}, "shuffle=None"),
        ({"window": 0}, "window=0"),
        ({"num_streams": 0}, "num_streams=0"),
        ({"block_lengths": [3, -1]}, "block_lengths must be one list of row counts"),
        ({"block_lengths": 7}, "block_lengths must be one list of row counts"),
        ({"block_lengths": "34"}, "block_lengths must be one list of row counts"),
        ({"block_lengths": ["a", "b"]}, "block_lengths must be one list of row counts"),
        ({"block_lengths": [[3], [4, 5]]}, "block_lengths must be one list of row counts"),
        ({"block_lengths": iter([3, 4])}, "block_lengths must be one list of row counts"),
    ],
)
def test_arguments_that_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Order(**{"block_lengths": [3, 4], **arguments})


@pytest.mark.parametrize("shuffle", ["block", "full", False])
def test_positions_outside_the_epoch(shuffle):
    order = Order([3, 4], shuffle=shuffle)
    for position in (-1, 7):
        with pytest.raises(IndexError):
            order.rows(0, np.array([0, position]))
    for position in (-1, 8):
        with pytest.raises(IndexError):
            order.needs_from(0, position)
    assert list(order.needs_from(0, 7)) == []


def test_a_billion_rows_cost_little_memory_anywhere():
    lengths = np.full(200_000, 5_000)
    tracemalloc.start()
    order = Order(lengths)
    first = order.rows(0, np.arange(16_384))
    later = order.rows(0, np.arange(500_000_000, 500_016_384))
    ahead = list(islice(order.needs_from(0, 999_000_000), 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert len(np.unique(np.concatenate((first, later)))) == 2 * 16_384
    assert len({block for _, block in ahead}) == 20


@pytest.mark.parametrize("shuffle", ["block", "full"])
def test_a_sampler_of_a_billion_rows_costs_little_memory(shuffle):
    lengths = np.full(200_000, 5_000)
    tracemalloc.start()
    sampler = ShardedSampler(lengths, 8, 3, batch_size=256, shuffle=shuffle)
    sampler.set_epoch(1)
    first = next(sampler.batches())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert len(first) == 256


def test_pickled_and_shared_between_threads():
    order = Order([70] * 60, num_streams=4)
    expected = order.rows(1, np.arange(order.n))
    assert np.array_equal(pickle.loads(pickle.dumps(order)).rows(1, np.arange(order.n)), expected)
    shared, results = Order([70] * 60, num_streams=4), []

    def walk():
        results.append(np.concatenate([shared.rows(1, np.arange(p, p + 60)) for p in range(0, order.n, 60)]))

    threads = [threading.Thread(target=walk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(result, expected) for result in results)


def test_lru_keeps_the_last_used():
    kept, made = LRU(2), []

    def make(key):
        made.append(key)
        return -key

    assert [kept.get(key, make) for key in (1, 2, 1, 3, 1, 2)] == [-1, -2, -1, -3, -1, -2]
    assert made == [1, 2, 3, 2]
    assert pickle.loads(pickle.dumps(kept)).get(1, abs) == 1


def test_lru_gives_all_threads_the_value_stored_first():
    kept, found = LRU(2), []
    other = threading.Thread(target=lambda: found.append(kept.get(1, lambda _: object())))

    def make(key):
        other.start()
        other.join()
        return object()

    assert kept.get(1, make) is found[0]
    assert kept.get(1, make) is found[0]


def test_a_child_forked_while_a_thread_builds_can_build():
    """As when a loader starts its workers while another thread draws the next epoch's order."""
    kept, building, finish = LRU(2), threading.Event(), threading.Event()

    def make(key):
        building.set()
        finish.wait()
        return -key

    thread = threading.Thread(target=kept.get, args=(1, make))
    thread.start()
    building.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os._exit([kept.get(key, lambda key: -key) for key in (1, 2, 3)] != [-1, -2, -3])
    finish.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_importing_the_arithmetic_does_not_import_torch():
    code = (
        "import sys, dataload.samplers, dataload.samplers.order, dataload.samplers.share, dataload.samplers.quality;"
        "dataload.samplers.Permutation(9, 0, 0)[:]; dataload.samplers.shuffle_quality;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("window", "num_streams"), [(1, 1), (4, 1), (20, 1), (16, 4)])
def test_quality_is_what_the_formula_says(window, num_streams):
    """Variance ratio 1 + (b - 1) (1 - m / M) / m."""
    lengths, batch_size = [200] * 1000, 32
    order = Order(lengths, window=window, num_streams=num_streams)
    quality = shuffle_quality(order, lengths, batch_size)
    expected = 1 + (batch_size - 1) * (1 - window / 1000) / window
    assert quality.variance_ratio == pytest.approx(expected, rel=0.15)
    assert quality.adjacency < 0.02
    assert quality.exactly_once


@pytest.mark.parametrize(
    ("count", "length", "window", "num_streams"), [(1000, 200, 4, 1), (4000, 100, 16, 1), (4000, 100, 64, 4)]
)
def test_quality_is_close_to_the_formula_where_small_windows_are_few(count, length, window, num_streams):
    lengths, batch_size = [length] * count, 32
    quality = shuffle_quality(Order(lengths, window=window, num_streams=num_streams), lengths, batch_size)
    expected = 1 + (batch_size - 1) * (1 - window / count) / window
    assert quality.variance_ratio == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("count", "length", "window"), [(1000, 200, 4), (1000, 200, 204), (4000, 100, 64)])
def test_quality_is_as_foretold_with_the_edges(count, length, window):
    lengths = [length] * count
    quality = shuffle_quality(Order(lengths, window=window), lengths, 32)
    foretold = weigh_window(window, lengths, batch_size=32).variance_ratio
    assert quality.variance_ratio == pytest.approx(foretold, rel=0.05)


@pytest.mark.parametrize(("count", "length", "window"), [(100, 50, 8), (1000, 20, 16), (40, 20, 3)])
def test_quality_is_as_foretold_of_batches_larger_than_windows(count, length, window):
    lengths = [length] * count
    for batch_size in (2 * window * length, 5 * window * length):
        qualities = [shuffle_quality(Order(lengths, window=window, seed=s), lengths, batch_size) for s in range(4)]
        quality = np.mean([one.variance_ratio for one in qualities])
        assert quality == pytest.approx(weigh_window(window, lengths, batch_size=batch_size).variance_ratio, rel=0.25)
    for all_rows in (length * count, 10**6):
        assert weigh_window(window, lengths, batch_size=all_rows).variance_ratio == 1
        assert shuffle_quality(Order(lengths, window=window), lengths, all_rows).variance_ratio == 1


def test_no_more_streams_than_can_be_held():
    """There may be more streams than rows, such as for a small dataset on many nodes."""
    with pytest.raises(ConfigError, match="num_streams=65537: must be at most 65536"):
        Order([1, 3], num_streams=65_537)


@pytest.mark.slow
def test_as_many_streams_as_can_be_held():
    assert sorted(Order([1, 3], num_streams=65_536).rows(0, range(4)).tolist()) == [0, 1, 2, 3]


def test_full_is_uniform_over_sorted_labels():
    """With data sorted by ten labels, neighbours share labels and batches vary in them as by chance."""
    lengths, n = [100_000] * 10, 1_000_000
    rows = Order(lengths, shuffle="full").rows(0, np.arange(n))
    labels = rows // 100_000
    chance = (100_000 - 1) / (n - 1)
    assert np.mean(labels[1:] == labels[:-1]) / chance == pytest.approx(1, abs=0.01)
    quality = shuffle_quality(rows, lengths, 256)
    assert quality.variance_ratio <= 1.02
    assert quality.exactly_once


def test_epochs_of_full_do_not_resemble_each_other():
    order = Order([100, 0, 1, 700] * 100, shuffle="full", seed=3)
    epochs = [order.rows(epoch, np.arange(order.n)) for epoch in range(3)]
    for first, second in combinations(epochs, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 3 / np.sqrt(order.n)


def test_quality_of_the_extremes():
    lengths = [100] * 50
    full = shuffle_quality(Order(lengths, shuffle="full").rows(4, range(5000)), lengths, 50)
    assert full.variance_ratio == pytest.approx(1, abs=0.1)
    assert full.adjacency < 0.002
    in_file_order = shuffle_quality(range(5000), lengths, 50)
    assert in_file_order.adjacency == 1
    assert in_file_order.variance_ratio == pytest.approx(50, rel=0.05)
    assert in_file_order.exactly_once
    assert shuffle_quality(range(4999, -1, -1), lengths, 50).adjacency == 0
    assert not shuffle_quality([*range(4999), 0], lengths, 50).exactly_once
    assert not shuffle_quality(range(4999), lengths, 50).exactly_once
    assert not shuffle_quality([*range(4999), 5000], lengths, 50).exactly_once
    assert not shuffle_quality(range(5001), lengths, 50).exactly_once
    assert not shuffle_quality([*range(4999), -1], lengths, 50).exactly_once
    assert shuffle_quality([], [], 50).exactly_once


def test_variance_ratio_written_out():
    lengths, batch_size = [7, 0, 12, 1, 5], 4
    rows = Order(lengths, seed=3).rows(0, range(25))
    block_of = [block for block, length in enumerate(lengths) for _ in range(length)]
    observed = expected = 0.0
    for first in range(0, 25, batch_size):
        batch = [block_of[row] for row in rows[first : first + batch_size]]
        for block, length in enumerate(lengths):
            share = length / 25
            observed += (batch.count(block) - len(batch) * share) ** 2
            expected += len(batch) * share * (1 - share) * (25 - len(batch)) / 24
    assert shuffle_quality(rows, lengths, batch_size).variance_ratio == pytest.approx(observed / expected)


@pytest.mark.parametrize("shuffle", ["block", "full"])
@pytest.mark.parametrize("small", [[1], [1, 2, 3], [3, 0, 1]])
def test_tiny_row_groups_are_found_without_a_look_at_every_row(shuffle, small, monkeypatch):
    """A filter leaves one match in a row group. On average, half of the window comes before it."""
    looked_up = []
    permuted = KeyedPermutation.__getitem__

    def counting(permutation, index):
        images = permuted(permutation, index)
        looked_up.append(np.size(images))
        return images

    lengths = [20_000] * 20 + small
    order, reference = (Order(lengths, shuffle=shuffle, window=len(lengths), seed=3) for _ in range(2))
    monkeypatch.setattr(KeyedPermutation, "__getitem__", counting)
    for position in (0, 7_777, order.n - 5):
        needs = list(order.needs_from(0, position))
        assert sum(looked_up) < 10_000
        rows = reference.rows(0, np.arange(position, order.n))
        looked_up.clear()
        groups = np.searchsorted(np.cumsum(lengths), rows, side="right")
        first = dict(zip(groups[::-1].tolist(), range(order.n - 1, position - 1, -1), strict=True))
        assert needs == sorted((place, group) for group, place in first.items())

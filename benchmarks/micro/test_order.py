"""The shuffled order beside numpy: a billion rows in 200,000 row groups, and mixtures of sources. In CPU time."""

from __future__ import annotations

import itertools
import tracemalloc
from time import process_time
from typing import Any

import numpy as np
import pytest

from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.permutation import Permutation
from dataload.samplers.sharded import ShardedSampler

BLOCKS, ROWS_PER_BLOCK, BATCH = 200_000, 5_000, 256
ROWS = BLOCKS * ROWS_PER_BLOCK

pytestmark = pytest.mark.benchmark(timer=process_time)
shuffles = pytest.mark.parametrize("shuffle", ["block", "full"])


def first_batch(shuffle: Any) -> float:
    """Return the CPU seconds to the first batch."""
    lengths = np.full(BLOCKS, ROWS_PER_BLOCK)
    started = process_time()
    sampler = ShardedSampler(lengths, 8, 3, shuffle=shuffle, batch_size=BATCH)
    sampler.set_epoch(1)
    next(sampler.batches())
    return process_time() - started


@shuffles
def test_first_batch(benchmark: Any, shuffle: str, in_process: Any, record_property: Any) -> None:
    benchmark.group = "order of 10⁹ rows, with its first batch"
    benchmark(first_batch, shuffle)
    tracemalloc.start()
    first_batch(shuffle)
    record_property("MB", f"{(tracemalloc.get_traced_memory()[1] - 8 * BLOCKS) / 1e6:.1f}")  # without the lengths
    tracemalloc.stop()
    seconds, _ = in_process(first_batch, shuffle)
    record_property("ms in a fresh process", f"{1000 * seconds:.1f}")


@shuffles
def test_seek(benchmark: Any, shuffle: Any) -> None:
    benchmark.group = "seek"
    sampler = ShardedSampler(np.full(BLOCKS, ROWS_PER_BLOCK), 1, 0, shuffle=shuffle, batch_size=BATCH)
    places = itertools.cycle(np.random.default_rng(0).integers(ROWS, size=1000).tolist())  # mostly in other windows
    benchmark(lambda: next(sampler.batches(0, next(places))))


@pytest.mark.parametrize("of", ["block", "full", "permutation", "numpy's permutation", "numpy's take", "a copy"])
def test_stream(benchmark: Any, scaled: Any, of: Any, per_second: Any) -> None:
    count = scaled(4_000_000) // BATCH * BATCH
    benchmark.group = f"{count:,} rows"
    rng, indices = np.random.default_rng(0), np.arange(count)
    if of in ("block", "full"):
        sampler = ShardedSampler(np.full(BLOCKS, ROWS_PER_BLOCK), 1, 0, shuffle=of, batch_size=BATCH)
        benchmark(lambda: [None for _ in itertools.islice(sampler.batches(), count // BATCH)])
    elif of == "permutation":
        permutation = Permutation(ROWS, 0, 0)
        benchmark(lambda: permutation[indices])
    else:
        places = rng.permutation(count)
        floors = {"numpy's permutation": lambda: rng.permutation(count), "numpy's take": lambda: indices.take(places)}
        benchmark(floors.get(of, indices.copy))
    per_second("M rows", count / 1e6)


@pytest.mark.parametrize("sources", [2, 3, 10, 50, 200])
@pytest.mark.parametrize("part", ["sources alone", "rows", "seek"])
def test_mixture(benchmark: Any, sources: int, part: str, scaled: Any, per_second: Any, record_property: Any) -> None:
    """Units are single rows, and each part of an epoch is mapped for the first time."""
    mixed = min(1 << 20, scaled(1 << 20))
    rng = np.random.default_rng(sources)
    sizes = rng.integers(10**6, 10**9, sources).tolist()
    order = MixtureOrder([MixtureSource([size // 100] * 100, str(number)) for number, size in enumerate(sizes)])
    benchmark.group = f"mixtures: {part}"
    if part == "seek":
        drawn = [order.draws(epoch, np.arange(mixed))[0] for epoch in (0, 1)]
        record_property("two epochs agree", f"{np.mean(drawn[0] == drawn[1]):.3f}")
        places = iter(rng.integers(0, order.n, 6).tolist())
        benchmark.pedantic(lambda: order.draws(1, [next(places)]), rounds=5)
        return
    mapped = order.rows if part == "rows" else order.draws
    starts = itertools.count(mixed, mixed)
    benchmark.pedantic(lambda: mapped(0, np.arange(mixed) + next(starts)), rounds=5)
    per_second("M rows", mixed / 1e6)

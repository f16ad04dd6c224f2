"""The speed of the shuffle order beside numpy's permutation: `python -m dataload.benchmarks.order`, on one core.

The dataset has a billion rows in 200,000 row groups. Times are the least CPU time of several runs. The first run in a
process is reported separately: page faults take most of it. The second table is of mixtures of sources with random
sizes.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import process_time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.permutation import Permutation
from dataload.samplers.sharded import ShardedSampler

BLOCKS, ROWS_PER_BLOCK = 200_000, 5_000
BATCH = 256
STREAM = 4_000_000  # rows
REPEATS = 5
MIXED = 1 << 20  # rows


def main() -> None:
    table = Table("figure", "measured", "target", title=f"{BLOCKS * ROWS_PER_BLOCK:,} rows in {BLOCKS:,} row groups")
    lengths = np.full(BLOCKS, ROWS_PER_BLOCK)
    for shuffle, rate in (("block", 20), ("full", 5)):
        starts = ("in a fresh process", _start_in_fresh_process(shuffle)), ("again", _start_again(shuffle))
        for when, least in starts:
            table.add_row(f"{shuffle}: construct, set_epoch, first batch, {when}", f"{least * 1e3:.1f} ms", "<= 15 ms")
        table.add_row(f"{shuffle}: the same, peak memory", f"{_peak(shuffle) / 1e6:.1f} MB", "<= 20 MB")
        sampler: Any = ShardedSampler(lengths, 1, 0, shuffle=shuffle, batch_size=BATCH)  # type: ignore[arg-type]
        next(sampler.batches())
        for share in (0.01, 0.5, 0.99):
            table.add_row(f"{shuffle}: seek to {share:.0%}", f"{_seek(sampler, share) * 1e3:.2f} ms", "<= 1 ms")
        table.add_row(f"{shuffle}: index stream", f"{_stream(sampler):.1f} M/s", f">= {rate} M/s")
    random = np.random.default_rng(0)
    permutation, indices = Permutation(BLOCKS * ROWS_PER_BLOCK, 0, 0), np.arange(STREAM)
    values, positions = np.arange(STREAM), random.permutation(STREAM)
    for name, make in (
        ("Permutation alone", lambda: permutation[indices]),
        ("floor: numpy's permutation of equal size", lambda: random.permutation(STREAM)),
        ("floor: numpy's take at random positions", lambda: values.take(positions)),
        ("floor: a copy", values.copy),
    ):
        table.add_row(name, f"{STREAM / _least(make) / 1e6:.1f} M/s", "")
    table.add_row("floor: two numpy permutations of the row groups", f"{_least(lambda: _two(random)) * 1e3:.1f} ms", "")
    Console().print(table)
    Console().print(_mixtures())


def _mixtures() -> Table:
    """Return the figures of mixtures: units are single rows, and each part of an epoch is mapped for the first time."""
    columns = "sources", "sources alone", "rows", "seek", "two epochs agree", "independent draws"
    table = Table(*columns, title="mixtures, weights by rows")
    for count in (2, 3, 10, 50, 200):
        random = np.random.default_rng(count)
        sizes = random.integers(10**6, 10**9, count).tolist()
        order = MixtureOrder([MixtureSource([size // 100] * 100, str(source)) for source, size in enumerate(sizes)])
        epochs = [order.draws(epoch, np.arange(MIXED))[0] for epoch in (0, 1)]
        shares = np.array(order.weights) / sum(order.weights)
        table.add_row(
            str(count),
            f"{_mapped(order, order.draws):.1f} M/s",
            f"{_mapped(order, order.rows):.1f} M/s",
            f"{_mixture_seek(order, random) * 1e3:.0f} ms",
            f"{np.mean(epochs[0] == epochs[1]):.3f}",
            f"{shares @ shares:.3f}",
        )
    return table


def _mapped(order: MixtureOrder, method: Callable[[int, Any], Any]) -> float:
    """Return the rate of positions that a method of an order maps, in millions per second."""
    starts = iter(range(MIXED, order.n - MIXED, MIXED))  # The caller has drawn the first positions.
    return MIXED / _least(lambda: method(0, np.arange(MIXED) + next(starts))) / 1e6


def _mixture_seek(order: MixtureOrder, random: np.random.Generator) -> float:
    """Return the CPU seconds to the source of a random position."""
    starts = iter(random.integers(0, order.n, REPEATS).tolist())
    return _least(lambda: order.draws(1, [next(starts)]))


def begin(shuffle: Any) -> float:
    """Return the CPU seconds to the first batch."""
    lengths = np.full(BLOCKS, ROWS_PER_BLOCK)
    start = process_time()
    sampler = ShardedSampler(lengths, 8, 3, shuffle=shuffle, batch_size=BATCH)
    sampler.set_epoch(1)
    next(sampler.batches())
    return process_time() - start


def _start_in_fresh_process(shuffle: str) -> float:
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        return min(processes.map(begin, [shuffle] * REPEATS))


def _start_again(shuffle: str) -> float:
    return min(begin(shuffle) for _ in range(REPEATS))


def _peak(shuffle: str) -> int:
    """Return the peak memory in bytes, without the lengths of the row groups."""
    tracemalloc.start()
    begin(shuffle)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - BLOCKS * 8


def _seek(sampler: ShardedSampler, share: float) -> float:
    """Return the CPU seconds of a seek to about `share` of the epoch, each time in another window."""
    starts = iter(range(int(share * sampler.num_rows), sampler.num_rows, 16 * ROWS_PER_BLOCK))
    return _least(lambda: next(sampler.batches(sampler.epoch, next(starts))))


def _stream(sampler: ShardedSampler) -> float:
    """Return the rate of batches in millions of rows per second."""

    def stream() -> None:
        batches = sampler.batches()
        for _ in range(STREAM // BATCH):
            next(batches)

    return STREAM / _least(stream) / 1e6


def _two(random: np.random.Generator) -> None:
    random.permutation(BLOCKS)
    random.permutation(BLOCKS)


def _least(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of the fastest of REPEATS runs."""
    seconds = []
    for _ in range(REPEATS):
        start = process_time()
        work()
        seconds.append(process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    main()

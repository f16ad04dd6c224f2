"""Quantiles of waits are those of the raw timings to within one bucket, also over ranks and read from files."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_loader
from dataload.reporting.aggregate import added
from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.stats_log import read
from dataload.telemetry.wait_histogram import BOUNDS, WaitHistogram

BUCKET = 10**0.1 * (1 + 1e-9)
SHARES = (0.01, 0.5, 0.95, 0.99, 1.0)


def of(waits: Any) -> WaitHistogram:
    histogram = WaitHistogram()
    for seconds in waits:
        histogram.add(seconds)
    return histogram


def some_waits(seed: int, number: int = 5000) -> Any:
    """Return waits of a rank: most of a few µs, some of seconds, more with each rank."""
    noise = np.random.default_rng(seed)
    slow = noise.random(number) < 0.01 * (1 + seed)
    return np.where(slow, noise.lognormal(0, 2, number), noise.lognormal(-11, 1, number))


def raw_quantile(waits: Any, share: float) -> float:
    return float(np.quantile(waits, share, method="inverted_cdf"))


@pytest.mark.parametrize("share", SHARES)
def test_quantiles_are_within_a_bucket_of_the_raw_ones(share: float) -> None:
    waits = some_waits(0)
    raw = max(raw_quantile(waits, share), BOUNDS[0] / BUCKET)
    assert raw <= of(waits).quantile(share) * (1 + 1e-9) <= raw * BUCKET


@pytest.mark.parametrize("share", SHARES)
def test_merged_ranks_have_the_quantiles_of_the_pooled_waits(share: float) -> None:
    ranks = [some_waits(rank) for rank in range(4)]
    pooled = np.concatenate(ranks)
    merged = WaitHistogram.merged(map(of, ranks))
    assert merged == of(pooled)
    assert raw_quantile(pooled, share) <= merged.quantile(share) * (1 + 1e-9)
    assert merged.quantile(share) <= max(raw_quantile(pooled, share), BOUNDS[0] / BUCKET) * BUCKET


def test_extremes() -> None:
    assert (WaitHistogram().quantile(0.5), WaitHistogram().longest) == (0, 0)
    assert of([0.0]).quantile(0.99) == 0
    assert of([1e-9, 5000.0]).quantile(0.99) == 5000
    assert of([BOUNDS[7]]).counts[7] == 1


def test_json_keeps_all_counts_in_little_space() -> None:
    histogram = of(some_waits(3))
    text = json.dumps(histogram.as_json())
    assert WaitHistogram.from_json(json.loads(text)) == histogram
    assert len(text) < 1000


@pytest.mark.parametrize(
    "damaged",
    [
        {"counts": {}},
        {"counts": [], "longest": 0},
        {"counts": {"92": 1}, "longest": 1},
        {"counts": {"-1": 1}, "longest": 1},
        {"counts": {"3": -1}, "longest": 1},
        {"counts": {"3": 0.5}, "longest": 1},
        {"counts": {"x": 1}, "longest": 1},
        {"counts": {"3": 1}, "longest": float("nan")},
    ],
)
def test_damaged_json_is_no_histogram(damaged: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        WaitHistogram.from_json(damaged)


class SlowTenth:
    """A transform that takes 50 ms for each tenth batch."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, batch: Any) -> Any:
        self.batches += 1
        if self.batches % 10 == 0:
            threading.Event().wait(0.05)
        return batch


@pytest.fixture
def waits_and_stats(tmp_path: Any) -> tuple[list[float], LoaderStats]:
    """Run an epoch. Return how long each `next()` took, and the statistics."""
    pq.write_table(pa.table({"a": np.arange(400)}), tmp_path / "x.parquet")
    options: dict[str, Any] = {"transform": SlowTenth(), "num_threads": 0, "stats_dir": tmp_path / "stats"}
    loader = make_loader(str(tmp_path / "x.parquet"), 10, cache=False, **options)
    waits = []
    batches = iter(loader)
    for _ in range(len(loader)):
        began = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - began)
    assert next(batches, None) is None
    return waits, loader.stats()


def test_a_loop_that_waits_now_and_then(waits_and_stats: Any) -> None:
    waits, stats = waits_and_stats
    assert sum(stats.wait_histogram.counts) == stats.batches == 40
    assert stats.wait_max <= stats.wait_seconds
    assert stats.wait_p95 >= 0.05  # which every tenth batch takes
    for name, share in (("wait_p50", 0.5), ("wait_p95", 0.95), ("wait_p99", 0.99)):
        assert 0 < getattr(stats, name) <= raw_quantile(waits, share) * BUCKET
    assert 0.05 <= stats.wait_p95 <= stats.wait_p99 <= stats.wait_max <= max(waits)


def test_files_of_ranks_have_the_waits(waits_and_stats: Any, tmp_path: Any) -> None:
    _, stats = waits_and_stats
    [one] = read(tmp_path / "stats")
    assert one.stats.wait_histogram.counts == stats.wait_histogram.counts
    assert one.stats.wait_p95 == stats.wait_p95
    last = (tmp_path / "stats/rank-0.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["wait_p99"] == stats.wait_p99
    both = added([stats, LoaderStats(wait_histogram=of([7.0] * 41))])
    assert (sum(both.wait_histogram.counts), both.wait_p95) == (81, 7)

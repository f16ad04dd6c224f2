"""The metrics of dataload for Prometheus: their names, and how they follow from the statistics of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dataload.telemetry.loader_stats import TIERS, LoaderStats
from dataload.telemetry.wait_histogram import BOUNDS

BUCKETS = range(20, 81, 2)  # of `BOUNDS`: 100 µs to 100 s, five a decade

Value = Callable[[LoaderStats], Mapping[str, float]]  # by the value of the metric's own label; "" if it has none


class Series(NamedTuple):
    """What the metrics say of one rank.

    Attributes:
        labels: Values of the labels that all metrics have.
        total: The sum over all its epochs.
        gauges: Values of some of `GAUGES`, by name.
    """

    labels: Sequence[str]
    total: LoaderStats
    gauges: Mapping[str, float]


def _of(name: str) -> Value:
    return lambda stats: {"": getattr(stats, name)}


COUNTERS: dict[str, tuple[str, str, Value]] = {  # name: (help, its own label, value)
    "rows": ("Rows handed to the training loop.", "", _of("rows")),
    "batches": ("Batches handed to the training loop.", "", _of("batches")),
    "skipped_rows": ("Rows that raised and were skipped.", "", _of("skipped_rows")),
    "tokens": ("Values of packed documents, or tokens of a token budget.", "", _of("tokens")),
    "seconds": ("Time in loops over the loader, waits included.", "", _of("seconds")),
    "wait_cause_seconds": ("Time waited for batches, by cause.", "cause", lambda stats: stats.waits),
    "bytes": (
        "Bytes, by the tier that served them.",
        "tier",
        lambda stats: {tier: getattr(stats, f"bytes_{tier}") for tier in TIERS},
    ),
    "origin_requests": ("Requests to the origin.", "", _of("requests_origin")),
    "cache_reads": ("Row groups used.", "result", lambda stats: {"hit": stats.hits, "miss": stats.misses}),
}
GAUGES = {
    "epoch": "The latest epoch, counted from 0.",
    "rows_per_second": "Rows per second of the latest epoch.",
    "stall_ratio": "Share of the latest epoch spent waiting.",
    "sampled_timestamp_seconds": "Time of the latest sample.",
    "cache_used_bytes": "Bytes in the cache of the host.",
    "cache_limit_bytes": "Most bytes in the cache of the host.",
}


def gauges_of(latest: LoaderStats) -> dict[str, float]:
    """Return the gauges of the latest epoch of a rank."""
    return {"epoch": latest.epoch, "rows_per_second": latest.rows_per_second, "stall_ratio": latest.stall_fraction}


def families(names: Sequence[str], series: Iterable[Series]) -> Iterator[Metric]:
    """Yield the metrics of some ranks. names: the labels that all metrics have."""
    series = list(series)
    for name, (text, label, value) in COUNTERS.items():
        counter = CounterMetricFamily(f"dataload_{name}", text, labels=[*names, *filter(None, [label])])
        for each in series:
            for own, count in value(each.total).items():
                counter.add_metric([*each.labels, *filter(None, [own])], count)
        yield counter
    waits = HistogramMetricFamily("dataload_wait_seconds", "Time that the loop waited for each batch.", labels=names)
    for each in series:
        waits.add_metric(each.labels, _buckets(each.total), sum_value=each.total.wait_seconds)
    yield waits
    for name, text in GAUGES.items():
        gauge = GaugeMetricFamily(f"dataload_{name}", text, labels=names)
        for each in series:
            if name in each.gauges:
                gauge.add_metric(each.labels, each.gauges[name])
        if gauge.samples:
            yield gauge


def _buckets(stats: LoaderStats) -> list[tuple[str, float]]:
    counts = list(accumulate(stats.wait_histogram.counts))
    return [*((f"{BOUNDS[bucket]:.4g}", counts[bucket]) for bucket in BUCKETS), ("+Inf", counts[-1])]

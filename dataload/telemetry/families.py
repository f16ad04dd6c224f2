"""The metrics of ranks as Prometheus has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.metrics import COUNTERS, GAUGES, Series
from dataload.telemetry.wait_histogram import BOUNDS

BUCKETS = range(20, 81, 2)  # of `BOUNDS`: 100 µs to 100 s, five a decade


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

"""Statistics of a run in Prometheus' text format, for the textfile collector of node_exporter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataload.telemetry.loader_stats import TIERS
from dataload.telemetry.stats_log import Pass
from dataload.telemetry.wait_timeline import CAUSES


class Run(Collector):
    """A collector of each rank's counters over the whole run and gauges of its latest epoch.

    Ranks that the latest world does not have keep their counters only: their gauges would raise alerts for ever.

    Args:
        name: The label `run` of all metrics.
        passes: The passes of the run.
    """

    def __init__(self, name: str, passes: Sequence[Pass]) -> None:
        self._name = name
        self._world_size = max(passes, key=lambda record: record.began).world_size if passes else 0
        self._by_rank: dict[str, list[Pass]] = {}
        for record in sorted(passes, key=lambda record: record.rank):
            self._by_rank.setdefault(str(record.rank), []).append(record)

    def collect(self) -> Iterator[Metric]:
        names = ["run", "rank"]
        rows = CounterMetricFamily("dataload_rows", "Rows handed to the training loop.", labels=names)
        skipped = CounterMetricFamily("dataload_skipped_rows", "Rows that raised and were skipped.", labels=names)
        seconds = CounterMetricFamily("dataload_seconds", "Time in the loop over the loader.", labels=names)
        waits = CounterMetricFamily("dataload_wait_seconds", "Time waited for batches.", labels=[*names, "cause"])
        read = CounterMetricFamily("dataload_bytes", "Bytes, by the tier that served them.", labels=[*names, "tier"])
        requests = CounterMetricFamily("dataload_origin_requests", "Requests to the origin.", labels=names)
        reads = CounterMetricFamily("dataload_cache_reads", "Row groups used.", labels=[*names, "result"])
        epoch = GaugeMetricFamily("dataload_epoch", "The latest epoch, counted from 0.", labels=names)
        rate = GaugeMetricFamily("dataload_rows_per_second", "Rows per second of the latest epoch.", labels=names)
        stall = GaugeMetricFamily("dataload_stall_ratio", "Share of the latest epoch spent waiting.", labels=names)
        sampled = GaugeMetricFamily("dataload_sampled_timestamp_seconds", "Time of the latest sample.", labels=names)
        for rank, passes in self._by_rank.items():
            labels = [self._name, rank]
            all_stats, latest = [record.stats for record in passes], passes[-1]
            rows.add_metric(labels, sum(stats.rows for stats in all_stats))
            skipped.add_metric(labels, sum(stats.skipped_rows for stats in all_stats))
            seconds.add_metric(labels, sum(stats.seconds for stats in all_stats))
            requests.add_metric(labels, sum(stats.requests_origin for stats in all_stats))
            for cause in CAUSES:
                waits.add_metric([*labels, cause], sum(stats.waits[cause] for stats in all_stats))
            for tier in TIERS:
                read.add_metric([*labels, tier], sum(getattr(stats, f"bytes_{tier}") for stats in all_stats))
            for result, name in (("hit", "hits"), ("miss", "misses")):
                reads.add_metric([*labels, result], sum(getattr(stats, name) for stats in all_stats))
            if self._world_size and int(rank) >= self._world_size:
                continue
            epoch.add_metric(labels, latest.stats.epoch)
            rate.add_metric(labels, latest.stats.rows_per_second)
            stall.add_metric(labels, latest.stats.stall_fraction)
            sampled.add_metric(labels, latest.until)
        yield from (rows, skipped, seconds, waits, read, requests, reads, epoch, rate, stall, sampled)


def write(passes: Sequence[Pass], path: Path) -> None:
    """Write the metrics to a temporary file and rename it to `path`, so that readers never see half of them.

    The file's name is the label `run`. node_exporter rejects a series that is in two files of its folder.
    """
    registry = CollectorRegistry()
    registry.register(Run(path.stem, passes))
    write_to_textfile(str(path), registry)

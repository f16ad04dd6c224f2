"""Statistics of a run in Prometheus' text format, for the textfile collector of node_exporter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dataload.telemetry.families import families
from dataload.telemetry.loader_stats import added
from dataload.telemetry.metrics import Series, gauges_of
from dataload.telemetry.stats_log import Pass


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
        series = []
        for rank, passes in self._by_rank.items():
            latest = passes[-1]
            is_there = not self._world_size or int(rank) < self._world_size
            gauges = {**gauges_of(latest.stats), "sampled_timestamp_seconds": latest.until} if is_there else {}
            series.append(Series([self._name, rank], added([record.stats for record in passes]), gauges))
        yield from families(["run", "rank"], series)


def write(passes: Sequence[Pass], path: Path) -> None:
    """Write the metrics to a temporary file and rename it to `path`, so that readers never see half of them.

    The file's name is the label `run`. node_exporter rejects a series that is in two files of its folder.
    """
    registry = CollectorRegistry()
    registry.register(Run(path.stem, passes))
    write_to_textfile(str(path), registry)

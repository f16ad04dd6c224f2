"""Synthetic statistics of runs in the format that ranks write."""

from __future__ import annotations

from pathlib import Path

from dataload.telemetry import stats_log
from dataload.telemetry.loader_stats import LoaderStats

BEGAN = 1_700_000_000.0
SLOW_RANK = 2


def write_pass(folder, rank, epoch, began, samples, ended=True, started=BEGAN):
    """Write the statistics of one epoch of a rank.

    Args:
        folder: Folder of the statistics.
        rank: Number of the rank.
        epoch: Number of the epoch.
        began: Start of the epoch as a POSIX time.
        samples: For each second, the increments of statistics by name. A wait is named by its cause.
        ended: Whether the rank writes its final line.
        started: Start of the process's first pass as a POSIX time.
    """
    stats = LoaderStats(epoch, rank=rank)
    one = stats_log.Samples(folder, stats)
    one._origin |= {"began": began, "started": started}
    with one:
        for number, sample in enumerate(samples, 1):
            stats.batches += 1
            stats.seconds += 1.0
            stats.wait_histogram.add(sum(more for name, more in sample.items() if name in stats.waits))
            for name, more in sample.items():
                if name in stats.waits:
                    stats.waits[name] += more
                    stats.wait_seconds += more
                else:
                    setattr(stats, name, getattr(stats, name) + more)
            one.take(last=ended and number == len(samples))
        if not ended:
            one._path = None  # A killed rank writes no final line.
    return stats


def write_run(folder: Path, ranks: int = 4, epochs: int = 6, seconds: int = 30) -> None:
    """Write a run whose first epoch reads from the origin, the second partly from a cluster, with a slow rank later."""
    for epoch in range(epochs):
        for rank in range(ranks):
            samples = []
            for second in range(seconds):
                sample = {"rows": 1000 - (7 * second + 13 * rank) % 90, "hits": 40, "bytes_local": 30_000_000}
                if epoch == 0:
                    sample |= {"misses": 40, "bytes_origin": 25_000_000, "requests_origin": 4}
                    sample |= {"origin": 0.2 + second % 3 / 10, "decode": 0.1}
                if epoch == 1:
                    sample |= {"misses": 4, "bytes_cluster": 5_000_000, "cluster": 0.02}
                if epoch > 2 and rank == SLOW_RANK:
                    sample |= {"disk": 0.3, "transform": 0.05}
                samples.append(sample)
            write_pass(folder, rank, epoch, BEGAN + epoch * (seconds + 4), samples)

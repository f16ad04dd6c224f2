"""The metrics of dataload: their names, and how they follow from the statistics of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dataload.telemetry.loader_stats import TIERS, LoaderStats

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

"""An epoch whose statistics are checked against an independent clock."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.wait_timeline import CAUSES


def timed_epoch(loader: Any) -> LoaderStats:
    """Run an epoch and return its statistics. The loop waited at least as long as they say."""
    waits, requested = 0.0, time.perf_counter()
    for _ in loader:
        waits += time.perf_counter() - requested
        requested = time.perf_counter()
    waits += time.perf_counter() - requested
    stats = loader.stats()
    assert set(stats.waits) == set(CAUSES)
    assert sum(stats.waits.values()) == pytest.approx(stats.wait_seconds, rel=1e-6)
    assert 0 < stats.wait_seconds <= waits
    return stats

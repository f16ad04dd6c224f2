"""Ranks that hold the others up."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

LATE = 0.05  # of the time: a rank that takes so much longer than the median is a straggler


def excess(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return by how many seconds each rank exceeds the median rank."""
    median = median_low(seconds.values())
    return {rank: each - median for rank, each in seconds.items()}


def behind(seconds: Mapping[int, float], whole: float) -> dict[int, float]:
    """Return the ranks that exceed the median rank by more than `LATE` of `whole` seconds, and by how much."""
    return {rank: more for rank, more in excess(seconds).items() if more > LATE * whole}

"""Counts, sizes and times as text."""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST_PARTS = 8  # columns or sources that a text names


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def few(parts: Iterable[str], most: int = MOST_PARTS) -> str:
    """Return the first `most` parts, separated by commas, and how many more there are."""
    parts = list(parts)
    more = [f"… {len(parts) - most:,} more"] if len(parts) > most else []
    return ", ".join([*parts[:most], *more])


def duration(seconds: float) -> str:
    """Format a time for people: "under 0.1 s", "0.2 s", "45 s", "3 min", "2.5 h"."""
    if seconds < 0.1:
        return "under 0.1 s"
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def precise(seconds: float) -> str:
    """Format a time of any length in three digits: "3.16 µs", "40 ms", "1.5 s", "3 min"."""
    if seconds >= 90:
        return duration(seconds)
    for unit, name in ((1, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def at_least(size: int) -> str:
    """Return `size` bytes, rounded up, as `cache_bytes` takes it: "1.3GB"."""
    power = min(max(1, (len(str(size)) - 1) // 3), 5)
    return f"{math.ceil(size / 1000**power * 10) / 10:.1f}{' kMGTP'[power]}B"

"""Medians and ranges in tables."""

from __future__ import annotations

from statistics import median


def ranged(numbers: list[float], shape: str) -> str:
    """Return the median and the range of some numbers."""
    least, middle, most = (shape.format(number) for number in (min(numbers), median(numbers), max(numbers)))
    return f"{middle} ({least}–{most})"

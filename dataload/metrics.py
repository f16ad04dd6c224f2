"""Counters that threads share."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named totals (counts, bytes or seconds), safe to add to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        with self._lock:
            self._totals.update(amounts)

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)

"""Whether the cluster answers sooner than the origin."""

from __future__ import annotations

import threading
from collections import deque

FEW = 4  # requests to the origin, before they are compared
LAST = 16  # of them that are compared
ANSWERS = 8  # of the cluster, all of which must be late: on a busy machine, some are
NEAR_SECONDS = 0.05  # An answer that takes less is never too late, whatever noise the origin's figures have.
NEAR_RATE = 50e6  # bytes a second of a near cluster, less than half of 1 Gb/s, until there are figures of the origin


class Pace:
    """Compares the cluster's answers with requests to the origin. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._delays = deque[float](maxlen=ANSWERS)  # of the cluster, in seconds beyond what the origin would take
        self._origin = deque[tuple[float, int]](maxlen=LAST)

    @property
    def has_figures(self) -> bool:
        """Whether the origin has answered often enough to compare it."""
        return len(self._origin) >= FEW

    def origin_took(self, seconds: float, num_bytes: int) -> None:
        """Record a request to the origin for some bytes."""
        with self._mutex:
            self._origin.append((seconds, num_bytes))

    def is_late(self, seconds: float, num_bytes: int, *, alone: bool) -> bool:
        """Record an answer of the cluster. Return whether the origin, at its best, would have been sooner each time.

        A cluster that is far away is late until there are figures of the origin to compare it with.

        Args:
            seconds: Time of the answer.
            num_bytes: Its size.
            alone: Judge this answer only, and not the last ones.
        """
        with self._mutex:
            if self.has_figures:
                rate = max(size / max(took, 1e-6) for took, size in self._origin)
                usual = min(took for took, _ in self._origin) + (num_bytes / rate if rate else 0.0)
            else:
                usual = NEAR_SECONDS + num_bytes / NEAR_RATE
            delay = seconds - max(usual, NEAR_SECONDS)
            if alone:
                self._delays.clear()
            self._delays.append(delay)
            return (alone or len(self._delays) == ANSWERS) and min(self._delays) > 0

"""How long an attempt to fetch bytes may take, before they are asked for again on another connection."""

from __future__ import annotations

import math
from statistics import median_low

# A body that trickles must not hold up an epoch. Requests that all begin at once on a slow network take this long, too.
LEAST_SECONDS = 30.0
MOST_SECONDS = 1800.0
TIMES = 8  # the usual time of a request: one that takes longer is an outlier, and the connection is to blame
STEP = 4.0  # Each attempt may take so much longer than the one before. Seconds are rounded up to a power of it.
HURRIED = 2  # attempts. The next one may take as long as it needs, within `MOST_SECONDS`.
LAST = 64  # requests that are compared
ALIKE = 4  # Requests for this part of the bytes, or more, are comparable.


class Patience:
    """Bounds the time of an attempt by the time that comparable requests to the same origin took lately.

    A network on which all connections are slow raises the bound. Thread-safe.
    """

    def __init__(self) -> None:
        self._took: tuple[tuple[float, int], ...] = ()  # replaced: a deque may change while another thread looks at it

    def note(self, seconds: float, num_bytes: int) -> None:
        """Record how long a request took, or after which time it was given up."""
        self._took = (*self._took[1 - LAST :], (seconds, num_bytes))

    def seconds(self, num_bytes: int, attempt: int) -> float:
        """Return how long an attempt may take; the first one is 0. There are few different results."""
        if attempt >= HURRIED:
            return MOST_SECONDS
        alike = [seconds for seconds, size in self._took if ALIKE * size >= num_bytes]
        usual = TIMES * median_low(alike) if alike else 0.0
        steps = math.ceil(math.log(max(1.0, usual / LEAST_SECONDS), STEP))
        return min(MOST_SECONDS, LEAST_SECONDS * STEP ** (steps + attempt))

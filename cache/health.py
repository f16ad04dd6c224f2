"""Circuit breakers for the reads and writes of a cache."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dataload.runtime.counters import Counters
from dataload.runtime.redact import redacted

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a retry; doubled after each failure
READ_FAILURES = 3  # in a row: one bad sector does not mean a bad disk
WRITE_FAILURES = 1  # a retried write costs as much as the fetch it may save

log = logging.getLogger(__name__)


class CircuitBreaker:
    """A breaker that trips after consecutive failures and then allows one attempt per pause.

    Args:
        after: Consecutive failures that trip the breaker.
        clock: Monotonic time in seconds.
        changed: Called when the breaker trips or recovers.

    Attributes:
        tripped: Whether the breaker has tripped and not recovered.
        is_trying: Whether the attempt of a pause is under way, or was inconclusive.
    """

    def __init__(self, after: int, clock: Callable[[], float], changed: Callable[[], object]) -> None:
        self.tripped = False
        self._after = after
        self._clock = clock
        self._changed = changed
        self._mutex = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._try_at = 0.0
        self.is_trying = False

    def allows(self) -> bool:
        """Return whether to try now. While tripped, one caller per pause gets True and must report the result."""
        if not self.tripped:
            return True
        with self._mutex:
            if self._clock() < self._try_at:
                return False
            self._try_at = self._clock() + self._pause
            self.is_trying = True
            return True

    @property
    def is_half_open(self) -> bool:
        """Whether the attempt of a pause was inconclusive: the next one is allowed at once."""
        return self.is_trying and self._clock() >= self._try_at

    def failed(self, *, for_good: bool = False) -> None:
        """Record a failure. for_good: trip at once, whatever the number of failures."""
        with self._mutex:
            self._failures += 1
            # This attempt began before the breaker tripped: do not lengthen the pause.
            if self.tripped and not self.is_trying:
                return
            if not for_good and self._failures < self._after:
                return
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if self.tripped else FIRST_PAUSE
            self._try_at = self._clock() + self._pause
            was_tripped, self.tripped, self.is_trying = self.tripped, True, False
        if not was_tripped:
            self._changed()

    def inconclusive(self) -> None:
        """Record an attempt that neither worked nor failed. Allow the next one at once; a failure doubles the pause."""
        with self._mutex:
            if self.is_trying:
                self._try_at = self._clock()

    def worked(self) -> None:
        """Record a success. Close the breaker."""
        self._failures = 0
        if self.tripped:
            self.tripped = False
            self._changed()


class Health:
    """The health of a cache folder or cluster as one process sees it. Each change and kind of error is logged once.

    States:

    - "normal": reads and writes work.
    - "degraded": writes fail; reads continue, and fetched data is not cached.
    - "off": reads fail; the process does not use the cache.

    Args:
        name: Name of the cache in the log.
        clock: Monotonic time in seconds.
        counters: Counts the errors.

    Attributes:
        reason: Why the state is what it is: the last error, for the log.
    """

    def __init__(
        self, name: str, clock: Callable[[], float] = time.monotonic, counters: Counters | None = None
    ) -> None:
        self._name = name
        self._counters = counters or Counters()
        self._reported: set[str] = set()
        self.reason = ""
        self._state = "normal"
        self._counts = {"normal": 0, "degraded": 0, "off": 0}
        self.reads = CircuitBreaker(READ_FAILURES, clock, self._changed)
        self.writes = CircuitBreaker(WRITE_FAILURES, clock, self._changed)

    @property
    def state(self) -> str:
        """The current state."""
        return "off" if self.reads.tripped else "degraded" if self.writes.tripped else "normal"

    def worked(self) -> None:
        """Record that a blob was written and published: reads and writes work."""
        self.reads.worked()
        self.writes.worked()

    def report(self, doing: str, error: Exception) -> None:
        """Count an error, and log the first of each kind. The caller goes on without the cache."""
        self._counters.add(errors=1)
        # Text: a log handler that keeps the exception would keep the folder open through its traceback.
        self.reason = redacted(error) or type(error).__name__
        if self.is_new(f"{doing} {type(error).__name__} {getattr(error, 'errno', None)}"):
            log.warning("cache %s: error while %s; falling back without the cache: %s", self._name, doing, self.reason)

    def is_new(self, kind: str) -> bool:
        """Return whether a kind of event is reported for the first time."""
        if kind in self._reported:
            return False
        self._reported.add(kind)
        return True

    def stats(self) -> dict[str, str | int]:
        """Return the state and how often each state was entered."""
        return {"state": self.state, **self._counts}

    def _changed(self) -> None:
        state = self.state
        if state == self._state:
            return
        self._state = state
        self._counts[state] += 1
        effect = {
            "normal": "works again",
            "degraded": "cannot be written to: cached data is served, new data is not cached",
            "off": "cannot be used: all data comes from the origin",
        }[state]
        reason = "" if state == "normal" else f"; it is retried periodically; the last reason: {self.reason}"
        log.warning("cache %s %s%s", self._name, effect, reason)

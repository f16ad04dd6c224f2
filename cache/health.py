"""How a disk is doing: what fails on it is left alone for a while, then tried again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the next try; doubled after each that failed
READ_FAILURES = 3  # in a row: one bad sector is no bad disk
WRITE_FAILURES = 1  # what is not kept costs a fetch, trying costs as much

log = logging.getLogger(__name__)


class CircuitBreaker:
    """Whether to try something, by how it went: always, until it fails `after` times in a row; then once a pause."""

    def __init__(self, after: int, clock: Callable[[], float], changed: Callable[[], object]) -> None:
        self.tripped = False
        self._after = after
        self._clock = clock
        self._changed = changed
        self._mutex = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._try_at = 0.0
        self._trying = False

    def allows(self) -> bool:
        """Whether to try now. While tripped, one caller a pause is told so, and has to say how it went."""
        if not self.tripped:
            return True
        with self._mutex:
            if self._clock() < self._try_at:
                return False
            self._try_at = self._clock() + self._pause
            self._trying = True
            return True

    def failed(self, *, for_good: bool = False) -> None:
        """It failed; for_good: in a way that needs no second failure to be believed."""
        with self._mutex:
            self._failures += 1
            # What was under way when it tripped says nothing new, and must not lengthen the pause.
            if self.tripped and not self._trying:
                return
            if not for_good and self._failures < self._after:
                return
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if self.tripped else FIRST_PAUSE
            self._try_at = self._clock() + self._pause
            was, self.tripped, self._trying = self.tripped, True, False
        if not was:
            self._changed()

    def worked(self) -> None:
        self._failures = 0
        if self.tripped:
            self.tripped = False
            self._changed()


class Health:
    """The state of one process's dealings with a cache folder, each change of it logged once.

    "normal"; "degraded": writes fail, reads go on, what is fetched is not kept; "off": reads fail too, nothing is asked
    of the disk.

    clock: seconds, monotonic.
    """

    def __init__(self, place: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._state = "normal"
        self._counts = {"normal": 0, "degraded": 0, "off": 0}
        self.reads = CircuitBreaker(READ_FAILURES, clock, self._changed)
        self.writes = CircuitBreaker(WRITE_FAILURES, clock, self._changed)

    @property
    def state(self) -> str:
        return "off" if self.reads.tripped else "degraded" if self.writes.tripped else "normal"

    def worked(self) -> None:
        """A blob was kept: the disk reads and writes."""
        self.reads.worked()
        self.writes.worked()

    def stats(self) -> dict[str, str | int]:
        """state, and how often each state was entered."""
        return {"state": self.state, **self._counts}

    def _changed(self) -> None:
        state = self.state
        if state == self._state:
            return
        self._state = state
        self._counts[state] += 1
        effect = {
            "normal": "works again",
            "degraded": "cannot be written to: what is kept is served, the rest comes from the origin and is not kept",
            "off": "cannot be used: everything comes from the origin",
        }[state]
        log.warning("cache %s %s%s", self._place, effect, "" if state == "normal" else "; it is tried again")

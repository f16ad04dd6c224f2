"""Progress of long work on standard error: one line on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from dataload.runtime.text import duration

FIRST_LINE, NEXT_LINES = 1.0, 10.0  # seconds until the first line, and between lines
ON_A_TERMINAL = 0.5


class Progress:
    """Tells how much of a work is done.

    Args:
        title: The name of the work.
        total: The amount of work.
        unit: The plural of what is counted, such as "files".
        clock: Tells the seconds.
    """

    def __init__(self, title: str, total: int, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._total, self._unit, self._clock = title, total, unit, clock
        self._done = 0
        self._is_terminal = sys.stderr.isatty()
        self._started = clock()
        self._next = self._started + FIRST_LINE

    def advance(self, amount: int) -> None:
        """Add to the work done. Print a line if one is due."""
        self._done += amount
        now = self._clock()
        if now >= self._next:
            self._next = now + (ON_A_TERMINAL if self._is_terminal else NEXT_LINES)
            rate = self._done / max(1e-9, now - self._started)
            left = duration((self._total - self._done) / max(1e-9, rate))
            share = self._done / max(1, self._total)
            line = f"{self._title}: {self._done:,} of {self._total:,} {self._unit} ({share:.0%}), {left} to go"
            sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the line of a terminal."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

"""Progress of long work as lines on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.filesize import decimal

from dataload.runtime.text import duration

FIRST_LINE, NEXT_LINES = 1.0, 10.0  # seconds until the first line, and between lines
SLOW = 10  # a second, below which a rate has decimals


class ProgressLines:
    """Tells how much of a work is done: after a second, then every ten seconds.

    Args:
        title: The name of the work.
        total: The amount of work, in bytes or in `unit`.
        unit: The plural of what is counted, such as "files"; "": bytes.
        clock: Tells the seconds.
    """

    def __init__(self, title: str, total: int, unit: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._total, self._unit, self._clock = title, total, unit, clock
        self._done = 0
        self._started = clock()
        self._next = self._started + FIRST_LINE

    def advance(self, amount: int) -> None:
        """Add to the work done. Print a line if one is due."""
        self._done += amount
        now = self._clock()
        if now >= self._next:
            self._next = now + NEXT_LINES
            sys.stderr.write(f"{self._title}: {self._text(now - self._started)}\n")
            sys.stderr.flush()

    def _text(self, seconds: float) -> str:
        show: Callable[[int], str] = "{:,}".format if self._unit else decimal
        done = f"{show(self._done)} of {show(self._total)}{self._unit and f' {self._unit}'}"
        if not self._done and self._total:
            return done
        rate = self._done / max(1e-9, seconds)
        remaining = (self._total - self._done) / max(1e-9, rate)
        share = self._done / self._total if self._total else 1.0
        speed = f"{rate:,.2f}" if self._unit and rate < SLOW else show(round(rate))
        return f"{done} ({share:.0%}), {speed}/s, {duration(remaining)} to go"

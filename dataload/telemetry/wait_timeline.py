"""What threads are at, and since when: so that time spent waiting for them can be charged to a cause."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice, pairwise, takewhile
from operator import itemgetter
from time import perf_counter

from dataload.telemetry.spans import stage

CAUSES = ("origin", "cluster", "disk", "decode", "collate", "transform", "transfer")
IDLE = ""
TURNS_KEPT = 4096
ELSEWHERE = "elsewhere"  # another process of the host makes what is awaited

_of_thread = threading.local()


class Timeline:
    """What one thread was at, one thing after the other. Of things within things, the innermost counts.

    usually: what it is at when nothing else is said; `IDLE`: nothing that would be known.

    Notes: times are seconds of `time.perf_counter`, a clock that all processes of a Linux host share, so a timeline
    may be sent to another. One thread writes, any may read.
    """

    def __init__(self, usually: str = IDLE) -> None:
        self._at = usually
        self._turns = [(perf_counter(), usually)]  # since when it has been at what

    @contextmanager
    def here(self) -> Iterator[Timeline]:
        """While it lasts, this thread's `doing` and `waited` write to this timeline."""
        before = getattr(_of_thread, "timeline", None)
        _of_thread.timeline = self
        try:
            with stage(self._at) if self._at else nullcontext():
                yield self
        finally:
            _of_thread.timeline = before

    @contextmanager
    def doing(self, cause: str) -> Iterator[None]:
        before = self._at
        self._turn(perf_counter(), cause)
        try:
            with stage(cause):
                yield
        finally:
            self._turn(perf_counter(), before)

    def waited(self, since: float, other: Timeline, instead: str) -> None:
        """From `since` until now it waited for the thread of `other`, so what that was at is the cause.

        instead: of what is not known of the other.
        """
        now, before = perf_counter(), self._at
        for start, cause in other.turns(since, now):
            self._turn(start, cause or instead)
        self._turn(now, before)

    def turns(self, since: float, until: float) -> list[tuple[float, str]]:
        """What it was at in that time, and from when on; of what is long ago, nothing is known any more."""
        turns = self._turns
        first = bisect_right(turns, since, key=itemgetter(0)) - 1
        found = [(since, turns[first][1] if first >= 0 else IDLE)]
        found += takewhile(lambda turn: turn[0] < until, islice(turns, first + 1, None))
        return found

    def seconds(self, since: float, until: float) -> dict[str, float]:
        """How long it was at what in that time; all together `until - since`."""
        turns = [*self.turns(since, until), (until, IDLE)]
        spent: defaultdict[str, float] = defaultdict(float)
        for (start, cause), (end, _) in pairwise(turns):
            spent[cause] += end - start
        return spent

    def spent(self) -> dict[str, float]:
        """`seconds`, of all the time until it last changed."""
        return self.seconds(self._turns[0][0], self._turns[-1][0])

    def longest(self) -> str:
        """What it was at for most of the time that is known of."""
        spent = self.spent()
        spent.pop(IDLE, None)
        return max(spent, key=spent.__getitem__, default=self._at)

    def end(self) -> Timeline:
        """It is at nothing any more."""
        self._turn(perf_counter(), IDLE)
        return self

    def take(self, since: float, until: float) -> dict[str, float]:
        """`seconds`, of which nobody will ask again."""
        spent = self.seconds(since, until)
        self._turns = [(until, self._at)]
        return spent

    def _turn(self, at: float, cause: str) -> None:
        self._at = cause
        self._turns.append((at, cause))
        if len(self._turns) > 2 * TURNS_KEPT:
            self._turns = self._turns[-TURNS_KEPT:]  # another list: somebody may be reading this one


@contextmanager
def doing(cause: str) -> Iterator[None]:
    """The thread is at `cause`, should anybody keep its timeline, or a trace."""
    timeline: Timeline | None = getattr(_of_thread, "timeline", None)
    with stage(cause) if timeline is None else timeline.doing(cause):
        yield


def waited(since: float, other: Timeline, instead: str) -> None:
    """The thread has waited for that of `other` since then, should anybody keep its timeline."""
    timeline: Timeline | None = getattr(_of_thread, "timeline", None)
    if timeline is not None:
        timeline.waited(since, other, instead)

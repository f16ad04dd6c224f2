"""Timelines of what threads do, so that the time spent waiting for a thread is charged to a cause."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, pairwise, takewhile
from operator import itemgetter
from time import perf_counter

from dataload.telemetry.spans import stage

CAUSES = ("origin", "cluster", "disk", "decode", "map", "collate", "transform", "transfer")
IDLE = ""
CHANGES_KEPT = 4096
ELSEWHERE = "elsewhere"  # another process of the host makes what is awaited

_current_thread = threading.local()


class Timeline:
    """The causes that one thread's time is charged to, one after the other. Of nested causes, the innermost counts.

    Args:
        usually: The cause outside of every `doing` block. `IDLE` if none is known.
        clock: Returns the time in seconds. All processes of a Linux host share `time.perf_counter`, so a timeline may
            be sent to another process.

    Notes:
        One thread writes, any thread may read.
    """

    def __init__(self, usually: str = IDLE, clock: Callable[[], float] = perf_counter) -> None:
        self._cause = usually
        self._clock = clock
        self._changes = [(clock(), usually)]  # (time, the cause from then on)
        self._reported_until = self._changes[0][0]
        self.helpers: list[Timeline] = []  # of the threads whose work this one waits for

    @property
    def present(self) -> str:
        """The cause that time is charged to now; while the thread waits, a cause of those that it waits for."""
        busy = [each.present for each in self.helpers]
        return self._cause or next((cause for cause in busy if cause not in (IDLE, "collate")), max(busy, default=IDLE))

    @contextmanager
    def here(self) -> Iterator[Timeline]:
        """Record this thread's `doing` and `waited` in this timeline for the duration of the block."""
        before = getattr(_current_thread, "timeline", None)
        _current_thread.timeline = self
        try:
            with stage(self._cause) if self._cause else nullcontext():
                yield self
        finally:
            _current_thread.timeline = before

    def doing(self, cause: str) -> AbstractContextManager[None]:
        """Charge the duration of the block to `cause`."""
        return _Doing(self, cause)

    def waited(self, since: float, other: Timeline, instead: str) -> None:
        """Charge the time from `since` until now to the causes of the thread that this one waited for.

        Args:
            since: When the wait began.
            other: The timeline of the other thread.
            instead: The cause of times at which the other thread was idle or unknown.
        """
        now, before = self._clock(), self._cause
        for start, cause in other.changes(since, now):
            self._change(start, cause or instead)
        self._change(now, before)

    def changes(self, since: float, until: float) -> list[tuple[float, str]]:
        """Return the causes of a span of time, each with its start. Forgotten times are `IDLE`."""
        changes = self._changes
        first = bisect_right(changes, since, key=itemgetter(0)) - 1
        found = [(since, changes[first][1] if first >= 0 else IDLE)]
        found += takewhile(lambda change: change[0] < until, islice(changes, first + 1, None))
        return found

    def seconds(self, since: float, until: float) -> dict[str, float]:
        """Return the seconds of each cause in a span of time. They add up to `until - since`."""
        changes = [*self.changes(since, until), (until, IDLE)]
        seconds: defaultdict[str, float] = defaultdict(float)
        for (start, cause), (end, _) in pairwise(changes):
            seconds[cause] += end - start
        return seconds

    def busy(self, since: float, until: float) -> float:
        """Return the seconds in a span of time that have a cause."""
        return sum(seconds for cause, seconds in self.seconds(since, until).items() if cause != IDLE)

    def spent(self) -> dict[str, float]:
        """Return the seconds of each cause until the last change."""
        return self.seconds(self._changes[0][0], self._changes[-1][0])

    def unreported(self) -> dict[str, float]:
        """Return the seconds of each cause since the last call of this method, until the last change."""
        since, self._reported_until = self._reported_until, self._changes[-1][0]
        return self.seconds(since, self._reported_until)

    def longest(self) -> str:
        """Return the cause of most of the recorded time, `IDLE` aside."""
        spent = self.spent()
        spent.pop(IDLE, None)
        return max(spent, key=spent.__getitem__, default=self._cause)

    def end(self) -> Timeline:
        """Record that the thread is idle from now on. Return this timeline."""
        self._change(self._clock(), IDLE)
        return self

    def take(self, since: float, until: float) -> dict[str, float]:
        """Return `seconds(since, until)` and forget all times before `until`."""
        has_changed = self._changes[-1][0] > since  # False for most batches, which the thread had already
        seconds = self.seconds(since, until) if has_changed else {self._cause: until - since}
        self._changes = [(until, self._cause)]
        return seconds

    def _change(self, at: float, cause: str) -> None:
        self._cause = cause
        self._changes.append((at, cause))
        if len(self._changes) > 2 * CHANGES_KEPT:
            self._changes = self._changes[-CHANGES_KEPT:]  # A new list: another thread may iterate over the old one.


class _Doing:
    """A block whose duration is charged to a cause. A generator would take three times as long."""

    def __init__(self, timeline: Timeline, cause: str) -> None:
        self._timeline = timeline
        self._cause = cause

    def __enter__(self) -> None:
        self._before = self._timeline._cause  # noqa: SLF001 (of this module)
        self._timeline._change(self._timeline._clock(), self._cause)  # noqa: SLF001
        self._stage = stage(self._cause)
        self._stage.__enter__()

    def __exit__(self, *raised: object) -> None:
        try:
            self._stage.__exit__(*raised)  # type: ignore[arg-type] # three positional values
        finally:
            self._timeline._change(self._timeline._clock(), self._before)  # noqa: SLF001


def doing(cause: str) -> AbstractContextManager[object]:
    """Charge the duration of the block to `cause`, in this thread's timeline and trace, if it has one."""
    timeline: Timeline | None = getattr(_current_thread, "timeline", None)
    return stage(cause) if timeline is None else timeline.doing(cause)


def waited(since: float, other: Timeline, instead: str) -> None:
    """Charge a wait for another thread in this thread's timeline, if it has one. See `Timeline.waited`."""
    timeline: Timeline | None = getattr(_current_thread, "timeline", None)
    if timeline is not None:
        timeline.waited(since, other, instead)

"""Loops that wait too long for a batch: one thread of the process looks at all of them, and logs one line a stall."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

from dataload.runtime.forks import ForkAware
from dataload.runtime.renewals import Renewals

LOOK_SECONDS = 1.0  # between two looks at the loops

log = logging.getLogger(__name__)


class LoopWait:
    """The present wait of a loop for its next batch.

    Args:
        most: Seconds from which on a wait is a stall.
        describe: Returns who waits for what, given the seconds so far.

    Attributes:
        since: When the wait began, by `perf_counter`; 0: the loop doesn't wait.
    """

    def __init__(self, most: float, describe: Callable[[float], str]) -> None:
        self.since = 0.0
        self._most = most
        self._describe = describe
        self._told = 0.0  # the start of the stall that was logged last

    def look(self) -> None:
        """Log a line if the loop has stalled, unless it has been logged."""
        since = self.since
        seconds = perf_counter() - since
        if not since or since == self._told or seconds <= self._most:
            return
        self._told = since
        try:
            text = self._describe(seconds)
        except Exception as error:  # noqa: BLE001 (what it looks at changes meanwhile)
            text = f"a loop has waited {seconds:.0f} s for its next batch ({error!r})"
        if self.since == since:
            log.warning("%s", text)


class _Watch(Renewals[LoopWait], ForkAware):
    """The loops of this process, and the thread that looks at them. It ends with the last loop."""

    def __init__(self) -> None:
        Renewals.__init__(self, LOOK_SECONDS, "dataload-stalls")
        ForkAware.__init__(self)

    def after_fork_in_child(self) -> None:
        Renewals.__init__(self, LOOK_SECONDS, "dataload-stalls")

    def renew(self, held: Iterable[LoopWait]) -> None:
        for each in held:
            each.look()

    @property
    def is_watching(self) -> bool:
        return bool(self._held)


_watch = _Watch()


@contextmanager
def watched(wait: LoopWait) -> Iterator[None]:
    """Log the stalls of a loop for the duration of the block."""
    with suppress(RuntimeError):  # The system cannot start another thread.
        _watch.hold(wait)
    try:
        yield
    finally:
        _watch.release(wait)


def is_watching() -> bool:
    """Return whether a loop of this process is watched, so that its waits need no other line in the log."""
    return _watch.is_watching

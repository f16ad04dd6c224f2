"""The load of a row group in a process: planned, fetching, decoding, cached; or failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from enum import Enum
from typing import Any

from dataload.cache.tier import BlobKey, Span
from dataload.rows.row_group_cache import RowGroupCache
from dataload.runtime.cached_property import cached_property
from dataload.runtime.counters import Counters, charged_to
from dataload.runtime.memory_budget import ReservationCancelled
from dataload.telemetry.wait_timeline import Timeline


class State(Enum):
    """The states of a row group, in order."""

    PLANNED = "planned"  # It waits for a thread, for memory, or for another process or host that makes it.
    FETCHING = "fetching"  # Its memory is reserved, and its byte ranges are requested.
    DECODING = "decoding"  # Its blobs are decoded, packed and written to the cache. A streamed one is still fetched.
    CACHED = "cached"  # Its blobs are ready to be mapped.
    FAILED = "failed"  # Its load raised an error, or was cancelled.


class RowGroupLoad:
    """One load of a row group, from its request until it is open or has failed. A later request begins another.

    Args:
        group: The row group's number among all that the process loads.
        cache: The row groups of its dataset.
        number: Its number there.
        account: Account that its cost is charged to, see `Accounts`.
        span: The bytes of each blob to look up; None: all of them. (0, 0) finds out whether they are cached.

    Attributes:
        state: The present state.
        timeline: Timeline of the thread that loads the row group, or of the latest one.
        cancelled: Done once a loop has ended and no loop has requested the row group since.
        contents: The blobs; None if the load was cancelled before memory was reserved for it.
        awaited: Whether a thread waits for the contents.
        uncached_bytes: Bytes of the contents that are in memory of this process, because the cache does not keep them.
        is_hit: Whether the cache had the blobs when this process looked for them first.
    """

    def __init__(
        self,
        group: int,
        cache: RowGroupCache,
        number: int,
        account: Counters | None = None,
        span: Span | None = None,
    ) -> None:
        self.group, self.cache, self.number = group, cache, number
        self.account = account or Counters()
        self.span = span
        self.state = State.PLANNED
        self.timeline = Timeline()
        self.cancelled: Future[None] = Future()
        self.contents: Future[list[memoryview] | None] = Future()
        self.awaited = False
        self.uncached_bytes = 0
        self.is_hit = False

    @cached_property
    def small_bytes(self) -> int:
        """See `RowGroupCache.small_bytes`."""
        return self.cache.small_bytes(self.number)

    @cached_property
    def keys(self) -> list[BlobKey]:
        """The keys of the blobs, which take long to make for tiny row groups."""
        return self.cache.keys(self.number)

    def find(self) -> list[memoryview] | None:
        """Return the blobs, or `span` of each, if this host has cached them. Charge the look-up to the row group."""
        with charged_to(self.account):
            return self.cache.find_all(self.keys, self.span)

    def hit(self) -> None:
        """Note that the cache has the blobs already."""
        self.state = State.CACHED
        self.is_hit = True

    def mark_cached(self, blobs: list[memoryview]) -> None:
        """Note the blobs that this process or another one has made."""
        self.state = State.CACHED
        self.cache.note_kept(self.number, blobs)

    def begin(self) -> bool:
        """Return whether a thread may load the row group. It may not if the load was cancelled before."""
        return self.contents.set_running_or_notify_cancel()

    def finish(self, found: list[memoryview] | BaseException) -> None:
        """End the load with the blobs, or with the reason why there are none."""
        if isinstance(found, BaseException):
            self.state = State.FAILED
        self.account.add(under_way=-1)
        if isinstance(found, ReservationCancelled):
            self.contents.set_result(None)
        elif isinstance(found, BaseException):
            self.contents.set_exception(found)
        else:
            self.contents.set_result(found)

    def finish_with(self, call: Future[Any]) -> None:
        """End the load if its call was cancelled: the program exits, and no thread loads the row group."""
        if call.cancelled() and not self.contents.cancel():
            self.contents.set_exception(CancelledError())

    def is_stale(self) -> bool:
        """Whether the load ended without contents, so that the next request must begin another."""
        contents = self.contents
        return contents.cancelled() or (
            contents.done() and (contents.exception() is not None or contents.result() is None)
        )

    def is_cancelled(self) -> bool:
        return self.cancelled.done()

    def cancel(self) -> bool:
        """Notify the loading thread and the loops that wait. Return whether the load ends here: no thread had begun it.

        This uses no name of a module, because it may run while the interpreter shuts down.
        """
        never_begun = self.contents.cancel()
        if never_begun:
            self.account.add(under_way=-1)
        if not self.cancelled.done():
            self.cancelled.set_result(None)
        return never_begun

    def revive(self) -> None:
        """Withdraw a cancellation, because a loop requests the row group again."""
        if self.cancelled.done():
            self.cancelled = Future()


@contextmanager
def timed(loads: Iterable[RowGroupLoad]) -> Iterator[Timeline]:
    """Charge the time of this thread to row groups that it loads together, for the duration of the block."""
    timeline = Timeline()
    for load in loads:
        load.timeline = timeline
    with timeline.here():
        yield timeline

"""When and where row groups are made: the one owner of their lives in a process."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from time import perf_counter
from typing import Any

from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.errors import ConfigError
from dataload.rows.background_decoder.client import BackgroundDecoder, DemandSignal
from dataload.rows.background_decoder.worker import ROW_GROUPS_IN_FLIGHT
from dataload.rows.making.bunch_queue import BunchQueue, Loading
from dataload.rows.making.bunches import Made, load_together
from dataload.rows.row_group_life import Lives, RowGroupLife, State
from dataload.rows.row_groups import RowGroups
from dataload.runtime.counters import Counters, charged_to
from dataload.runtime.executor import LOOK_SECONDS, DaemonExecutor
from dataload.runtime.filemap import is_file_map
from dataload.runtime.memory_budget import ReservationCancelled
from dataload.runtime.priority import next_priority
from dataload.telemetry.row_group_ledger import Ledger
from dataload.telemetry.wait_timeline import CAUSES, waited
from dataload.world import World

LOADERS = IN_FLIGHT + ROW_GROUPS_IN_FLIGHT  # threads: a row group each, of this process and the background decoder
LOG_SECONDS = 60.0  # between two messages about a row group that a thread waits for
BACKGROUND_BYTES = 128 << 20  # of rows; decoding fewer takes no longer than starting a process

log = logging.getLogger(__name__)


class RowGroupScheduler:
    """The row groups of a process that are planned, being made, or cached and not open yet.

        planned → fetching → decoding → cached → mapped

    A planned row group is looked up in the cache. If it is missing, the background decoder makes it, unless a thread
    waits for row groups and this process has memory for one. This process makes the remaining row groups
    (`RowGroups.load`), in the order of the requests. A row group reserves memory while it is fetched and decoded.
    One process of the host makes it, and the others wait.

    Args:
        row_groups: The row groups.

    Attributes:
        ledger: The accounts of the row groups.
        sizes: Bytes of the row groups that were loaded, by row group.
        decoder: The background decoder, once `start` was called for a large or mapped dataset.
        is_cached: Whether the row group that was made last is in the cache, if processes share it.

    Notes:
        One thread at a time may call `start`, `request`, `opened` and `cancel`. Any thread may call the others.
    """

    def __init__(self, row_groups: RowGroups) -> None:
        self._row_groups = row_groups
        self._lives: OrderedDict[int, RowGroupLife] = OrderedDict()  # not mapped yet, the oldest request first
        self._threads = DaemonExecutor(LOADERS, "dataload-load")
        self._bunches = BunchQueue(row_groups, self._threads)
        self._mutex = threading.Lock()  # guards the memory of uncached row groups
        self._demand = DemandSignal()
        self._spent = Counters()  # seconds of loading, by cause
        self._started = False
        self.decoder: BackgroundDecoder | None = None
        self.ledger = Ledger()
        self.sizes: dict[int, int] = {}
        self.is_cached = True

    def start(self) -> None:
        """Prepare for prefetches: keep the cached row groups. A background process makes those of a large dataset."""
        if not self._started:
            self._started = True
            row_groups = self._row_groups
            for cache in row_groups.caches:
                self._threads.submit(cache.touch)
            is_long = row_groups.is_mapped or row_groups.num_bytes >= BACKGROUND_BYTES
            if row_groups.shared and is_long:
                self.decoder, self._demand = BackgroundDecoder(row_groups), DemandSignal()

    def request(
        self, group: int, most: int, *, awaited: bool = False, counted: bool = True, own_thread: bool = False
    ) -> RowGroupLife:
        """Return the life of a row group that is not mapped. Plan the row group if it has none.

        Args:
            group: The row group.
            most: Lives that are not mapped, at most. The blobs of the oldest are dropped; the cache still has them.
            awaited: Make it even if the memory for uncached row groups is used up, because the caller waits for it.
            counted: Charge the load to the row group's account in the ledger.
            own_thread: Load it in a new thread, because all others may be busy.
        """
        life = self._lives.get(group)
        if life is None or life.is_stale():
            self._lives.pop(group, None)  # A new life goes to the end of the queue.
            life = RowGroupLife(self.ledger.begin(group) if counted else None)
            life.awaited = awaited
            try:
                self._submit(group, life, own_thread=own_thread)
            except RuntimeError:
                life.cancel()
                raise
            self._lives[group] = life
        life.awaited |= awaited
        life.revive()
        while len(self._lives) > most:
            self._lives.popitem(last=False)
        return life

    def opened(self, group: int, life: RowGroupLife) -> None:
        """Note that the row group of a life is open. Its blobs belong to the open row groups now."""
        self._lives.pop(group, None)
        if life.state is State.CACHED:  # Another gather may have opened it before.
            life.enter(State.MAPPED)

    def cancel(self) -> None:
        """Cancel the lives that have not reserved memory yet. Loops that still need them request them again."""
        for group, life in list(self._lives.items()):
            if life.cancel():
                del self._lives[group]

    def contents_of(self, group: int, life: RowGroupLife, stop: Future[None] | None) -> list[memoryview] | None:
        """Wait for the life of a row group. Return its contents, or None if the end of another loop cancelled it.

        Raises:
            CancelledError: `stop` was done first.
        """
        contents = life.contents
        if not contents.done():
            since = perf_counter()
            log_at = since + LOG_SECONDS
            # Waiters of a cancelled future are notified only when a thread dequeues it; `cancelled` notifies at once.
            first: list[Future[Any]] = [contents, life.cancelled] if stop is None else [contents, life.cancelled, stop]
            with self._demand.waiting():
                # As in `awaited`, the wait is cut into short ones, so that Ctrl-C interrupts it.
                while not wait(first, LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
                    if (now := perf_counter()) >= log_at:
                        cache, number = self._row_groups.of(group)
                        _log_wait(cache.describe(number), life.state, now - since)
                        log_at = now + LOG_SECONDS
            waited(since, life.timeline, instead=self.usual_cause())
            if stop is not None and stop.done():
                raise CancelledError
        return contents.result() if contents.done() and not contents.cancelled() else None

    def usual_cause(self) -> str:
        """Return the cause of most of the loading time."""
        spent = Counter(self._spent.snapshot())
        if self.decoder is not None:
            spent += Counter(self.decoder.spent.snapshot())
        known = {cause: seconds for cause, seconds in spent.items() if cause in CAUSES}
        return max(known, key=known.__getitem__, default="origin")

    def states(self) -> dict[str, int]:
        """Return the number of row groups that are not open, by state."""
        states = Counter(life.state for life in self._lives.copy().values())
        return {state.value: states[state] for state in (State.PLANNED, State.FETCHING, State.DECODING, State.CACHED)}

    def _submit(self, group: int, life: RowGroupLife, *, own_thread: bool) -> None:
        """Let a thread load a row group."""
        if own_thread:
            with suppress(RuntimeError):  # At the process's limit of threads, a shared thread loads it later.
                DaemonExecutor(1, "dataload-load-now").submit(self._load, group, life)
                return
        if not self._bunches.add(group, life, Loading(self._made_together, self._finish, self._load_alone)):
            self._threads.submit(self._load, group, life).add_done_callback(life.finish_with)

    def _made_together(self, lives: Lives, late: Callable[[], None]) -> Iterator[tuple[int, Made]]:
        """Make the row groups of a bunch, unless the first of them is cached. See `Loading`."""
        if self._is_for_decoder:
            return
        first, life = next(iter(lives.items()))
        with charged_to(life.account):
            found = self._find(first)
        if found is not None:
            life.hit()
            yield first, found
            return
        since, timeline = perf_counter(), life.timeline  # Another thread may load the first one alone.
        allowed = {group: life for group, life in lives.items() if self._reserve_uncached(group, life)}
        yield from ((group, ReservationCancelled()) for group in lives.keys() - allowed.keys())
        if allowed:
            yield from load_together(self._row_groups, allowed, late)
        self._spent.add(**timeline.seconds(since, perf_counter()))

    def _load_alone(self, group: int, life: RowGroupLife) -> None:
        self._threads.submit(self._run, group, life).add_done_callback(life.finish_with)

    def _load(self, group: int, life: RowGroupLife) -> None:
        """Load a row group, unless its life was cancelled."""
        if life.begin():
            self._run(group, life)

    def _run(self, group: int, life: RowGroupLife) -> None:
        try:
            with life.charged(), next_priority():
                found = self._find(group)
                if found is None:
                    found = self._made(group, life)
                else:
                    life.hit()
        except BaseException as error:  # noqa: BLE001 (raised where the row group is awaited)
            self._finish(group, life, error)
        else:
            self._finish(group, life, found)

    def _finish(self, group: int, life: RowGroupLife, found: list[memoryview] | BaseException) -> None:
        uncached = 0
        if not isinstance(found, BaseException):
            self.sizes[group] = sum(map(len, found))
            if self._row_groups.shared and not life.is_hit:
                uncached = sum(len(content) for content in found if not is_file_map(content))
                self.is_cached = not uncached
        life.uncached_bytes = uncached
        life.finish(found)

    def _reserve_uncached(self, group: int, life: RowGroupLife) -> bool:
        """Reserve memory for a row group, if the cache keeps none. Return whether to make it now.

        Most uncached row groups are made when a batch needs them.
        """
        with self._mutex:
            if self.is_cached or life.awaited:
                return True
            held, size = sum(other.uncached_bytes for other in self._lives.copy().values()), self._bytes_of(group)
            if held and held + size > self._row_groups.memory.held.total:
                return False
            life.uncached_bytes = size
            return True

    def _made(self, group: int, life: RowGroupLife) -> list[memoryview]:
        if not self._reserve_uncached(group, life):
            raise ReservationCancelled
        since = perf_counter()
        if self.decoder is not None and self._is_for_decoder:
            self.decoder.begin()
            self.decoder.make(group, self._demand, life.account)
            if (contents := self._find(group)) is not None:
                life.enter(State.CACHED)
                return contents
        cache, number = self._row_groups.of(group)
        contents = cache.load(number, life)
        self._spent.add(**life.timeline.seconds(since, perf_counter()))
        return contents

    def _find(self, group: int) -> list[memoryview] | None:
        cache, number = self._row_groups.of(group)
        return cache.find(number)

    def _bytes_of(self, group: int) -> int:
        cache, number = self._row_groups.of(group)
        return cache.bytes_of(number)

    @property
    def _is_for_decoder(self) -> bool:
        """Whether the background decoder makes the next row group, if it can."""
        # Another process takes no work from a loop that waits for row groups most of the time. But a function of the
        # user may hold the interpreter lock, and the other process has one of its own.
        is_useful = self._row_groups.is_mapped or not self._demand.mostly_waiting
        return self.decoder is not None and (self.decoder.started or is_useful)


def _log_wait(what: str, state: State, seconds: float) -> None:
    rank = ""
    with suppress(ConfigError):  # Nothing says which rank this is.
        rank = f"rank {World.detect().rank} "
    log.warning("%shas waited %.0f s for %s (%s)", rank, seconds, what, state.value)

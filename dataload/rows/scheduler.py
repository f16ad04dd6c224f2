"""When and where row groups are made: the one owner of their loads in a process."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from enum import Enum
from time import perf_counter
from typing import Any

from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.errors import ConfigError
from dataload.rows.background_decoder.client import BackgroundDecoder, DemandSignal
from dataload.rows.background_decoder.worker import ROW_GROUPS_IN_FLIGHT
from dataload.rows.making import pipeline
from dataload.rows.making.load_queue import Leave, LoadQueue, Report, Result, Stalled, Work
from dataload.rows.row_group_load import RowGroupLoad, State
from dataload.rows.row_groups import RowGroups
from dataload.runtime.counters import Counters
from dataload.runtime.executor import LOOK_SECONDS, DaemonExecutor
from dataload.runtime.filemap import is_file_map
from dataload.runtime.memory_budget import ReservationCancelled
from dataload.telemetry.row_group_accounts import Accounts
from dataload.telemetry.stalls import is_watching
from dataload.telemetry.wait_timeline import CAUSES, waited
from dataload.world import World

LOADERS = IN_FLIGHT + ROW_GROUPS_IN_FLIGHT  # threads: a row group each, of this process and the background decoder
LOG_SECONDS = 60.0  # between two messages about a row group that a thread waits for
BACKGROUND_BYTES = 128 << 20  # of rows; decoding fewer takes no longer than starting a process

log = logging.getLogger(__name__)


class Place(Enum):
    """Where a row group is made."""

    HERE = "here"  # in this process, now
    DECODER = "decoder"  # in the background decoder; here if it cannot
    ON_DEMAND = "on demand"  # here, once a batch needs it


def choose(
    *,
    is_kept: bool,
    is_awaited: bool,
    fits: bool,
    has_decoder: bool,
    has_started: bool,
    is_mapped: bool,
    is_waiting: bool,
) -> Place:
    """Return where to make a row group that is not cached.

    Most row groups that the cache does not keep are made when a batch needs them. A background decoder is not started
    beside a loop that waits most of the time, and would share its processors. But a function of the user may hold the
    interpreter lock, and the decoder has one of its own.

    Args:
        is_kept: Whether the cache keeps the blobs that are made.
        is_awaited: Whether a batch needs the row group now.
        fits: Whether its blobs fit into the memory for those that the cache does not keep.
        has_decoder: Whether there is a background decoder.
        has_started: Whether it has started.
        is_mapped: Whether a function of the user makes rows.
        is_waiting: Whether the loop waits for row groups most of the time.
    """
    if not (is_kept or is_awaited or fits):
        return Place.ON_DEMAND
    if has_decoder and (has_started or is_mapped or not is_waiting):
        return Place.DECODER
    return Place.HERE


class RowGroupScheduler:
    """The row groups of a process that are planned, being made, or cached and not open yet.

        planned → fetching → decoding → cached → mapped

    A planned row group is looked up in the cache. If it is missing, `choose` decides where it is made. The background
    decoder leaves it to this process if a thread waits for row groups and this process has memory for one. This process
    makes row groups by `pipeline.make`, in the order of the requests. A row group reserves memory while it is fetched
    and decoded. One process of the host makes it, and the others wait.

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
        self._loads: OrderedDict[int, RowGroupLoad] = OrderedDict()  # not mapped yet, the oldest request first
        self._threads = DaemonExecutor(LOADERS, "dataload-load")
        self._queue = LoadQueue(self._threads, row_groups.memory)
        self._mutex = threading.Lock()  # guards the memory of uncached row groups
        self._demand = DemandSignal()
        self._awaited: list[RowGroupLoad] = []  # Threads wait for these now.
        self._spent = Counters()  # seconds of loading, by cause
        self._started = False
        self.decoder: BackgroundDecoder | None = None
        self.ledger = Accounts()
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
    ) -> RowGroupLoad:
        """Return the load of a row group that is not mapped. Plan the row group if it has none.

        Args:
            group: The row group.
            most: Loads that are not mapped, at most. The blobs of the oldest are dropped; the cache still has them.
            awaited: Make it even if the memory for uncached row groups is used up, because the caller waits for it.
            counted: Charge the load to the row group's account in the ledger.
            own_thread: Load it in a new thread, because all others may be busy.
        """
        load = self._loads.get(group)
        if load is None or load.is_stale():
            self._loads.pop(group, None)  # A new load goes to the end of the queue.
            load = RowGroupLoad(group, *self._row_groups.of(group), self.ledger.begin(group) if counted else None)
            load.awaited = awaited
            try:
                self._submit(load, own_thread=own_thread)
            except RuntimeError:
                load.cancel()
                raise
            self._loads[group] = load
        load.awaited |= awaited
        load.revive()
        while len(self._loads) > most:
            self._loads.popitem(last=False)
        return load

    def opened(self, load: RowGroupLoad) -> None:
        """Note that the row group of a load is open. Its blobs belong to the open row groups now."""
        self._loads.pop(load.group, None)

    def cancel(self) -> None:
        """Cancel the loads that have not reserved memory yet. Loops that still need them request them again."""
        for group, load in list(self._loads.items()):
            if load.cancel():
                del self._loads[group]

    def contents_of(self, load: RowGroupLoad, stop: Future[None] | None) -> list[memoryview] | None:
        """Wait for a load. Return the contents of the row group, or None if the end of another loop cancelled it.

        Raises:
            CancelledError: `stop` was done first.
        """
        contents = load.contents
        if not contents.done():
            since = perf_counter()
            log_at = since + LOG_SECONDS
            # Waiters of a cancelled future are notified only when a thread dequeues it; `cancelled` notifies at once.
            first: list[Future[Any]] = [contents, load.cancelled] if stop is None else [contents, load.cancelled, stop]
            self._awaited.append(load)
            try:
                with self._demand.waiting():
                    # The wait is cut into short ones, so that Ctrl-C interrupts it.
                    while not wait(first, LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
                        if (now := perf_counter()) >= log_at and not is_watching():
                            _log_wait(load.cache.describe(load.number), load.state, now - since)
                            log_at = now + LOG_SECONDS
            finally:
                self._awaited.remove(load)
            waited(since, load.timeline, instead=self.usual_cause())
            if stop is not None and stop.done():
                raise CancelledError
        return contents.result() if contents.done() and not contents.cancelled() else None

    @property
    def awaited_load(self) -> RowGroupLoad | None:
        """A load that a thread waits for now; otherwise the oldest one that is not done; None: all are."""
        loads = [*self._awaited, *self._loads.copy().values()]
        return next((load for load in loads if not load.contents.done()), None)

    def usual_cause(self) -> str:
        """Return the cause of most of the time in which row groups were made, here or by the background decoder.

        A process that has only found them on the disk, because another one makes them, knows nothing of that.
        """
        spent = Counter(self._spent.snapshot())
        if self.decoder is not None:
            spent += Counter(self.decoder.spent.snapshot())
        known = {cause: seconds for cause, seconds in spent.items() if cause in CAUSES and cause != "disk"}
        return max(known, key=known.__getitem__, default="origin")

    def states(self) -> dict[str, int]:
        """Return the number of row groups that are not open, by state."""
        states = Counter(load.state for load in self._loads.copy().values())
        return {state.value: states[state] for state in (State.PLANNED, State.FETCHING, State.DECODING, State.CACHED)}

    def _submit(self, load: RowGroupLoad, *, own_thread: bool) -> None:
        """Let a thread load a row group."""
        work = Work(self._load, self._finish)
        if own_thread:
            with suppress(RuntimeError):  # At the process's limit of threads, a shared thread loads it later.
                self._queue.add_to(DaemonExecutor(1, "dataload-load-now"), load, work)
                return
        self._queue.add(load, work)

    def _load(self, loads: Sequence[RowGroupLoad], report: Report, leave: Leave, stalled: Stalled) -> None:
        """Find row groups in the cache, or make them. See `load_queue.Run`."""
        first, *others = loads
        if (found := first.find()) is not None:
            first.hit()
            report(first, found)
            for load in others:  # They may be cached, too: let a thread look up each.
                leave(load)
            return
        since, timeline = perf_counter(), first.timeline  # Another thread may load the first one alone.
        here = []
        for load in loads:
            place = self._place(load)
            if place is Place.ON_DEMAND:
                report(load, ReservationCancelled())
            elif place is Place.DECODER and others:
                leave(load)  # A thread waits for each.
            elif place is Place.DECODER and (made := self._made_by_decoder(load)) is not None:
                load.state = State.CACHED
                report(load, made)
            else:
                here.append(load)
        if here:
            pipeline.make(here, report, leave, stalled)
            self._spent.add(**timeline.seconds(since, perf_counter()))

    def _place(self, load: RowGroupLoad) -> Place:
        """Choose where to make a row group. Reserve memory for one that is made now and not kept."""
        decoder, memory = self.decoder, self._row_groups.memory
        with self._mutex:
            held = 0 if self.is_cached else sum(each.uncached_bytes for each in self._loads.copy().values())
            size = 0 if self.is_cached else load.cache.bytes_of(load.number)
            place = choose(
                is_kept=self.is_cached,
                is_awaited=load.awaited,
                fits=not held or held + size <= memory.held.total,
                has_decoder=decoder is not None,
                has_started=decoder is not None and decoder.started,
                is_mapped=self._row_groups.is_mapped,
                is_waiting=decoder is not None and self._demand.mostly_waiting,
            )
            if not load.awaited and place is not Place.ON_DEMAND:
                load.uncached_bytes = size
        return place

    def _made_by_decoder(self, load: RowGroupLoad) -> list[memoryview] | None:
        """Let the background decoder make a row group. Return its blobs, or None: this process makes it."""
        assert self.decoder is not None
        self.decoder.begin()
        self.decoder.make(load.group, self._demand, load.account)
        return load.find()

    def _finish(self, load: RowGroupLoad, result: Result) -> None:
        uncached = 0
        if not isinstance(result, BaseException):
            self.sizes[load.group] = sum(map(len, result))
            if self._row_groups.shared and not load.is_hit:
                uncached = sum(len(content) for content in result if not is_file_map(content))
                self.is_cached = not uncached
        load.uncached_bytes = uncached
        load.finish(result)


def _log_wait(what: str, state: State, seconds: float) -> None:
    rank = ""
    with suppress(ConfigError):  # Nothing says which rank this is.
        rank = f"rank {World.detect().rank} "
    log.warning("%shas waited %.0f s for %s (%s)", rank, seconds, what, state.value)

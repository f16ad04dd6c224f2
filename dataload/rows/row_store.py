"""Rows by their numbers: decoded once a host, gathered from ever after; what every shuffled epoch reads."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks
from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.formats.schema import Layout
from dataload.rows.arrow_decode import Array
from dataload.rows.background_decoder import AT_ONCE, BackgroundDecoder, DemandSignal
from dataload.rows.open_row_groups import OpenRowGroups
from dataload.rows.row_block import Records
from dataload.rows.row_group_cache import RowGroupCache
from dataload.runtime.counters import Counters, charged_to
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.filemap import max_maps
from dataload.runtime.forks import ForkAware
from dataload.runtime.memory_budget import ReservationCancelled
from dataload.samplers.interval_index import IntervalIndex
from dataload.telemetry.row_group_ledger import Ledger
from dataload.telemetry.wait_timeline import CAUSES, Timeline, waited

LOADERS = IN_FLIGHT + AT_ONCE  # as many row groups as this process, and the one that fills, are at together
FILLED_BYTES = 128 << 20  # of rows: to start a process takes as long as to decode some of them
MAPS_OF_A_BLOB = 4  # its slot, what is empty behind that, its heap; and some for others

T = TypeVar("T")


@dataclass(eq=False)
class _Asked:
    """A row group that is being loaded.

    timeline: of the thread that loads it. account: see `Ledger`. given_up: done when a loop has ended, and no loop has
    asked for the row group since. contents: None where the thread gave up before there was room for the row group.
    """

    timeline: Timeline
    account: Counters
    given_up: Future[None] = field(default_factory=Future)
    contents: Future[list[memoryview] | None] = field(init=False)

    @property
    def gone(self) -> bool:
        """Whether it has to be asked for anew."""
        ended = self.contents
        return ended.cancelled() or (ended.done() and (ended.exception() is not None or ended.result() is None))

    def unwanted(self) -> bool:
        return self.given_up.done()

    def give_up(self) -> bool:
        """Tell the loading thread, and the loops that wait; whether no thread had begun to load the row group."""
        cancelled = self.contents.cancel()
        if cancelled:
            self.account.add(under_way=-1)
        if not self.given_up.done():
            self.given_up.set_result(None)
        return cancelled


class RowStore(ForkAware):
    """The chosen columns of a dataset, by row number.

    capacity: how many row groups this process has open, those last asked for: they are asked for in the order in which
    they are needed, and done with in that order. ahead: how many of them are for what no batch has drawn on yet.
    further: how many may be loaded beside them, of those that do not stay in the cache.

    Notes: may be read from any thread; a row group is asked for once however many want it at a time. A forked child
    starts with nothing open, and so does a pickled copy.
    """

    def __init__(
        self, manifest: Manifest, columns: Sequence[str], blocks: Blocks, capacity: int, fill_null: Any = None
    ) -> None:
        self.capacity = capacity
        self.ahead = capacity // 2
        self.further = 0
        self._serves = False
        self.blobs = RowGroupCache(manifest, columns, blocks, fill_null)
        self._settings = manifest, columns, blocks
        self._fill_null = fill_null
        self._group_of_blob = np.repeat(np.arange(len(manifest.row_groups)), np.diff(self.blobs.group_starts))
        self._lookup = IntervalIndex(self.blobs.row_starts)
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._asked: OrderedDict[int, _Asked] = OrderedDict()  # and not on the shelf yet
        self._threads: DaemonExecutor | None = None
        self._haste = DemandSignal()
        self._spent = Counters()  # seconds of loading, by cause
        self._filler: BackgroundDecoder | None = None
        self._looks_ahead = False
        self._shelf: OpenRowGroups | None = None
        self._sizes: dict[int, int] = {}  # bytes of the row groups that were loaded
        self.ledger = Ledger()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowStore, (*self._settings, self.capacity, self._fill_null)

    def serve(self, drawn_on: int, ahead: int, further: int = 0) -> None:
        """Have room for the row groups that are drawn on at a time, and for those that are loaded ahead of that.

        As many as the largest of its loaders wants, once there is one.
        """
        self.capacity = max(drawn_on + ahead, self.capacity if self._serves else 0)
        self.ahead = max(ahead, self.ahead if self._serves else 0)
        self.further = max(further, self.further)
        self._serves = True

    @property
    def layout(self) -> Layout:
        return self.blobs.layout

    @property
    def row_bytes(self) -> int:
        """About how many bytes a row takes, on average."""
        return max(1, self.blobs.num_bytes // max(1, int(self.blobs.row_starts[-1])))

    def gather(self, rows: Array, stop: Future[None] | None = None, opened: dict[int, bool] | None = None) -> Records:
        """The rows of these numbers (int64 [n], counted in file order), in the order given.

        stop: once it is done, what is not there yet is not waited for. opened: gets, for each row group that the rows
        belong to, whether this gather had to open it; None: loading is charged to no account of the ledger.

        Raises OriginError, DataError, CancelledError.
        """
        blobs = self._blobs_of(rows)
        needed: list[int] = []
        if opened is not None:
            opened.update(dict.fromkeys(self._owners(blobs), False))
        loaded: dict[int, list[memoryview]] = {}
        given_up: set[int] = set()
        while True:  # Other threads may let go of what this one has opened.
            with self._mutex:
                shelf = self._shelf_for(len(needed))
                for group, contents in loaded.items():
                    shelf.put(group, contents, keep=needed)
                    self._asked.pop(group, None)
                found = shelf.take(rows, blobs)
                if found is not None:
                    return found
                if stop is not None and stop.done():  # Nothing is asked for after `forget`.
                    raise CancelledError
                needed = self._owners(blobs) if opened is None else list(opened)
                missing = [group for group in needed if group not in shelf]
                asked = {
                    group: self._ask_for(group, counted=opened is not None, at_once=group in given_up)
                    for group in missing
                }
            if opened is not None:
                opened.update(dict.fromkeys(missing, True))
            loaded = {group: had for group, one in asked.items() if (had := self._loaded(one, stop)) is not None}
            given_up = asked.keys() - loaded.keys()

    def size_of(self, group: int) -> int:
        """Return the bytes of a row group's records: exactly, where this process has loaded it."""
        return self._sizes.get(group) or self.blobs.bytes_of(group)

    def forget(self) -> None:
        """Do not begin to load what was asked for and has no room yet, unless somebody is busy here just now.

        Notes: another loop that waits for it is told, and takes it over. The loop that ends has set its own `stop`
        before, so that it does not. This never waits. The garbage collector may come here, in a thread that is.
        """
        if self._mutex.acquire(blocking=False):
            try:
                for group, asked in list(self._asked.items()):
                    if asked.give_up():
                        del self._asked[group]
            finally:
                self._mutex.release()

    def _owners(self, blobs: Array) -> list[int]:
        """Return the row groups that these blobs belong to, each once, in file order."""
        touched = np.zeros(len(self._group_of_blob), np.bool_)
        touched[blobs] = True
        owners: list[int] = np.unique(self._group_of_blob[touched]).tolist()
        return owners

    def prefetch(self, groups: Iterable[int]) -> None:
        """Start loading these row groups, in this order.

        Where there is much to be made, that is left to a process of its own.
        """
        with self._mutex:
            if not self._looks_ahead:
                self._looks_ahead = True
                self._run(self.blobs.lease)
                if self.blobs.shared and self.blobs.num_bytes >= FILLED_BYTES:
                    self._filler = BackgroundDecoder(self.blobs)
            for group in groups:
                if self._shelf is None or group not in self._shelf:
                    self._ask_for(group)

    def _blobs_of(self, rows: Array) -> Array:
        return self._lookup.pieces(rows)

    def _shelf_for(self, groups: int) -> OpenRowGroups:
        """A shelf for so many row groups at a time, at least. Raises ConfigError when the system has not the maps."""
        blobs = self.blobs
        most = max_maps() // (MAPS_OF_A_BLOB * blobs.most_of_a_group)
        if groups > most:
            raise ConfigError(
                f"a gather from {groups} row groups takes more maps of files than the {max_maps()} that a process may "
                "have: raise vm.max_map_count (sysctl), or take a smaller batch or window"
            )
        needed = max(min(self.capacity, most), groups)
        if self._shelf is None or self._shelf.capacity < needed:
            self._shelf = OpenRowGroups(needed, blobs.group_starts, blobs.row_starts, blobs.layout)
        return self._shelf

    def _ask_for(self, group: int, *, counted: bool = True, at_once: bool = False) -> _Asked:
        """Have a row group loaded.

        counted: in the ledger. at_once: by a thread of its own, for all others may be busy.
        """
        asked = self._asked.get(group)
        if asked is None or asked.gone:
            self._asked.pop(group, None)  # Its place is that of when it is asked for.
            asked = _Asked(Timeline(), self.ledger.begin(group) if counted else Counters())
            try:
                asked.contents = self._start(group, asked, at_once=at_once)
            except RuntimeError:
                asked.account.add(under_way=-1)
                raise
            self._asked[group] = asked
        if asked.given_up.done():
            asked.given_up = Future()
        while len(self._asked) > self.capacity + self.further:
            self._asked.popitem(last=False)
        return asked

    def _start(self, group: int, asked: _Asked, *, at_once: bool) -> Future[list[memoryview] | None]:
        if at_once:
            with suppress(RuntimeError):  # The process may have no more threads; a shared one then loads it later.
                return DaemonExecutor(1, "dataload-load-at-once").submit(self._load, group, asked)
        return self._run(self._load, group, asked)

    def _run(self, call: Callable[..., T], *args: Any) -> Future[T]:
        if self._threads is None:
            self._threads = DaemonExecutor(LOADERS, "dataload-load")
        return self._threads.submit(call, *args)

    def _load(self, group: int, asked: _Asked) -> list[memoryview] | None:
        try:
            with asked.timeline.here():
                contents = self.blobs.find(group)
                if contents is None:
                    since = perf_counter()
                    with charged_to(asked.account):
                        if self._filler is not None:
                            self._filler.make(group, self._haste, asked.account)
                        contents = self.blobs.load(group, asked.unwanted)
                    self._spent.add(**asked.timeline.seconds(since, perf_counter()))
                self._sizes[group] = sum(map(len, contents))
                return contents
        except ReservationCancelled:
            return None
        finally:
            asked.account.add(under_way=-1)

    def _loaded(self, asked: _Asked, stop: Future[None] | None) -> list[memoryview] | None:
        """What was asked for; None when it was given up because another loop over the same rows has ended."""
        contents, given_up = asked.contents, asked.given_up
        if not contents.done():
            since = perf_counter()
            # A cancelled future tells its waiters only when a thread takes it from the queue; `given_up` tells at once.
            first: list[Future[Any]] = [contents, given_up] if stop is None else [contents, given_up, stop]
            with self._haste.waiting():  # There is no step to be spared.
                wait(first, return_when=FIRST_COMPLETED)
            waited(since, asked.timeline, instead=self.usual_cause())
            if stop is not None and stop.done():
                raise CancelledError
        return contents.result() if contents.done() and not contents.cancelled() else None

    def usual_cause(self) -> str:
        """What loading takes most of its time for."""
        spent = Counter(self._spent.snapshot())
        if self._filler is not None:
            spent += Counter(self._filler.spent.snapshot())
        known = {cause: seconds for cause, seconds in spent.items() if cause in CAUSES}
        return max(known, key=known.__getitem__, default="origin")

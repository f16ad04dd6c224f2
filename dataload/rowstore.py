"""Rows by their numbers: decoded once a host, gathered from ever after; what every shuffled epoch reads."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from dataload.allowance import UnwantedError
from dataload.cache.blocks import IN_FLIGHT, Blocks
from dataload.cache.forks import ForkAware
from dataload.cache.maps import max_maps
from dataload.cache.threads import Threads
from dataload.columns import Array
from dataload.errors import ConfigError
from dataload.filler import AT_ONCE, Filler, Haste
from dataload.layout import Layout
from dataload.manifest import Manifest
from dataload.metrics import Counters
from dataload.records import Records
from dataload.rowblobs import RowBlobs
from dataload.samplers.lookup import Lookup
from dataload.shelf import Shelf
from dataload.timeline import CAUSES, Timeline, waited

LOADERS = IN_FLIGHT + AT_ONCE  # as many row groups as this process, and the one that fills, are at together
FILLED_BYTES = 128 << 20  # of rows: to start a process takes as long as to decode some of them
MAPS_OF_A_BLOB = 4  # its slot, what is empty behind that, its heap; and some for others

T = TypeVar("T")


@dataclass(frozen=True)
class _Asked:
    """A row group that is being loaded. contents: None where that was given up; timeline: of the thread that does.

    unwanted: set when a loop has ended, and no other has asked for it since.
    """

    contents: Future[list[memoryview] | None]
    timeline: Timeline
    unwanted: threading.Event

    @property
    def gone(self) -> bool:
        """Whether it has to be asked for anew."""
        ended = self.contents
        return ended.cancelled() or (ended.done() and (ended.exception() is not None or ended.result() is None))


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
        self.blobs = RowBlobs(manifest, columns, blocks, fill_null)
        self._settings = manifest, columns, blocks
        self._fill_null = fill_null
        self._group_of_blob = np.repeat(np.arange(len(manifest.row_groups)), np.diff(self.blobs.group_starts))
        self._lookup = Lookup(self.blobs.row_starts)
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._asked: OrderedDict[int, _Asked] = OrderedDict()  # and not on the shelf yet
        self._threads: Threads | None = None
        self._haste = Haste()
        self._spent = Counters()  # seconds of loading, by cause
        self._filler: Filler | None = None
        self._looks_ahead = False
        self._shelf: Shelf | None = None

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

    def gather(self, rows: Array, stop: Future[None] | None = None) -> Records:
        """The rows of these numbers (int64 [n], counted in file order), in the order given.

        stop: once it is done, what is not there yet is not waited for. Raises OriginError, DataError, CancelledError.
        """
        blobs = self._blobs_of(rows)
        needed: list[int] = []
        loaded: dict[int, list[memoryview]] = {}
        while True:  # Other threads may let go of what this one has opened.
            with self._mutex:
                shelf = self._shelf_for(len(needed))
                for group, contents in loaded.items():
                    shelf.put(group, contents, keep=needed)
                    self._asked.pop(group, None)
                found = shelf.take(rows, blobs)
                if found is not None:
                    return found
                needed = self._owners(rows)
                asked = {group: self._ask_for(group) for group in needed if group not in shelf}
            loaded = {group: had for group, one in asked.items() if (had := self._loaded(one, stop)) is not None}

    def counts(self) -> Counter[str]:
        """What the caches of this process, and of the one that fills for it, have counted; see `LoaderStats`."""
        return Counter(self.blobs.counts()) + (Counter() if self._filler is None else self._filler.counts())

    def forget(self) -> None:
        """Do not begin to load what was asked for and has no room yet, unless somebody is busy here just now.

        Notes: another loop that waits for it asks anew. This never waits. The garbage collector may come here, in a
        thread that is.
        """
        if self._mutex.acquire(blocking=False):
            try:
                for group, asked in list(self._asked.items()):
                    asked.unwanted.set()
                    if asked.contents.cancel():
                        del self._asked[group]
            finally:
                self._mutex.release()

    def _owners(self, rows: Array) -> list[int]:
        """The row groups that these rows belong to, each once, in file order."""
        touched = np.zeros(len(self._group_of_blob), np.bool_)
        touched[self._blobs_of(rows)] = True
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
                    self._filler = Filler(self.blobs)
            for group in groups:
                if self._shelf is None or group not in self._shelf:
                    self._ask_for(group)

    def _blobs_of(self, rows: Array) -> Array:
        return self._lookup.pieces(rows)

    def _shelf_for(self, groups: int) -> Shelf:
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
            self._shelf = Shelf(needed, blobs.group_starts, blobs.row_starts, blobs.layout)
        return self._shelf

    def _ask_for(self, group: int) -> _Asked:
        asked = self._asked.get(group)
        if asked is None or asked.gone:
            self._asked.pop(group, None)  # Its place is that of when it is asked for.
            timeline, unwanted = Timeline(), threading.Event()
            loading = self._run(self._load, group, timeline, unwanted.is_set)
            asked = self._asked[group] = _Asked(loading, timeline, unwanted)
        asked.unwanted.clear()
        while len(self._asked) > self.capacity + self.further:
            self._asked.popitem(last=False)
        return asked

    def _run(self, call: Callable[..., T], *args: Any) -> Future[T]:
        if self._threads is None:
            self._threads = Threads(LOADERS, "dataload-load")
        return self._threads.submit(call, *args)

    def _load(self, group: int, timeline: Timeline, unwanted: Callable[[], bool]) -> list[memoryview] | None:
        with timeline.here():
            contents = self.blobs.find(group)
            if contents is None:
                since = perf_counter()
                if self._filler is not None:
                    self._filler.make(group, self._haste)
                try:
                    contents = self.blobs.load(group, unwanted)
                except UnwantedError:
                    return None
                self._spent.add(**timeline.seconds(since, perf_counter()))
        return contents

    def _loaded(self, asked: _Asked, stop: Future[None] | None) -> list[memoryview] | None:
        """What was asked for; None when it was given up because another loop over the same rows has ended."""
        if not asked.contents.done():
            since = perf_counter()
            either: list[Future[Any]] = [asked.contents] if stop is None else [asked.contents, stop]
            with self._haste.waiting():  # There is no step to be spared.
                wait(either, return_when=FIRST_COMPLETED)
            waited(since, asked.timeline, instead=self.usual_cause())
            if stop is not None and stop.done():
                raise CancelledError
        return None if asked.contents.cancelled() else asked.contents.result()

    def usual_cause(self) -> str:
        """What loading takes most of its time for."""
        spent = Counter(self._spent.snapshot())
        if self._filler is not None:
            spent += Counter(self._filler.spent.snapshot())
        known = {cause: seconds for cause, seconds in spent.items() if cause in CAUSES}
        return max(known, key=known.__getitem__, default="origin")

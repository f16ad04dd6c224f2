"""Access to rows by number: each host decodes a row group once, and every shuffled epoch gathers from the result."""

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
from dataload.rows.background_decoder.client import BackgroundDecoder, DemandSignal
from dataload.rows.background_decoder.worker import ROW_GROUPS_IN_FLIGHT
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

LOADERS = IN_FLIGHT + ROW_GROUPS_IN_FLIGHT  # threads: a row group each, of this process and the background decoder
BACKGROUND_BYTES = 128 << 20  # of rows; decoding fewer takes no longer than starting a process
MAPS_PER_BLOB = 4  # its slot, the empty end of the slot, its heap; and a share of the other maps

T = TypeVar("T")


@dataclass(eq=False)
class _Load:
    """A row group that is being loaded.

    Attributes:
        timeline: Timeline of the thread that loads it.
        account: Account of the row group, see `Ledger`.
        cancelled: Done once a loop has ended and no loop has requested the row group since.
        contents: The blobs; None if the load was cancelled before memory was reserved for it.
    """

    timeline: Timeline
    account: Counters
    cancelled: Future[None] = field(default_factory=Future)
    contents: Future[list[memoryview] | None] = field(init=False)

    @property
    def stale(self) -> bool:
        """Whether the load ended without contents, so that the next request must start another."""
        contents = self.contents
        return contents.cancelled() or (
            contents.done() and (contents.exception() is not None or contents.result() is None)
        )

    def is_cancelled(self) -> bool:
        return self.cancelled.done()

    def cancel(self) -> None:
        """Notify the loading thread and the loops that wait."""
        if self.contents.cancel():  # No thread had started it.
            self.account.add(under_way=-1)
        if not self.cancelled.done():
            self.cancelled.set_result(None)


class RowStore(ForkAware):
    """The chosen columns of a dataset, by row number.

    Args:
        manifest: The dataset.
        columns: Names of the columns.
        blocks: Reader of the dataset's files, and the cache.
        capacity: Row groups that this process keeps open. The row group that was opened first is closed first, because
            row groups are requested and finished in the order of need.
        fill_null: As for `RowGroupCache`.
        rank_memory: As for `RowGroupCache`; None: its default.

    Attributes:
        capacity: As above; `serve` raises it.
        ahead: How many of the open row groups may be prefetched before a batch needs them.
        further: How many row groups that do not stay in the cache may be prefetched besides.
        blobs: The cached row groups.
        ledger: The accounts of the row groups.

    Notes:
        Any thread may read. Concurrent requests for a row group share one load. A forked child and a pickled copy
        start with no open row groups.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str],
        blocks: Blocks,
        capacity: int,
        fill_null: Any = None,
        rank_memory: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.ahead = capacity // 2
        self.further = 0
        self._has_loader = False
        self.blobs = RowGroupCache(manifest, columns, blocks, fill_null)
        if rank_memory is not None:
            self.blobs.use_memory(rank_memory)
        self._settings = manifest, columns, blocks
        self._fill_null = fill_null
        plan = self.blobs.plan
        self._group_of_blob = np.repeat(np.arange(len(manifest.row_groups)), np.diff(plan.group_starts))
        self._blob_index = IntervalIndex(plan.row_starts)
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Reset locks, threads and open row groups."""
        self._mutex = threading.Lock()
        self._pending: OrderedDict[int, _Load] = OrderedDict()  # requested and not open yet
        self._threads: DaemonExecutor | None = None
        self._demand = DemandSignal()
        self._spent = Counters()  # seconds of loading, by cause
        self._decoder: BackgroundDecoder | None = None
        self._prefetches = False
        self._open: OpenRowGroups | None = None
        self._sizes: dict[int, int] = {}  # bytes of the row groups that were loaded
        self.ledger = Ledger()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowStore, (*self._settings, self.capacity, self._fill_null, self.blobs.rank_memory)

    def serve(self, drawn_on: int, ahead: int, further: int = 0) -> None:
        """Set the capacity for a loader. With several loaders, the largest needs apply.

        Args:
            drawn_on: Row groups that the loader's batches need at a time.
            ahead: Row groups to prefetch before a batch needs them.
            further: Row groups to prefetch besides, of those that do not stay in the cache.
        """
        self.capacity = max(drawn_on + ahead, self.capacity if self._has_loader else 0)
        self.ahead = max(ahead, self.ahead if self._has_loader else 0)
        self.further = max(further, self.further)
        self._has_loader = True

    @property
    def layout(self) -> Layout:
        """Layout of a record."""
        return self.blobs.plan.layout

    @property
    def row_bytes(self) -> int:
        """Estimate of the mean bytes of a row, at least 1."""
        return max(1, self.blobs.num_bytes // max(1, int(self.blobs.plan.row_starts[-1])))

    def gather(self, rows: Array, stop: Future[None] | None = None, opened: dict[int, bool] | None = None) -> Records:
        """Return rows by their numbers, in the order given.

        Args:
            rows: Row numbers in file order, int64 [n].
            stop: Done when the rows are no longer needed. The gather then stops waiting for row groups.
            opened: Filled with the row groups of the rows, and for each, whether this gather had to open it. None
                charges loads to no account of the ledger.

        Raises:
            OriginError: The origin does not answer, or a file does not exist.
            DataError: A row group cannot be decoded.
            CancelledError: `stop` was done before all rows were available.
            ConfigError: The rows belong to more row groups than this process can map.
        """
        blobs = self._blob_index.pieces(rows)
        if opened is not None:
            opened.update(dict.fromkeys(self._row_groups_of(blobs), False))
        needed: list[int] = []
        loaded: dict[int, list[memoryview]] = {}
        cancelled: set[int] = set()
        while True:  # Other threads may evict row groups that this one has opened.
            with self._mutex:
                row_groups = self._open_row_groups(len(needed))
                for group, contents in loaded.items():
                    row_groups.put(group, contents, keep=needed)
                    self._pending.pop(group, None)
                found = row_groups.take(rows, blobs)
                if found is not None:
                    return found
                if stop is not None and stop.done():  # No request may follow `forget`.
                    raise CancelledError
                needed = self._row_groups_of(blobs) if opened is None else list(opened)
                missing = [group for group in needed if group not in row_groups]
                loads = {
                    group: self._request(group, counted=opened is not None, own_thread=group in cancelled)
                    for group in missing
                }
            if opened is not None:
                opened.update(dict.fromkeys(missing, True))
            results = {group: self._contents_of(load, stop) for group, load in loads.items()}
            loaded = {group: contents for group, contents in results.items() if contents is not None}
            cancelled = results.keys() - loaded.keys()

    def size_of(self, group: int) -> int:
        """Return the bytes of a row group's records: exact once this process has loaded it, an estimate before."""
        return self._sizes.get(group) or self.blobs.bytes_of(group)

    def forget(self) -> None:
        """Cancel the loads that have not reserved memory yet, unless another thread holds the lock.

        Notes:
            Other loops that wait for a cancelled load are notified and request it again. The loop that ends sets its
            `stop` first, so that it does not. This never blocks, because the garbage collector may call it in a thread
            that holds the lock.
        """
        if self._mutex.acquire(blocking=False):
            try:
                for group, load in list(self._pending.items()):
                    load.cancel()
                    if load.contents.cancelled():
                        del self._pending[group]
            finally:
                self._mutex.release()

    def prefetch(self, groups: Iterable[int]) -> None:
        """Start loading row groups, in this order. A large dataset is decoded in a background process."""
        with self._mutex:
            if not self._prefetches:
                self._prefetches = True
                self._submit(self.blobs.lease)
                if self.blobs.shared and self.blobs.num_bytes >= BACKGROUND_BYTES:
                    self._decoder = BackgroundDecoder(self.blobs)
            for group in groups:
                if self._open is None or group not in self._open:
                    self._request(group)

    def usual_cause(self) -> str:
        """Return the cause of most of the loading time."""
        spent = Counter(self._spent.snapshot())
        if self._decoder is not None:
            spent += Counter(self._decoder.spent.snapshot())
        known = {cause: seconds for cause, seconds in spent.items() if cause in CAUSES}
        return max(known, key=known.__getitem__, default="origin")

    def _row_groups_of(self, blobs: Array) -> list[int]:
        """Return the row groups of these blobs, each once, in file order."""
        touched = np.zeros(len(self._group_of_blob), np.bool_)
        touched[blobs] = True
        row_groups: list[int] = np.unique(self._group_of_blob[touched]).tolist()
        return row_groups

    def _open_row_groups(self, count: int) -> OpenRowGroups:
        """Return the open row groups, with a capacity of at least `count`."""
        plan = self.blobs.plan
        most = max_maps() // (MAPS_PER_BLOB * plan.most_of_a_group)
        if count > most:
            raise ConfigError(
                f"a gather from {count} row groups takes more maps of files than the {max_maps()} that a process may "
                "have: raise vm.max_map_count (sysctl), or use a smaller batch or window"
            )
        capacity = max(min(self.capacity, most), count)
        if self._open is None or self._open.capacity < capacity:
            self._open = OpenRowGroups(capacity, plan.group_starts, plan.row_starts, plan.layout)
        return self._open

    def _request(self, group: int, *, counted: bool = True, own_thread: bool = False) -> _Load:
        """Return the load of a row group. Start it if there is none.

        Args:
            group: The row group.
            counted: Charge the load to the row group's account in the ledger.
            own_thread: Load it in a new thread, because all others may be busy.
        """
        load = self._pending.get(group)
        if load is None or load.stale:
            self._pending.pop(group, None)  # A new load goes to the end of the queue.
            load = _Load(Timeline(), self.ledger.begin(group) if counted else Counters())
            try:
                load.contents = self._start(group, load, own_thread=own_thread)
            except RuntimeError:
                load.account.add(under_way=-1)
                raise
            self._pending[group] = load
        if load.cancelled.done():
            load.cancelled = Future()
        while len(self._pending) > self.capacity + self.further:
            self._pending.popitem(last=False)
        return load

    def _start(self, group: int, load: _Load, *, own_thread: bool) -> Future[list[memoryview] | None]:
        if own_thread:
            with suppress(RuntimeError):  # At the process's limit of threads, a shared thread loads it later.
                return DaemonExecutor(1, "dataload-load-now").submit(self._load, group, load)
        return self._submit(self._load, group, load)

    def _submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        if self._threads is None:
            self._threads = DaemonExecutor(LOADERS, "dataload-load")
        return self._threads.submit(call, *args)

    def _load(self, group: int, load: _Load) -> list[memoryview] | None:
        try:
            with load.timeline.here():
                contents = self.blobs.find(group)
                if contents is None:
                    since = perf_counter()
                    with charged_to(load.account):
                        if self._decoder is not None:
                            self._decoder.make(group, self._demand, load.account)
                        contents = self.blobs.load(group, load.is_cancelled)
                    self._spent.add(**load.timeline.seconds(since, perf_counter()))
                self._sizes[group] = sum(map(len, contents))
                return contents
        except ReservationCancelled:
            return None
        finally:
            load.account.add(under_way=-1)

    def _contents_of(self, load: _Load, stop: Future[None] | None) -> list[memoryview] | None:
        """Wait for a load. Return its contents, or None if the end of another loop cancelled it."""
        contents = load.contents
        if not contents.done():
            since = perf_counter()
            # Waiters of a cancelled future are notified only when a thread dequeues it; `cancelled` notifies at once.
            first: list[Future[Any]] = [contents, load.cancelled] if stop is None else [contents, load.cancelled, stop]
            with self._demand.waiting():
                wait(first, return_when=FIRST_COMPLETED)
            waited(since, load.timeline, instead=self.usual_cause())
            if stop is not None and stop.done():
                raise CancelledError
        return contents.result() if contents.done() and not contents.cancelled() else None

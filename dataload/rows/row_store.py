"""Access to rows by number: each host decodes a row group once, and every shuffled epoch gathers from the result."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from dataload.errors import ConfigError
from dataload.formats.schema import Layout
from dataload.rows.columns import Array
from dataload.rows.open_row_groups import OpenRowGroups
from dataload.rows.row_block import Records
from dataload.rows.row_group_load import RowGroupLoad
from dataload.rows.row_groups import RowGroups
from dataload.rows.scheduler import RowGroupScheduler
from dataload.runtime.fatal_frames import print_fatal_frames, reading
from dataload.runtime.filemap import max_maps
from dataload.runtime.forks import ForkAware
from dataload.runtime.instances import Largest
from dataload.samplers.interval_index import IntervalIndex

Draw = tuple[int, int] | None
"""(seed, epoch) of a shuffle; None: file order."""

MAPS_PER_BLOB = 4  # its slot, the empty end of the slot, its heap; and a share of the other maps
PREFETCHED_PART = 16  # of the maps, for the blobs of prefetched row groups, and the same for transient ones


class Selected(Protocol):
    """The rows of a dataset that has some rows of its row groups, such as `SelectedRows`. It can be pickled."""

    def keep(self, groups: int) -> None:
        """Keep the rows of this many row groups in memory."""

    def rows(self, numbers: Array) -> Array:
        """Return the rows' numbers in the row groups, by their numbers in the dataset: int64 [n] both."""


@dataclass
class Loads:
    """The row groups that a gather needed.

    Attributes:
        opened: Each row group of the rows, and whether the gather had to open it.
        waits: Seconds that the gather waited, divided among the row groups by the time that a thread worked on each.
    """

    opened: dict[int, bool] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)

    def add(self, loads: Mapping[int, RowGroupLoad], since: float) -> None:
        """Note that these row groups had to be opened, after a wait for all of them from `since` until now."""
        self.opened.update(dict.fromkeys(loads, True))
        now = perf_counter()
        busy = {group: load.timeline.busy(since, now) for group, load in loads.items()}
        if total := sum(busy.values()):
            for group, seconds in busy.items():
                self.waits[group] = self.waits.get(group, 0.0) + (now - since) * seconds / total


class RowStore(ForkAware):
    """The chosen columns of a dataset, by row number.

    Args:
        row_groups: The row groups.
        capacity: Row groups that this process keeps open. The row group that was opened first is closed first, because
            row groups are requested and finished in the order of need.
        selected: The rows that the dataset has of its row groups; None: all.
        by_use: Close the row group that a loader used least recently first. In a mixture, a source with a small weight
            uses its row groups for longer than the others.

    Attributes:
        capacity: As above; `serve` sets it.
        transient_ahead: How many row groups that do not stay in the cache may be prefetched besides.
        row_groups: As above.
        scheduler: Makes row groups available.

    Notes:
        Any thread may read. Concurrent requests for a row group share one load. A forked child and a pickled copy
        start with no open row groups.
    """

    def __init__(
        self,
        row_groups: RowGroups,
        capacity: int,
        selected: Selected | None = None,
        *,
        by_use: bool = False,
    ) -> None:
        self.capacity = capacity
        self._working_set = capacity // 2
        self.transient_ahead = 0
        self._served = Largest()
        self.row_groups = row_groups
        starts = row_groups.group_starts
        self._group_of_blob = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        self._blob_index = IntervalIndex(row_groups.row_starts)
        tier = row_groups.caches[0].tier
        damage = f"the cache {tier.location}: its disk failed, or a file in it was cut short"
        self._place = damage if tier.on_disk else ""
        self._selected = selected
        if selected is not None:
            selected.keep(capacity)
        self._by_use = by_use
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Reset the lock, the scheduler and the open row groups."""
        self._mutex = threading.Lock()
        self._open: OpenRowGroups | None = None
        self.scheduler = RowGroupScheduler(self.row_groups)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(RowStore, by_use=self._by_use)
        return make, (self.row_groups, self.capacity, self._selected), {"_working_set": self._working_set}

    def serve(self, loader: object, working_set: int, ahead: int, transient_ahead: int = 0) -> tuple[int, int]:
        """Set the capacity for a loader, as long as it lives. With several loaders, the largest needs apply.

        Args:
            loader: Identifies the loader.
            working_set: Row groups that the loader's batches need at a time.
            ahead: Row groups to prefetch before a batch needs them.
            transient_ahead: Row groups to prefetch besides, of those that do not stay in the cache.

        Returns:
            `ahead` and `transient_ahead`, as far as this process may map so many files.
        """
        most = max(1, max_maps() // (PREFETCHED_PART * self.row_groups.most_of_a_group))
        ahead, transient_ahead = min(ahead, most), min(transient_ahead, most)
        self._working_set, self.transient_ahead, self.capacity = self._served.of(
            loader, working_set, transient_ahead, working_set + ahead
        )
        if self._selected is not None:
            self._selected.keep(self.capacity)
        return ahead, transient_ahead

    @property
    def layout(self) -> Layout:
        """Layout of a record."""
        return self.row_groups.layout

    @property
    def row_bytes(self) -> int:
        """Estimate of the mean bytes of a row in batches, at least 1."""
        return self.row_groups.row_bytes

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of batches."""
        return tuple(field.name for field in self.layout.fields)

    def none(self) -> Any:
        """Return an empty batch, as `gather` does."""
        return Records.none(self.layout)

    def gather(
        self,
        rows: Array,
        stop: Future[None] | None = None,
        loads: Loads | None = None,
        draw: Draw = None,  # noqa: ARG002 (of sequences)
    ) -> Any:
        """Return rows by their numbers, in the order given.

        Args:
            rows: Row numbers of the dataset in file order, int64 [n].
            stop: Done when the rows are no longer needed. The gather then stops waiting for row groups.
            loads: Filled with the row groups that this gather needed. None charges loads to no account of the ledger.
            draw: The order of the epoch. Sequences of packed documents have other documents in each.

        Raises:
            OriginError: The origin does not answer, or a file does not exist.
            DataError: A row group cannot be decoded.
            CancelledError: `stop` was done before all rows were available.
            ConfigError: The rows belong to more row groups than this process can map.
        """
        if self._selected is not None:
            rows = self._selected.rows(rows)
        blobs = self._blob_index.find(rows)
        needed: list[int] = []
        if loads is not None:
            loads.opened.update(dict.fromkeys(self._row_groups_of(blobs), False))
        requested: dict[int, RowGroupLoad] = {}
        loaded: dict[int, list[memoryview]] = {}
        cancelled, unreadable = set[int](), set[int]()
        while True:  # Other threads may evict row groups that this one has opened.
            with self._mutex:
                row_groups = self._open_row_groups(needed)
                row_groups.make_room(loaded, keep=needed)  # once: it passes over all open row groups that are needed
                self._put(loaded, requested, unreadable)
                found = reading(self._place, row_groups.take, rows, blobs)
                if found is not None:
                    if self._by_use:
                        row_groups.use(loads.opened if loads else ())
                    return replace(found, place=self._place)
                if stop is not None and stop.done():  # No request may follow `forget`.
                    raise CancelledError
                needed = list(loads.opened) if loads else self._row_groups_of(blobs)
                requested = {
                    group: self._request(group, awaited=True, counted=loads is not None, own_thread=group in cancelled)
                    for group in needed
                    if group not in row_groups
                }
            since = perf_counter()
            results = {group: self.scheduler.contents_of(load, stop) for group, load in requested.items()}
            if loads is not None:
                loads.add(requested, since)
            loaded = {group: contents for group, contents in results.items() if contents is not None}
            cancelled = results.keys() - loaded.keys()

    def _put(
        self, loaded: dict[int, list[memoryview]], requested: dict[int, RowGroupLoad], unreadable: set[int]
    ) -> None:
        """Open row groups. Those whose disk has failed since they were loaded must be loaded again, once."""
        assert self._open is not None
        for group, contents in loaded.items():
            try:
                self._open.put(group, contents)
            except OSError:
                if group in unreadable:
                    raise
                unreadable.add(group)
            self.scheduler.opened(requested[group])

    def size_of(self, group: int) -> int:
        """Return the bytes of a row group's records: exact once this process has loaded it, an estimate before."""
        cache, number = self.row_groups.of(group)
        return self.scheduler.sizes.get(group) or cache.bytes_of(number)

    def is_transient(self, group: int) -> bool:
        """Return whether a row group is cached only in the transient region, or not at all."""
        cache, number = self.row_groups.of(group)
        return cache.is_transient(number)

    def forget(self) -> None:
        """Cancel the loads that have not reserved memory yet, unless another thread holds the lock.

        Notes:
            Other loops that wait for a cancelled load are notified and request it again. The loop that ends sets its
            `stop` first, so that it does not. This never blocks, because the garbage collector may call it in a thread
            that holds the lock.
        """
        if self._mutex.acquire(blocking=False):
            try:
                self.scheduler.cancel()
            finally:
                self._mutex.release()

    def prefetch(self, groups: Iterable[int]) -> None:
        """Start loading row groups, in this order. A large dataset is decoded in a background process.

        The last epoch may have left some of them open. These are closed after all others that are open now.
        """
        with self._mutex:
            self.scheduler.start()
            for group in groups:
                if self._open is None or group not in self._open:
                    self._request(group)
                else:
                    self._open.use([group])

    def states(self) -> dict[str, int]:
        """Return the number of row groups in each state of `State`, except those that failed; and of those mapped."""
        opened = self._open
        return {**self.scheduler.states(), "mapped": 0 if opened is None else len(opened)}

    def _request(self, group: int, **how: bool) -> RowGroupLoad:
        return self.scheduler.request(group, self.capacity + self.transient_ahead, **how)

    def _row_groups_of(self, blobs: Array) -> list[int]:
        """Return the row groups of these blobs, each once, in file order."""
        touched = np.zeros(len(self._group_of_blob), np.bool_)
        touched[blobs] = True
        return list(dict.fromkeys(self._group_of_blob[touched].tolist()))  # of few blobs, faster than np.unique

    def _open_row_groups(self, needed: Collection[int]) -> OpenRowGroups:
        """Return the open row groups, with a capacity for at least those needed."""
        count = len(needed)
        # Uncached row groups take memory of this process. It keeps only those open that batches need.
        most_open = self.capacity if self.scheduler.is_cached else min(self.capacity, self._working_set)
        if self._open is not None and self._open.capacity >= max(self.capacity, count):
            self._open.keep_at_most(max(most_open, count), needed)
            return self._open  # without a look at the limit of maps, which is a file
        row_groups = self.row_groups
        most = max_maps() // (MAPS_PER_BLOB * row_groups.most_of_a_group)
        if count > most:
            raise ConfigError(
                f"a gather from {count} row groups takes more maps of files than the {max_maps()} that a process may "
                "have: raise vm.max_map_count (sysctl), or use a smaller batch or window"
            )
        capacity = max(min(self.capacity, most), count)
        if self._open is None or self._open.capacity < capacity:
            starts = row_groups.group_starts, row_groups.row_starts
            self._open = OpenRowGroups(capacity, *starts, row_groups.layout)
            print_fatal_frames()
        self._open.keep_at_most(max(min(most_open, most), count), needed)
        return self._open

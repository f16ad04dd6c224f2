"""Rows by their numbers: decoded once a host, gathered from ever after; what every shuffled epoch reads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from dataload.cache.blocks import Blocks
from dataload.cache.forks import ForkAware
from dataload.cache.maps import max_maps
from dataload.columns import Array
from dataload.errors import ConfigError
from dataload.layout import Layout
from dataload.manifest import Manifest
from dataload.records import Records
from dataload.rowblobs import RowBlobs
from dataload.samplers.lookup import Lookup
from dataload.shelf import Shelf

LOADERS = 16
MAPS_OF_A_BLOB = 4  # its slot, what is empty behind that, its heap; and some for others


class RowStore(ForkAware):
    """The chosen columns of a dataset, by row number.

    capacity: how many row groups this process has open, those last asked for: they are asked for in the order in which
    they are needed, and done with in that order.

    Notes: may be read from any thread; a row group is asked for once however many want it at a time. A forked child
    starts with nothing open, and so does a pickled copy.
    """

    def __init__(
        self, manifest: Manifest, columns: Sequence[str], blocks: Blocks, capacity: int, fill_null: Any = None
    ) -> None:
        self.capacity = capacity
        self.blobs = RowBlobs(manifest, columns, blocks, fill_null)
        self._settings = manifest, columns, blocks
        self._fill_null = fill_null
        self._group_of_blob = np.repeat(np.arange(len(manifest.row_groups)), np.diff(self.blobs.group_starts))
        self._lookup = Lookup(self.blobs.row_starts)
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._asked: OrderedDict[int, Future[list[memoryview]]] = OrderedDict()  # and not on the shelf yet
        self._pool: ThreadPoolExecutor | None = None
        self._shelf: Shelf | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowStore, (*self._settings, self.capacity, self._fill_null)

    @property
    def layout(self) -> Layout:
        return self.blobs.layout

    @cached_property
    def row_bytes(self) -> int:
        """About how many bytes a row takes, on average."""
        return max(1, self.blobs.num_bytes // max(1, int(self.blobs.row_starts[-1])))

    def gather(self, rows: Array) -> Records:
        """The rows of these numbers (int64 [n], counted in file order), in the order given.

        Raises OriginError, DataError.
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
            loaded = {group: had for group, one in asked.items() if (had := _loaded(one)) is not None}

    def forget(self) -> None:
        """Do not start to load what was only asked for in advance."""
        with self._mutex:
            for group, asked in list(self._asked.items()):
                if asked.cancel():
                    del self._asked[group]

    def _owners(self, rows: Array) -> list[int]:
        """The row groups that these rows belong to, each once, in file order."""
        touched = np.zeros(len(self._group_of_blob), np.bool_)
        touched[self._blobs_of(rows)] = True
        owners: list[int] = np.unique(self._group_of_blob[touched]).tolist()
        return owners

    def prefetch(self, groups: Iterable[int]) -> None:
        """Start loading these row groups, in this order."""
        with self._mutex:
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

    def _ask_for(self, group: int) -> Future[list[memoryview]]:
        asked = self._asked.get(group)
        if asked is None or asked.cancelled() or (asked.done() and asked.exception() is not None):
            if self._pool is None:
                self._pool = ThreadPoolExecutor(LOADERS, thread_name_prefix="dataload-decode")
            asked = self._asked[group] = self._pool.submit(self._load, group)
        while len(self._asked) > self.capacity:
            self._asked.popitem(last=False)
        return asked

    def _load(self, group: int) -> list[memoryview]:
        if not threading.main_thread().is_alive():
            raise CancelledError  # The program ends; it should not wait for what was only prefetched.
        return self.blobs.load(group)


def _loaded(asked: Future[list[memoryview]]) -> list[memoryview] | None:
    """What was asked for; None when it was given up because another loop over the same rows has ended."""
    try:
        return asked.result()
    except CancelledError:
        if not asked.cancelled():
            raise  # The program ends.
        return None

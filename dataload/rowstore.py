"""Row groups, decoded once and gathered from: what every shuffled epoch reads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dataload import parquet
from dataload.cache.blocks import Blocks
from dataload.cache.forks import ForkAware
from dataload.columns import Array, Column, decode, gather
from dataload.manifest import RowGroup

DECODERS = 4
FOOTERS_KEPT = 64


class RowStore(ForkAware):
    """The decoded columns of row groups, in this process's memory: the `capacity` last asked for.

    First in, first out: row groups are asked for in the order in which they are needed, and done with in that order.

    Notes: may be read from any thread; a row group is decoded once however many ask for it at a time. A forked child
    starts empty, and so does a pickled copy.
    """

    def __init__(
        self,
        row_groups: Sequence[RowGroup],
        columns: Sequence[str],
        blocks: Blocks,
        capacity: int,
        fill_null: Any = None,
    ) -> None:
        self.capacity = capacity
        self._row_groups = row_groups
        self._columns = tuple(columns)
        self._blocks = blocks
        self._fill_null = fill_null
        self._footer = lru_cache(FOOTERS_KEPT)(partial(parquet.read_footer, blocks=blocks))
        self._starts = np.concatenate(([0], np.cumsum([group.rows for group in row_groups], dtype=np.int64)))
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()
        self._decoded: OrderedDict[int, Future[dict[str, Column]]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowStore, (self._row_groups, self._columns, self._blocks, self.capacity, self._fill_null)

    def gather(self, rows: Array) -> dict[str, Column]:
        """The rows of these numbers (int64 [B], counted in file order) in every column, in the order given.

        Raises OriginError, DataError.
        """
        owners = self._owner_of_each(rows)
        numbers, which = np.unique(owners, return_inverse=True)
        parts = self._get(numbers.tolist())
        return gather(parts, which, rows - self._starts[owners])

    def owners(self, rows: Array) -> list[int]:
        """The row groups that these rows belong to, each once."""
        owners: list[int] = np.unique(self._owner_of_each(rows)).tolist()
        return owners

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Start decoding these row groups, in this order."""
        for number in numbers:
            self._ask_for(number)

    def _owner_of_each(self, rows: Array) -> Array:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _get(self, numbers: Sequence[int]) -> list[Mapping[str, Column]]:
        return [asked.result() for asked in [self._ask_for(number) for number in numbers]]

    def _ask_for(self, number: int) -> Future[dict[str, Column]]:
        with self._mutex:
            asked = self._decoded.get(number)
            if asked is None or (asked.done() and asked.exception() is not None):
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="dataload-decode")
                asked = self._decoded[number] = self._pool.submit(self._decode, number)
            while len(self._decoded) > self.capacity:
                self._decoded.popitem(last=False)
            return asked

    def _decode(self, number: int) -> dict[str, Column]:
        if not threading.main_thread().is_alive():
            raise CancelledError  # The program ends; it should not wait for what was only prefetched.
        group = self._row_groups[number]
        table = parquet.read_row_group(group.file, group.number, self._columns, self._footer(group.file), self._blocks)
        return decode(table, self._fill_null, f"{group.file.path} row group {group.number}")

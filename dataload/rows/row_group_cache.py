"""The blobs that hold a row group's rows as records: kept in the cache, made once a host by who comes first."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks
from dataload.cache.local.blob_file import size_on_disk
from dataload.cache.tier import BlobKey, Span
from dataload.catalog.footer_cache import read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import DataError
from dataload.formats.schema import Layout, fields_of
from dataload.rows import row_block
from dataload.rows.arrow_decode import Array, Column, concatenate, decode
from dataload.rows.row_block import Blob
from dataload.rows.size_sampling import ValueSizes
from dataload.runtime.cached_property import cached_property
from dataload.runtime.counters import charge
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.forks import ForkAware
from dataload.runtime.memory_budget import MemoryBudget
from dataload.telemetry.wait_timeline import ELSEWHERE, Timeline, doing, waited

FOOTERS_KEPT = 64
# Of a blob, by what the footers say. More where a dictionary made many values small, so rows have a bound of their own.
BLOB_BYTES, BLOB_ROWS = 32 << 20, 1 << 16
FETCHED_BYTES = 64 << 20  # of row groups on their way, in a process that has other things to do
LEAST_HELD = FETCHED_BYTES // IN_FLIGHT  # by one row group, however small: there are only so many requests
DECODED_BYTES = 64 << 20  # of blobs that are being decoded and packed, twice each


class RowGroupCache(ForkAware):
    """The chosen columns of a dataset's row groups, as blobs of records.

    layout: of a record; group_starts: the number of each row group's first blob, int64 [groups + 1]; row_starts: the
    number of each blob's first row, int64 [blobs + 1].

    fetched: bytes that this process may hold of row groups on their way.

    Notes: may be called from any thread.
    """

    def __init__(self, manifest: Manifest, columns: Sequence[str], blocks: Blocks, fill_null: Any = None) -> None:
        self._manifest = manifest
        self._columns = tuple(columns)
        self._blocks = blocks
        self._fill_null = fill_null
        schema = pa.schema([manifest.schema.field(name) for name in columns])
        self.layout = Layout(fields_of(schema))
        self._measured: dict[str, float] | None = None  # bytes of a value, by column, once it is known
        self._rows = self._rows_of_a_blob()
        lengths = np.array([group.rows for group in manifest.row_groups], np.int64)
        counts = np.maximum(1, -(-lengths // self._rows))
        self.group_starts = np.concatenate(([0], np.cumsum(counts)))
        self.most_of_a_group = int(counts.max(initial=1))
        self.row_starts = self._first_rows(lengths, counts)
        self._what = self._digest()
        self._footer = lru_cache(FOOTERS_KEPT)(partial(read_footer, blocks=blocks))
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.fetched = MemoryBudget(FETCHED_BYTES)
        self._decoded = MemoryBudget(DECODED_BYTES)
        # Not those that wait for the origin: each thread that decodes keeps memory of Arrow's.
        self._decoders = DaemonExecutor(len(os.sched_getaffinity(0)), "dataload-decode")

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroupCache, (self._manifest, self._columns, self._blocks, self._fill_null)

    def load(self, number: int, unwanted: Callable[[], bool] = lambda: False) -> list[memoryview]:
        """The blobs of a row group, made if they are not kept. Raises OriginError, DataError.

        And UnwantedError where it is `unwanted` before there is room for it.
        """
        found, keys = self.find(number), self._keys(number)
        if found is None:
            found = self._blocks.tier.fetch_from_cluster(keys)  # Who only brings it keeps nobody else from it.
        if found is None:
            with self._alone(number, unwanted):
                found = self._kept(keys) or self._blocks.tier.fetch_from_cluster(keys) or self._make(number, keys)
            self._release()
        return found

    def find(self, number: int) -> list[memoryview] | None:
        """The blobs of a row group, if they are kept."""
        with doing("disk"):
            return self._kept(self._keys(number))

    def make(self, number: int) -> bool:
        """Have the blobs of a row group kept, where there is room; whether they are. Those there are not read."""
        keys = self._keys(number)
        if self._kept(keys, (0, 0)) is None and self._blocks.tier.fetch_from_cluster(keys) is None:
            with self._alone(number):
                if self._kept(keys, (0, 0)) is None and self._blocks.tier.fetch_from_cluster(keys) is None:
                    self._make(number, keys)
            self._release()
        return self._kept(keys, (0, 0)) is not None

    def lease(self) -> None:
        """Have what is kept of all row groups stay, as long as this process runs."""
        self._blocks.tier.lease(key for number in range(len(self._rows)) for key in self._keys(number))

    def passes(self, number: int) -> bool:
        """Whether a row group is kept only until others need its room, or is still to come."""
        return self._blocks.tier.is_transient(self._keys(number))

    def measure(self) -> None:
        """Have it known how large the values are of which the files have codes. Raises OriginError, DataError."""
        if self._measured is None:
            self._measured = self.value_sizes.means()
            vars(self).pop("num_bytes", None)

    @cached_property
    def value_sizes(self) -> ValueSizes:
        """What `measure` asks."""
        return ValueSizes(self._manifest, self.layout, self._blocks)

    def bytes_of(self, number: int) -> int:
        """About how many bytes the blobs of a row group take; more, unless measured, where files have codes."""
        group = self._manifest.row_groups[number]
        return group.rows * self.layout.dtype.itemsize + self._heap_bytes(group)

    @property
    def shared(self) -> bool:
        """Whether what is kept is there for other processes, too."""
        return self._blocks.tier.shared

    @cached_property
    def num_bytes(self) -> int:
        """About how many bytes all of them take."""
        return sum(map(self.bytes_of, range(len(self._manifest.row_groups))))

    @property
    def keeps(self) -> bool:
        """Whether the cache has kept all that it was to keep so far: is neither full nor failing."""
        stats = self._blocks.counts()
        return not stats["refused"] and (stats["health"] or {}).get("state", "normal") == "normal"

    def sizes_on_disk(self, number: int) -> list[int]:
        """About how many bytes the file of each blob of a row group takes."""
        group = self._manifest.row_groups[number]
        heaps = [size for _, size in self._heaps(group)]
        sizes = []
        for key, rows in zip(self._keys(number), self._lengths(number), strict=True):
            share = [size * rows // max(1, group.rows) for size in heaps]
            sizes.append(size_on_disk(row_block.packed_bytes(rows, share, self.layout), key.name))
        return sizes

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        """What of its file is fetched to make the blobs of a row group, or of these columns; see `Footer.fetched`."""
        group = self._manifest.row_groups[number]
        stored = self._stored(group) if columns is None else columns
        return self._footer(group.file, group.kept).fetched(group.number, stored) if stored else ([], [])

    def _kept(self, keys: list[BlobKey], span: Span | None = None) -> list[memoryview] | None:
        found = []
        for key in keys:
            blob = self._blocks.tier.get(key, span)
            if blob is None:
                return None
            found.append(blob)
        return found

    def _make(self, number: int, keys: list[BlobKey]) -> list[memoryview]:
        if (kept := self._of_all_columns(number)) is not None:
            return self._packed(number, keys, kept)
        charge(decoded=1)
        group = self._manifest.row_groups[number]
        stored = self._stored(group)
        if not stored:
            return self._packed(number, keys, self._columns_of([pa.table({})] * len(keys), number))
        with ExitStack() as stack:
            footer = self._footer(group.file, group.kept)
            reader = stack.enter_context(footer.open_row_group(group.file, group.number, stored, self._blocks))
            return self._packed(number, keys, self._columns_of(reader.tables(int(self._rows[number])), number))

    @contextmanager
    def _alone(self, number: int, unwanted: Callable[[], bool] = lambda: False) -> Iterator[None]:
        with ExitStack() as stack:
            other = self._enter(stack, number, unwanted)
            if callable(other):
                stack.close()
                other()
                # Elected again, hosts would queue up for what is there.
                self._enter(stack, number, unwanted, elect=False)
            yield

    def _enter(self, stack: ExitStack, number: int, unwanted: Callable[[], bool], *, elect: bool = True) -> Any:
        """What to call to wait for another host that is at it, once nothing is held; None where there is none."""
        # A lock is not held while there is no room.
        stack.enter_context(self.fetched.hold(self._held(number), unwanted))
        with doing(ELSEWHERE):
            return stack.enter_context(self._blocks.tier.key_lock(self._key(number, "row group"), elect=elect))

    def has_room(self, number: int) -> bool:
        """Whether this process may hold another row group just now."""
        return self.fetched.has(self._held(number))

    def _held(self, number: int) -> int:
        group = self._manifest.row_groups[number]
        stored = self._stored(group)
        held = self._footer(group.file, group.kept).held_bytes(group.number, stored) if stored else 0
        return max(LEAST_HELD, held)

    def _release(self) -> None:
        """Give back what Arrow keeps of the memory it decoded in: not each time, for fresh memory is slow."""
        if self.fetched.unused and self._decoded.unused:
            pa.default_memory_pool().release_unused()

    def _columns_of(self, tables: Iterable[pa.Table], number: int) -> Iterator[dict[str, Column]]:
        """The columns of a row group, blob by blob."""
        group = self._manifest.row_groups[number]
        for table, rows in zip(tables, self._lengths(number), strict=True):
            yield decode(self._with_keys(table, group, rows), self.layout.fields, self._fill_null, _where(group))

    def _packed(self, number: int, keys: list[BlobKey], parts: Iterator[dict[str, Column]]) -> list[memoryview]:
        """The blobs of a row group, made of these columns by one of the threads that decode."""
        since, decoding = perf_counter(), Timeline()
        made = self._decoders.submit(self._pack, number, keys, parts, decoding)
        wait([made])
        waited(since, decoding, instead=decoding.longest())
        return made.result()

    def _pack(
        self, number: int, keys: list[BlobKey], parts: Iterator[dict[str, Column]], decoding: Timeline
    ) -> list[memoryview]:
        where = _where(self._manifest.row_groups[number])
        made = []
        with decoding.here(), doing("decode"), self._decoded.hold(2 * self.bytes_of(number) // len(keys)):
            for key, rows, columns in zip(keys, self._lengths(number), parts, strict=True):
                fill = partial(row_block.pack, columns, rows, self.layout, where)
                made.append(self._blocks.tier.get_or_fill(key, fill))
        return made

    def _with_keys(self, table: pa.Table, group: RowGroup, rows: int) -> pa.Table:
        """With the columns that are keys in the names of folders."""
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for name, value in group.constants:
            if name in self._columns:
                columns[name] = pa.repeat(pa.scalar(value, self._manifest.schema.field(name).type), rows)
        return pa.table(columns)

    def _of_all_columns(self, number: int) -> Iterator[dict[str, Column]] | None:
        """The columns of a row group by blob, from those of all columns where they are kept: no need to fetch it."""
        wider = self._wider
        found = None if wider is None else wider._kept(wider._keys(number))  # noqa: SLF001 (another of this class)
        if wider is None or found is None:
            return None
        blobs = [Blob(*one, wider.layout) for one in zip(found, wider._lengths(number), strict=True)]  # noqa: SLF001
        size = int(self._rows[number] // wider._rows[number])  # noqa: SLF001 (both are powers of two)
        parts = (blobs[first : first + size] for first in range(0, len(blobs), size))
        return (
            {field.name: concatenate([blob.column(field) for blob in part]) for field in self.layout.fields}
            for part in parts
        )

    @cached_property
    def _wider(self) -> RowGroupCache | None:
        """The same row groups with all their columns; None when these are all, or not all can be held."""
        names = self._manifest.schema.names
        if set(names) == set(self._columns):
            return None
        try:
            return RowGroupCache(self._manifest, names, self._blocks, self._fill_null)
        except DataError:
            return None

    def _lengths(self, number: int) -> list[int]:
        """Rows of each blob of a row group."""
        first, last = self.group_starts[number : number + 2]
        lengths: list[int] = np.diff(self.row_starts[first : last + 1]).tolist()
        return lengths

    def _keys(self, number: int) -> list[BlobKey]:
        first, last = self.group_starts[number : number + 2]
        rows = self._rows[number]
        return [self._key(number, f"rows {blob * rows}+{rows}") for blob in range(last - first)]

    def _key(self, number: int, part: str) -> BlobKey:
        group = self._manifest.row_groups[number]
        return self._blocks.key(group.file, f"records {group.number} {part} {self._what}")

    def _digest(self) -> str:
        """Names what is in the blobs: the columns, how they lie in records, and what stands for nulls."""
        said = [row_block.VERSION, self.layout.describe(), repr(_said(self._fill_null))]
        return hashlib.blake2b(json.dumps(said).encode(), digest_size=8).hexdigest()

    def _rows_of_a_blob(self) -> Array:
        """By row group: a power of two, so that blobs of fewer columns are made of whole ones of more.

        It names them: it follows from the footers, whatever has been measured.
        """
        bounds = []
        for group in self._manifest.row_groups:
            row_bytes = self.layout.dtype.itemsize + self._heap_bytes(group) // max(1, group.rows)
            bounds.append(1 << (min(BLOB_ROWS, max(1, BLOB_BYTES // row_bytes)).bit_length() - 1))
        return np.array(bounds, np.int64)

    def _stored(self, group: RowGroup) -> list[str]:
        """The columns that a row group's file holds."""
        return [name for name in self._columns if name not in dict(group.constants)]

    def _heap_bytes(self, group: RowGroup) -> int:
        return sum(size for _, size in self._heaps(group))

    def _heaps(self, group: RowGroup) -> list[tuple[str, int]]:
        """About how many bytes the values of each ragged column take."""
        sizes = zip(self._manifest.ragged, group.sizes, strict=False)
        return [(name, self._heap(name, size, group.rows)) for name, size in sizes if name in self._columns]

    def _heap(self, name: str, size: int, rows: int) -> int:
        """What is measured of a column, or what its footer says."""
        mean = (self._measured or {}).get(name)
        return size if mean is None else round(mean * rows)

    def _first_rows(self, lengths: Array, counts: Array) -> Array:
        firsts = np.concatenate(([0], np.cumsum(lengths)))
        within = np.arange(counts.sum()) - np.repeat(self.group_starts[:-1], counts)
        starts = np.repeat(firsts[:-1], counts) + within * np.repeat(self._rows, counts)
        return np.append(starts, firsts[-1])


def _where(group: RowGroup) -> str:
    return f"{group.file.path} row group {group.number}"


def _said(filling: Any) -> Any:
    """What stands for nulls, such that its repr says all of it: an array's leaves out what is in the middle."""
    if isinstance(filling, Mapping):
        return {name: _said(value) for name, value in sorted(filling.items())}
    return [str(filling.dtype), filling.tolist()] if isinstance(filling, (np.ndarray, np.generic)) else filling

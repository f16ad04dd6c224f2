"""A dataset's row groups as blobs of records in the cache. The first process of a host that needs one makes it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.blob_file import size_on_disk
from dataload.cache.blocks.reader import Blocks
from dataload.cache.single_flight import fetch_once, make_once
from dataload.cache.tier import BlobKey, Check, Kind, Span, Tier, group_number
from dataload.catalog.manifest import Manifest
from dataload.catalog.selection import Selection
from dataload.errors import DataError
from dataload.formats.base import SHARED_BYTES
from dataload.formats.schema import Layout
from dataload.rows import row_block
from dataload.rows.columns import Column, concatenate
from dataload.rows.known_nulls import known_nulls
from dataload.rows.making.bunches import Made, Member, bunched_bytes, make_together
from dataload.rows.making.row_group_maker import RowGroupMaker
from dataload.rows.making.row_group_memory import RankShare, RowGroupMemory
from dataload.rows.making.shared_blocks import SharedBlocks
from dataload.rows.row_block import Blob
from dataload.rows.row_group_life import Lives, RowGroupLife, State
from dataload.rows.row_group_plan import RowGroupPlan
from dataload.rows.size_sampling import SizeForecast
from dataload.runtime.cached_property import cached_property
from dataload.runtime.filemap import is_file_map
from dataload.runtime.redact import redacted
from dataload.runtime.turns import next_turn
from dataload.telemetry.wait_timeline import doing

FOOTER_BYTES = 256  # at most, of a row group's column in footers and manifest, unless its values are long
FETCHED_COPIES = 2  # of a blob from the cluster, in memory: its parts are joined, and then copied to be written


class RowGroupCache(SizeForecast):
    """The chosen columns of a dataset's row groups, as blobs of records in the cache. See `RowGroups`.

    Args:
        manifest: The dataset.
        columns: Names of the columns to store.
        blocks: Reader of the dataset's files, and the cache.
        fill_null: Replacement of nulls, for all columns or, as a mapping, by column; or None.
        null_masks: Whether to store masks of nulls, see `fields_of`.

    Attributes:
        manifest: As above.
        blocks: As above.
        plan: Names, lengths and sizes of the blobs.
        maker: Makes the row groups that are not cached.
        is_mapped: Whether a function of the user makes the rows.
        selection: The rows of each row group that the blobs hold; None: all.
    """

    is_mapped = False
    selection: Selection | None = None

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str],
        blocks: Blocks,
        fill_null: Any = None,
        null_masks: bool = False,
    ) -> None:
        self.manifest = manifest
        self._columns = tuple(columns)
        self.blocks = blocks
        self._fill_null = fill_null
        self._null_masks = null_masks
        self._unkept = set[int]()  # row groups that the cache did not keep when this process made them
        self.plan = self._new_plan()
        if not self.shared:  # Memory keeps blocks until their neighbours are needed only if all data fits.
            files = {group.file for group in manifest.row_groups}
            fits = sum(file.size for file in files) + self.num_bytes <= self.tier.limit
            self.blocks = blocks if fits else blocks.bypassing()
        self.maker = self._new_maker()

    def _new_plan(self) -> RowGroupPlan:
        return RowGroupPlan(self.manifest, self._columns, self._fill_null, null_masks=self._null_masks)

    def _new_maker(self) -> RowGroupMaker:
        schema = pa.schema([self.manifest.schema.field(name) for name in self._columns])
        return RowGroupMaker(self.manifest, self.plan, schema, self.blocks, self._fill_null)

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            RowGroupCache,
            (self.manifest, self._columns, self.blocks, self._fill_null, self._null_masks),
            {"rank": self.memory.rank},
        )

    def __setstate__(self, state: dict[str, RankShare]) -> None:
        self.memory.use(state["rank"])

    def load(self, number: int, life: RowGroupLife) -> list[memoryview]:
        return self._made_once(number, self.keys(number), None, life)

    def bunched_bytes(self, number: int) -> int:
        return 0 if number in self._unkept else bunched_bytes(self, number)

    def load_together(self, lives: Lives, late: Callable[[], None]) -> Iterator[tuple[int, Made]]:
        for member in make_together([Member(self, number, life) for number, life in lives.items()], late):
            yield member.number, member.made

    def find(self, number: int) -> list[memoryview] | None:
        with doing("disk"):
            return self.get_all(self.keys(number))

    def make(self, number: int, life: RowGroupLife | None = None) -> bool:
        keys = self.keys(number)
        with next_turn():
            if self.get_all(keys, (0, 0)) is None:
                self._made_once(number, keys, (0, 0), life or RowGroupLife())
                return self.get_all(keys, (0, 0)) is not None
            return True

    @property
    def known_nulls(self) -> str | None:
        """Which columns are known to have nulls that batches cannot hold; None: none."""
        return known_nulls(self.manifest, self._columns, self._fill_null, null_masks=self._null_masks)

    def touch(self) -> None:
        row_groups = range(len(self.manifest.row_groups))
        self.blocks.tier.touch(key for number in row_groups for key in self.keys(number))

    def is_transient(self, number: int) -> bool:
        return self.blocks.tier.is_transient(self.keys(number))

    def describe(self, number: int) -> str:
        name, limiter = redacted(self.manifest.row_groups[number].name), self.blocks.origin.limiter
        return name if limiter is None else f"{name}, {limiter.in_flight} of {limiter.limit} requests in flight"

    def cached_columns(self, number: int) -> Iterator[dict[str, Column]] | None:
        """Return the columns of each blob of a row group, or None if this host has not cached them."""
        if (found := self.get_all(self.keys(number))) is None:
            return self.columns_of_wider(number)
        blobs = zip(found, self.plan.lengths(number), strict=True)
        return _joined([Blob(*blob, self.plan.layout) for blob in blobs], 1, self.plan.layout)

    @property
    def by_dataset(self) -> tuple[RowGroupCache, ...]:
        return (self,)

    @property
    def memory(self) -> RowGroupMemory:
        return self.maker.memory

    def reservation(self, number: int) -> int:
        return max(1, self.maker.reservation(number))

    @property
    def tier(self) -> Tier:
        """The cache of the blobs."""
        return self.blocks.tier

    @property
    def shared(self) -> bool:
        return self.blocks.tier.shared

    @cached_property
    def group_numbers(self) -> npt.NDArray[np.uint64]:
        """The number of each row group in the cache, uint64 [row groups]; see `BlobKey`. Equal ones share blobs."""
        keys = map(self.lock_key, range(len(self.manifest.row_groups)))
        return np.fromiter((group_number(key.digest) for key in keys), np.uint64, len(self.manifest.row_groups))

    @property
    def caches_everything(self) -> bool:
        """Whether every blob is still cached: the cache is neither full nor failing."""
        stats = self.blocks.counts()
        return not stats["refused"] and (stats["health"] or {}).get("state", "normal") == "normal"

    def sizes_on_disk(self, number: int) -> list[int]:
        """Return an estimate of the file size of each blob of a row group, in bytes."""
        sizes = zip(self.plan.blob_sizes(number), self.keys(number), strict=True)
        return [size_on_disk(size, key.name) for size, key in sizes]

    def whole_on_disk(self) -> int:
        """Return an upper bound of the bytes on disk of all row groups, with footers and the blocks of small ones."""
        groups = self.manifest.row_groups
        shared = {group.file for group in groups if group.bytes < SHARED_BYTES}
        decoded = sum(sum(self.sizes_on_disk(number)) for number in range(len(groups)))
        footers = FOOTER_BYTES * len(groups) * len(self.manifest.schema)
        return decoded + footers + sum(file.size for file in shared)

    def _made_once(self, number: int, keys: list[BlobKey], span: Span | None, life: RowGroupLife) -> list[memoryview]:
        """Return the blobs of a row group, or `span` of each. Make them, unless another process or host does."""
        tier, alone = self.blocks.tier, number in self._unkept

        def find() -> list[memoryview] | None:
            with doing("disk"):
                return self.get_all(keys, span)

        def fetch() -> list[memoryview] | None:
            return tier.fetch_from_cluster(keys)

        def hold_fetched() -> AbstractContextManager[Any]:
            size = FETCHED_COPIES * max(self.sizes_on_disk(number))  # One blob after the other is fetched.
            return self.memory.held.reserve(size, life.is_cancelled)

        def make() -> list[memoryview]:
            if fetched := fetch():  # Another host may have made it meanwhile.
                return fetched
            life.enter(State.FETCHING)
            columns = self.columns_of_wider(number)
            if columns is not None:
                with closing(columns):
                    return self.maker.pack(number, keys, columns, life)
            made = self.maker.make(number, keys, life)
            self.discard_source_blocks(number)
            return made

        found = fetch_once(tier, self._lock_key(number, "fetch"), find, fetch, hold_fetched, alone=alone)
        if found is None:
            hold = partial(self.memory.hold, self.maker.reservation(number), life.is_cancelled)
            found = make_once(tier, self.lock_key(number), find, make, hold, alone=alone)
        self.note_kept(number, found)
        life.enter(State.CACHED)
        return found

    def note_kept(self, number: int, made: list[memoryview]) -> None:
        """Note whether the cache kept the blobs of a row group that was made or awaited."""
        is_kept = not self.tier.shared or all(map(is_file_map, made))
        (self._unkept.discard if is_kept else self._unkept.add)(number)

    def discard_source_blocks(self, number: int) -> None:
        """Discard the blocks of files that a row group was made of, once no other row group needs them. Best effort."""
        if self._shared_blocks is not None and not self.plan.zeroes_nulls(number):
            self._shared_blocks.discard(number, self.keys)

    @cached_property
    def _shared_blocks(self) -> SharedBlocks | None:
        """The blocks that these row groups replace; None if datasets of other arguments cannot be made from them."""
        is_all = set(self.manifest.schema.names) == set(self._columns)
        if self.is_mapped or not is_all or self._fill_null is not None or self._null_masks:
            return None
        return SharedBlocks(self.manifest, self.blocks, self.maker)

    def get_all(self, keys: list[BlobKey], span: Span | None = None) -> list[memoryview] | None:
        """Return these blobs, or `span` of each, or None unless all are cached."""
        found = []
        for key in keys:
            if (blob := self.blocks.tier.get(key, span)) is None:
                return None
            found.append(blob)
        return found

    def columns_of_wider(self, number: int) -> Generator[dict[str, Column], None, None] | None:
        """Return the columns of each blob, taken from cached blobs of all columns, or None if these are not cached."""
        wider = self._wider
        found = None if wider is None else wider.get_all(wider.keys(number))
        if wider is None or found is None:
            return None
        blobs = [Blob(*blob, wider.plan.layout) for blob in zip(found, wider.plan.lengths(number), strict=True)]
        ratio = int(self.plan.blob_rows[number] // wider.plan.blob_rows[number])  # Both are powers of two.
        return _joined(blobs, ratio, self.plan.layout)

    @cached_property
    def _wider(self) -> RowGroupCache | None:
        """The same row groups with all columns. None if these are all columns, or a column has an unsupported type."""
        names = self.manifest.schema.names
        if set(names) == set(self._columns):
            return None
        try:
            return RowGroupCache(self.manifest, names, self.blocks, self._fill_null, self._null_masks)
        except DataError:
            return None

    def keys(self, number: int) -> list[BlobKey]:
        """Return the keys of a row group's blobs."""
        parts = zip(self.plan.parts(number), self.plan.lengths(number), strict=True)
        return [
            self._key(number, Kind.RECORDS, part, partial(row_block.check, rows=rows, layout=self.plan.layout))
            for part, rows in parts
        ]

    def lock_key(self, number: int) -> BlobKey:
        """Return the key whose lock the maker of a row group holds."""
        return self._lock_key(number, "make")

    def _lock_key(self, number: int, purpose: str) -> BlobKey:
        return self._key(number, Kind.LOCK, f"{purpose} row group")

    def _key(self, number: int, kind: Kind, part: str, check: Check | None = None) -> BlobKey:
        file, plan = self.manifest.row_groups[number].file, self.plan
        return self.blocks.key(file, kind, plan.qualified(number, part), plan.group_name(number), check)


def _joined(blobs: list[Blob], ratio: int, layout: Layout) -> Generator[dict[str, Column], None, None]:
    """Yield the columns of `layout` for every `ratio` blobs together."""
    for first in range(0, len(blobs), ratio):
        run = blobs[first : first + ratio]
        yield {field.name: concatenate([blob.column(field) for blob in run]) for field in layout.fields}

"""A dataset's row groups as blobs of records in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.cache.blob_file import size_on_disk
from dataload.cache.single_flight import fetch_lock
from dataload.cache.tier import BlobKey, Check, Span, Tier, group_number
from dataload.formats.base import SHARED_BYTES
from dataload.rows import row_block
from dataload.rows.columns import Array
from dataload.rows.making.maker import Columns, Maker
from dataload.rows.making.row_group_memory import DECODED_COPIES, RankShare, RowGroupMemory
from dataload.rows.row_block import joined_columns
from dataload.runtime.cached_property import cached_property
from dataload.runtime.filemap import is_file_map
from dataload.runtime.redact import redacted
from dataload.telemetry.wait_timeline import doing

FOOTER_BYTES = 256  # at most, of a row group's column in footers and manifest, unless its values are long
SMALL_BYTES = 2 << 20  # of records: the thread that loads fewer decodes them itself
SMALL_ROWS = 16384  # with values of varying size, which footers may hide


class RowGroupCache:
    """The row groups of a dataset as blobs of records in the cache. Any thread may call it.

    Args:
        maker: Makes the columns of those that are not cached.

    Attributes:
        maker: As above.
        manifest: The dataset.
        plan: Names, lengths and sizes of the blobs.
        blocks: Reader of the dataset's files, and the cache.
        selection: The rows of each row group that the blobs hold; None: all.
        is_mapped: Whether a function of the user makes the rows.
    """

    _is_measured = False
    _shared_bytes = 0.0  # of a row, on average: in batches, but not in the cache

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.manifest = maker.manifest
        self.plan = maker.plan
        self.blocks = maker.blocks
        self.selection = maker.selection
        self.is_mapped = maker.is_mapped
        self._refused = set[int]()  # row groups that the cache did not keep when this process made them
        self._growth = 1.0  # the largest ratio of the bytes of a row group to their estimate

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroupCache, (self.maker,), {"rank": self.memory.rank}

    def __setstate__(self, state: dict[str, RankShare]) -> None:
        self.memory.use(state["rank"])

    @property
    def tier(self) -> Tier:
        """The cache of the blobs."""
        return self.blocks.tier

    @property
    def shared(self) -> bool:
        """Whether other processes can read the cached blobs."""
        return self.tier.shared

    @property
    def memory(self) -> RowGroupMemory:
        """The memory in which row groups are made."""
        return self.maker.memory

    # Look-ups

    def find(self, number: int, span: Span | None = None) -> list[memoryview] | None:
        """Return the blobs of a row group, or `span` of each; None unless this host has cached all of them."""
        return self.find_all(self.keys(number), span)

    def find_all(self, keys: Iterable[BlobKey], span: Span | None = None) -> list[memoryview] | None:
        """Return the blobs of these keys, or `span` of each; None unless this host has cached all of them."""
        found = []
        with doing("disk"):
            for key in keys:
                if (blob := self.tier.get(key, span)) is None:
                    return None
                found.append(blob)
        return found

    def cached_columns(self, number: int) -> Iterator[Columns] | None:
        """Return the columns of each blob of a row group, or None if this host has not cached them."""
        if (found := self.find(number)) is None:
            return self.maker.from_cache(number)
        layout = self.plan.layout
        return joined_columns(found, self.plan.lengths(number), layout, 1, layout)

    def keys(self, number: int) -> list[BlobKey]:
        """Return the keys of a row group's blobs."""
        parts = zip(self.plan.parts(number), self.plan.lengths(number), strict=True)
        return [
            self.key(number, part, partial(row_block.check, rows=rows, layout=self.plan.layout)) for part, rows in parts
        ]

    def key(self, number: int, part: str = "row group", check: Check | None = None) -> BlobKey:
        """Return the key of a part of a row group; by default, the one whose lock its maker holds."""
        file = self.manifest.row_groups[number].file
        return self.blocks.key(file, self.plan.qualified(number, part), self.plan.group_name(number), check)

    @cached_property
    def group_numbers(self) -> npt.NDArray[np.uint64]:
        """The number of each row group in the cache, uint64 [row groups]; see `BlobKey`. Equal ones share blobs."""
        keys = map(self.key, range(len(self.manifest.row_groups)))
        return np.fromiter((group_number(key.digest) for key in keys), np.uint64, len(self.manifest.row_groups))

    def touch(self) -> None:
        """Protect the cached blobs of all row groups from eviction as long as this process runs."""
        row_groups = range(len(self.manifest.row_groups))
        self.tier.touch(key for number in row_groups for key in self.keys(number))

    def is_transient(self, number: int) -> bool:
        """Return whether a row group is cached only in the transient region, or not at all."""
        return self.tier.is_transient(self.keys(number))

    @property
    def caches_everything(self) -> bool:
        """Whether every blob is still cached: the cache is neither full nor failing."""
        stats = self.blocks.counts()
        return not stats["refused"] and (stats["health"] or {}).get("state", "normal") == "normal"

    def is_refused(self, number: int) -> bool:
        """Return whether the cache did not keep a row group when this process made it last."""
        return number in self._refused

    def note_kept(self, number: int, made: list[memoryview]) -> None:
        """Note whether the cache kept a row group that was made or awaited, and by how much it exceeds its forecast.

        A small one tells nothing about the sizes of others.
        """
        is_kept = not self.shared or all(map(is_file_map, made))
        (self._refused.discard if is_kept else self._refused.add)(number)
        if (size := sum(map(len, made))) > SMALL_BYTES:
            self._growth = max(self._growth, size / max(1, self.plan.bytes_of(number)))

    def describe(self, number: int) -> str:
        """Name a row group and count the requests in flight, for the log."""
        group, limiter = self.manifest.row_groups[number], self.blocks.origin.limiter
        name = f"{redacted(self.blocks.origin.url_of(group.file.path))} row group {group.number}"
        return name if limiter is None else f"{name}, {limiter.in_flight} of {limiter.limit} requests in flight"

    def holder(self, number: int) -> int | None:
        """Return the other process of this host that makes or fetches a row group; None: none is known."""
        lock = self.key(number)
        return self.tier.holder(lock) or self.tier.holder(fetch_lock(lock))

    # Memory to make row groups

    def reservation(self, number: int) -> int:
        """Return the bytes of memory that a row group takes while it is fetched, at least 1."""
        return max(1, self.maker.reservation(number))

    def decoding_bytes(self, number: int) -> int:
        """Return the bytes that the decoding of a row group takes."""
        return self.maker.decoding_bytes(number, self._growth)

    def is_decoded_inline(self, number: int) -> bool:
        """Return whether the thread that loads a row group decodes it. Handing it to a decoder thread takes longer."""
        return self.plan.bytes_of(number) <= SMALL_BYTES

    def small_bytes(self, number: int) -> int:
        """Return the bytes that a row group takes from its first request until it is cached, if it is a small one.

        The thread that loads small row groups makes several at a time, each with one blob. 0: it is no such one, the
        cache cannot write several at a time, or it did not keep this one.
        """
        plan, group = self.plan, self.manifest.row_groups[number]
        most_rows = int(plan.blob_rows[number])
        if plan.layout.ragged:
            most_rows = min(most_rows, SMALL_ROWS)
        if (
            number in self._refused
            or self.tier.bulk is None
            or self.is_mapped
            or not 0 < group.rows <= most_rows
            or group.bytes > SMALL_BYTES
            or (size := self.decoding_bytes(number)) > DECODED_COPIES * SMALL_BYTES
            or self._shares_blocks(number)
        ):
            return 0
        return size + group.bytes

    def _shares_blocks(self, number: int) -> bool:
        """Return whether a row group of a remote file shares cached blocks with its neighbours. It waits for these."""
        groups = self.manifest.row_groups
        if self.blocks.origin.is_local or groups[number].bytes >= SHARED_BYTES:
            return False
        around = groups[max(0, number - 1) : number + 2]
        return sum(group.file == groups[number].file for group in around) > 1

    # Sizes

    def measure(self) -> None:
        """Measure the sizes of dictionary-coded values, which footers hide, by reading a few row groups.

        Raises:
            OriginError: The origin does not answer, or a file does not exist.
            DataError: A row group cannot be decoded.
        """
        sizes = self.maker.value_sizes
        if sizes is not None and not self._is_measured:
            means = sizes.means()
            self.plan.use_mean_sizes({name: mean.cached for name, mean in means.items()})
            self._shared_bytes = sum(mean.whole - mean.cached for mean in means.values())
            self._is_measured = True
            with suppress(AttributeError):  # It has not been estimated before.
                del self.sizes

    def bytes_of(self, number: int) -> int:
        """Return an estimate of the bytes of a row group's blobs. See `RowGroupPlan.bytes_of`."""
        return int(self.sizes[number])

    @cached_property
    def sizes(self) -> Array:
        """Estimates of the bytes of each row group's blobs, int64 [row groups]."""
        count = len(self.manifest.row_groups)
        return np.fromiter(map(self.plan.bytes_of, range(count)), np.int64, count)

    @property
    def is_estimate(self) -> bool:
        """Whether `num_bytes` comes from a sample, because the footers do not tell it."""
        sizes = self.maker.value_sizes
        return bool(self.plan.layout.ragged if sizes is None else sizes.coded)

    @property
    def num_bytes(self) -> int:
        """Estimate of the bytes of the blobs of all row groups."""
        return int(self.sizes.sum())

    @property
    def row_bytes(self) -> int:
        """Estimate of the mean bytes of a row in batches, at least 1."""
        rows = max(1, int(self.plan.row_starts[-1]))
        return max(1, int(self.num_bytes / rows + self._shared_bytes))

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

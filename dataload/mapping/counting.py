"""Passes over all rows of a dataset that count something, once for each host, or for a cluster.

A pass makes a blob for each row group, which has the counts, as other row groups are made: of several processes and
hosts one makes it, and after an end, the next pass finds what this one has counted. The rows go into the cache on the
way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Object
from dataload.cache.tier import BlobKey
from dataload.catalog.footer_cache import Metadata
from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.mapping.map_maker import NO_BORDER, MapMaker, OfOthers
from dataload.mapping.plan import MappedPlan
from dataload.mapping.stage import Stage
from dataload.rows import row_block
from dataload.rows.columns import Dense, Ragged
from dataload.rows.making.maker import Columns
from dataload.rows.making.pipeline import made
from dataload.rows.making.row_group_memory import MemoryNeed, RowGroupMemory
from dataload.rows.row_block import Blob
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_plan import RowGroupPlan
from dataload.runtime.executor import DaemonExecutor, awaited
from dataload.runtime.filemap import is_file_map
from dataload.runtime.progress import ProgressLines

Array = npt.NDArray[np.int64]

VERSION = 2
UNKNOWN = 2**32 - 1  # a length that is none, such as a negative number
COUNTS = pa.field("\0counts", pa.list_(pa.uint32()))
"""The column of the counts of a row group, which is a single row."""


def with_counts(source: RowGroupCache, stage: Stage) -> Stage:
    """Return a stage of `flat_map` with the rows that it makes of each row group. The first call counts them.

    Args:
        source: The row groups that are mapped.
        stage: The stage, whose rows are not counted.

    Raises:
        ConfigError: The function makes no row, or it has changed.
        DataError: The function failed. It names file, row group and row.
        OriginError: The origin failed.
    """
    groups, counts = stage.manifest.row_groups, stage.counts
    assert counts is not None

    def count() -> bytes:
        made_rows, rows = np.zeros(len(groups), "<i8"), stage.manifest.block_lengths
        maker = RowMaker(RowGroupCache(MapMaker(source, stage)), source, stage)
        for number, found in each_counted(maker, np.flatnonzero(rows).tolist(), f"the rows of {stage.title}"):
            made_rows[number] = found.sum()
        return made_rows.tobytes()

    [rows] = counted_once(source, f"flat_map {VERSION} {stage.key} {source.plan.digest}", stage.manifest, count)
    if not rows.any():
        raise ConfigError(f"{stage.title} makes no row of any of the {stage.manifest.num_rows:,} rows: return some")
    return replace(stage, counts=replace(counts, rows=rows))


def counted_once(source: RowGroupCache, what: str, manifest: Manifest, count: Callable[[], bytes]) -> Array:
    """Return numbers of each row group, int64 [numbers, row groups]. One process of the host counts them.

    Args:
        source: The row groups.
        what: Names the numbers.
        manifest: The dataset.
        count: Returns them as little-endian bytes.
    """
    groups = manifest.row_groups

    def parse(data: memoryview) -> Array:
        found = np.frombuffer(data, "<i8").astype(np.int64)
        if len(found) % len(groups) or found.min(initial=0) < 0:
            raise ValueError("the counts are of other row groups")
        return found.reshape(-1, len(groups))

    first = Object(groups[0].file.path, 0, manifest.fingerprint)
    return Metadata(source.blocks, first, what, parse).get_or_make_once(count)


def each_counted(
    maker: CountMaker, numbers: Sequence[int], what: str, of: Callable[[int, Array], Any] = lambda _, counts: counts
) -> Iterator[tuple[int, Any]]:
    """Yield the counts of these row groups, in order. Those that were counted before are not read again.

    Args:
        maker: Counts.
        numbers: The row groups.
        what: What is counted, for the log.
        of: Returns what is yielded of a row group and its counts, in a thread.
    """
    cache = RowGroupCache(maker)
    ended = threading.Event()
    [field] = cache.plan.layout.fields

    def count(number: int) -> Any:
        if ended.is_set():
            return None
        try:
            [blob] = made(cache, number)
        except BaseException:
            ended.set()  # This thread would begin with another one before the caller knows.
            raise
        column = Blob(blob, 1, cache.plan.layout).column(field)
        assert isinstance(column, Ragged)
        return of(number, column.values.astype(np.int64))

    progress = ProgressLines(f"counting {what}", len(numbers), "row groups")
    threads = DaemonExecutor(IN_FLIGHT, "dataload-count")  # a row group each; the memory budget bounds their bytes
    ahead = ((number, threads.submit(count, number)) for number in numbers)
    calls = deque(islice(ahead, 2 * IN_FLIGHT))  # not all: the counts of a billion rows take gigabytes
    try:
        while calls:
            number, call = calls.popleft()
            calls.extend(islice(ahead, 1))
            yield number, awaited(call)
            progress.advance(1)
    finally:
        ended.set()
    cache.blocks.settle()


class CountMaker(OfOthers):
    """Makes a blob of counts for each row group. See `Maker`.

    Args:
        rows: The row groups whose rows are counted. Their blobs are cached on the way, as long as the cache keeps them.
        source: The row groups that these are made of.
    """

    selection = None
    plan: RowGroupPlan

    def __init__(self, rows: RowGroupCache, source: RowGroupCache) -> None:
        self._rows, self._source = rows, source
        self.blocks, self.memory = rows.blocks, rows.memory
        whole = Manifest(pa.schema([COUNTS]), (), source.manifest.fingerprint)
        groups = (replace(group, rows=1, sizes=(4 * group.rows,), constants=()) for group in source.manifest.row_groups)
        self.manifest = replace(whole, row_groups=tuple(groups))
        self._is_kept = True

    @property
    def need(self) -> MemoryNeed:
        return self._rows.maker.need

    def share(self, memory: RowGroupMemory) -> None:
        self.memory = memory
        self._rows.maker.share(memory)

    def decoding_bytes(self, number: int, growth: float) -> int:
        return self._rows.maker.decoding_bytes(number, growth)

    def head(self, number: int, rows: int) -> Iterator[tuple[Columns, int]]:
        raise NotImplementedError

    def _put(self, number: int, key: BlobKey, columns: Columns, rows: int, *, anew: bool) -> None:
        """Cache a blob of rows, unless the cache is full. anew: even if it is there."""
        cache = self._rows
        if anew:
            # A process may have died before it found out that it had packed damaged bytes.
            cache.tier.retract([key])
        if self._is_kept:
            name = self.manifest.row_groups[number].name
            fill = partial(row_block.pack, columns, rows, cache.plan.layout, key.digest, name)
            self._is_kept = not cache.shared or is_file_map(cache.tier.get_or_fill(key, fill))


class RowMaker(CountMaker):
    """Counts the rows that a function of `flat_map` makes.

    Args:
        mapped: The mapped row groups.
        source: The row groups that are mapped.
        stage: The stage.
    """

    def __init__(self, mapped: RowGroupCache, source: RowGroupCache, stage: Stage) -> None:
        super().__init__(mapped, source)
        self.plan = MappedPlan(self.manifest, [COUNTS.name], replace(stage, row_bytes={}), source.plan)

    def _made(self, columns: Iterable[Columns], number: int) -> Generator[Columns, None, None]:
        """Yield the number of rows of a row group, once they are cached."""
        maker, plan = self._rows.maker, self._rows.plan
        assert isinstance(maker, MapMaker)
        assert isinstance(plan, MappedPlan)
        total = 0
        with closing(maker.blobs(columns, number, plan.most_rows, NO_BORDER)) as blobs:
            for found, rows in blobs:
                # One that is not full is the last of its row group.
                check = partial(row_block.check, rows=rows, layout=plan.layout)
                key = self._rows.key(number, plan.part(total, total + rows), check)
                self._put(number, key, found, rows, anew=bool(total) or rows == plan.most_rows)
                total += rows
        yield _column([total])


class LengthMaker(CountMaker):
    """Counts the values of each document.

    Args:
        documents: The row groups of the documents.
        column: The column of their values, or of integers: the lengths themselves.
    """

    def __init__(self, documents: RowGroupCache, column: str) -> None:
        super().__init__(documents, documents)
        self._column = column
        self.plan = LengthPlan(self.manifest, column, documents.plan)

    def _made(self, columns: Iterable[Columns], number: int) -> Generator[Columns, None, None]:
        """Yield the values of each document of a row group, once they are cached."""
        cache, lengths = self._rows, []
        is_cached = cache.find(number, (0, 0)) is not None
        keys = cache.keys(number)
        for found, key, rows in zip(columns, keys, cache.plan.lengths(number), strict=True):
            if not is_cached:
                self._put(number, key, found, rows, anew=len(keys) > 1)
            own = found[self._column]
            assert isinstance(own, Ragged | Dense)
            lengths.append(np.diff(own.offsets) if isinstance(own, Ragged) else _checked(own.values))
        yield _column(np.concatenate(lengths))


class LengthPlan(RowGroupPlan):
    """The blobs of the lengths of documents, which are named as the documents are."""

    def __init__(self, manifest: Manifest, column: str, documents: RowGroupPlan) -> None:
        super().__init__(manifest, [COUNTS.name], made_by=[f"lengths {VERSION}", column])
        self._documents = documents

    def qualified(self, number: int, part: str) -> str:
        return f"{super().qualified(number, part)} of {self._documents.group_name(number)}"

    def group_name(self, number: int) -> str:
        return f"{super().group_name(number)} of {self._documents.group_name(number)}"


def _checked(values: Array) -> Array:
    """Return integers of any size as lengths."""
    return np.where((values >= 0) & (values < UNKNOWN), values, UNKNOWN).astype(np.int64)


def _column(counts: Sequence[int] | Array) -> Columns:
    return {COUNTS.name: Ragged(np.array(counts, np.uint32), np.array([0, len(counts)]))}

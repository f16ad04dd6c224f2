"""The pass that counts the rows that a function of `flat_map` makes, once for each host, or for a cluster.

It makes a blob for each row group, which has the number, as other row groups are made: of several processes and hosts
one makes it, and after an end, the next pass finds what this one has counted. The rows go into the cache on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Object
from dataload.catalog.footer_cache import Metadata
from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.mapping.map_maker import NO_BORDER, MapMaker, OfOthers
from dataload.mapping.plan import MappedPlan
from dataload.mapping.stage import Stage
from dataload.rows import row_block
from dataload.rows.columns import Dense
from dataload.rows.making.maker import Columns
from dataload.rows.making.pipeline import made
from dataload.rows.making.row_group_memory import MemoryNeed, RowGroupMemory
from dataload.rows.row_block import Blob
from dataload.rows.row_group_cache import RowGroupCache
from dataload.runtime.executor import DaemonExecutor, awaited
from dataload.runtime.filemap import is_file_map
from dataload.runtime.progress import ProgressLines

Array = npt.NDArray[np.int64]

VERSION = 1
COUNT = pa.field("\0rows", pa.int64())
"""The column of the number of rows of a row group."""


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

    def parse(data: memoryview) -> Array:
        found = np.frombuffer(data, "<i8").astype(np.int64)
        if len(found) != len(groups) or found.min(initial=0) < 0:
            raise ValueError("the counts are of other row groups")
        return found

    first = Object(groups[0].file.path, 0, stage.manifest.fingerprint)
    what = f"flat_map {VERSION} {stage.key} {source.plan.digest}"
    rows = Metadata(source.blocks, first, what, parse).get_or_make_once(lambda: _count(source, stage).tobytes())
    if not rows.any():
        raise ConfigError(f"{stage.title} makes no row of any of the {stage.manifest.num_rows:,} rows: return some")
    return replace(stage, counts=replace(counts, rows=rows))


def _count(source: RowGroupCache, stage: Stage) -> Array:
    """Return the rows that a function makes of each row group. Row groups that were counted before are not called."""
    cache = RowGroupCache(CountMaker(RowGroupCache(MapMaker(source, stage)), source, stage))
    given = stage.manifest.block_lengths
    rows, filled = np.zeros(len(given), "<i8"), np.flatnonzero(given).tolist()
    ended = threading.Event()
    [field] = cache.plan.layout.fields

    def count(number: int) -> int:
        if ended.is_set():
            return 0
        [blob] = made(cache, number)
        column = Blob(blob, 1, cache.plan.layout).column(field)
        assert isinstance(column, Dense)
        return int(column.values[0])

    progress = ProgressLines(f"counting the rows of {stage.title}", len(filled), "row groups")
    threads = DaemonExecutor(IN_FLIGHT, "dataload-count")  # a row group each; the memory budget bounds their bytes
    calls = [(number, threads.submit(count, number)) for number in filled]
    try:
        for number, call in calls:
            rows[number] = awaited(call)
            progress.advance(1)
    finally:
        ended.set()
    cache.blocks.settle()
    return rows


class CountMaker(OfOthers):
    """Makes a blob of one number for each row group: of the rows that a function makes of it. See `Maker`.

    Args:
        mapped: The mapped row groups, whose blobs are cached on the way, as long as the cache keeps them.
        source: The row groups that are mapped.
        stage: The stage.
    """

    selection = None

    def __init__(self, mapped: RowGroupCache, source: RowGroupCache, stage: Stage) -> None:
        self._mapped, self._source, self._stage = mapped, source, stage
        self.blocks, self.memory = mapped.blocks, mapped.memory
        whole = Manifest(pa.schema([COUNT]), (), stage.manifest.fingerprint)
        groups = (replace(group, rows=1, sizes=(), constants=()) for group in stage.manifest.row_groups)
        self.manifest = replace(whole, row_groups=tuple(groups))
        self.plan = MappedPlan(self.manifest, [COUNT.name], replace(stage, row_bytes={}), source.plan)
        self._is_kept = True

    @property
    def need(self) -> MemoryNeed:
        return self._mapped.maker.need

    def share(self, memory: RowGroupMemory) -> None:
        self.memory = memory
        self._mapped.maker.share(memory)

    def decoding_bytes(self, number: int, growth: float) -> int:
        return self._mapped.maker.decoding_bytes(number, growth)

    def head(self, number: int, rows: int) -> Iterator[tuple[Columns, int]]:
        raise NotImplementedError

    def _made(self, columns: Iterable[Columns], number: int) -> Generator[Columns, None, None]:
        """Yield the number of rows of a row group, once they are cached."""
        maker, plan = self._mapped.maker, self._mapped.plan
        assert isinstance(maker, MapMaker)
        assert isinstance(plan, MappedPlan)
        total = 0
        with closing(maker.blobs(columns, number, plan.most_rows, NO_BORDER)) as blobs:
            for found, rows in blobs:
                self._put(number, total, found, rows)
                total += rows
        yield {COUNT.name: Dense(np.array([total]))}

    def _put(self, number: int, first: int, columns: Columns, rows: int) -> None:
        """Cache a blob of mapped rows, unless the cache is full. One that is not full is the last of its row group."""
        cache, plan = self._mapped, self._mapped.plan
        assert isinstance(plan, MappedPlan)
        key = cache.key(number, plan.part(first, first + rows), partial(row_block.check, rows=rows, layout=plan.layout))
        if first or rows == plan.most_rows:
            # A process may have died before it found out that it had packed damaged bytes.
            cache.tier.retract([key])
        if self._is_kept:
            name = self.manifest.row_groups[number].name
            blob = cache.tier.get_or_fill(key, partial(row_block.pack, columns, rows, plan.layout, key.digest, name))
            self._is_kept = not cache.shared or is_file_map(blob)

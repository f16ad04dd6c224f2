"""Parts of a loader alone: the network, the decoder, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dataload.benchmarks.batches import Batch, batches_of, transformed, values
from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET, Setting

IN_FLIGHT = 16
RANGE_BYTES = 8 << 20
RUN_BYTES = 1 << 20  # fits into the cache of a core


class Saturator:
    """Concurrent ranged GETs of every file into reused buffers. The bytes are not read.

    An epoch yields numbers of rows, in proportion to the bytes that have arrived.
    """

    def __init__(self, setting: Setting) -> None:
        self._wire = Wire(setting.endpoint_url, f"{BUCKET}/{setting.prefix}", RANGE_BYTES)
        self._rows = setting.workload.rows
        self._ranges = [
            (path.name, start, min(start + RANGE_BYTES, path.stat().st_size))
            for path in sorted(setting.files.glob("*.parquet"))
            for start in range(0, path.stat().st_size, RANGE_BYTES)
        ]
        self._pool = ThreadPoolExecutor(IN_FLIGHT)

    def epoch(self, number: int) -> Iterator[int]:
        order = np.random.default_rng(number).permutation(len(self._ranges))
        total = sum(stop - start for _, start, stop in self._ranges)
        arrived = rows = 0
        for num_bytes in self._pool.map(self._wire.get, [self._ranges[index] for index in order]):
            arrived += num_bytes
            yield self._rows * arrived // total - rows
            rows = self._rows * arrived // total

    def close(self) -> None:
        self._pool.shutdown()
        self._wire.close()


class Decode:
    """Arrow decoding Parquet files from the page cache on every core.

    It slices each column of each batch. With many columns and small batches, a loader may be faster.
    """

    def __init__(self, setting: Setting) -> None:
        self._workload = setting.workload
        self._groups = [
            (path, number)
            for path in sorted(setting.files.glob("*.parquet"))
            for number in range(pq.read_metadata(path).num_row_groups)
        ]
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def epoch(self, number: int) -> Iterator[Batch]:  # noqa: ARG002 - each epoch reads the files in order
        for batches in self._pool.map(self._decode, self._groups):
            yield from batches

    def close(self) -> None:
        self._pool.shutdown()

    def _decode(self, group: tuple[Path, int]) -> list[Batch]:
        path, number = group
        with pq.ParquetFile(path, memory_map=True) as file:
            return list(batches_of(file.read_row_group(number, use_threads=False), self._workload))


class Gather:
    """Shuffled batches from rows in memory. One gather makes many small batches; bytes are not copied."""

    def __init__(self, setting: Setting) -> None:
        self._workload = workload = setting.workload
        table = pq.read_table(setting.files)
        columns = {name: values(table[name].combine_chunks()) for name in table.column_names}
        columns = transformed(columns, workload.prepare)
        if workload.features:
            columns["x"] = np.stack([columns.pop(name) for name in workload.features], axis=1)
        self._lists = {
            name: np.array([*column, None], object)[:-1] for name, column in columns.items() if isinstance(column, list)
        }
        self._arrays = {name: column for name, column in columns.items() if name not in self._lists}
        self._seed = setting.seed
        batch_bytes = workload.batch_size * sum(array[0].nbytes for array in self._arrays.values())
        self._batches_at_once = max(1, RUN_BYTES // batch_bytes)

    def epoch(self, number: int) -> Iterator[Batch]:
        size, at_once = self._workload.batch_size, self._batches_at_once
        order = np.random.default_rng([self._seed, number]).permutation(self._workload.rows)
        for first in range(0, len(order), at_once * size):
            run = order[first : first + at_once * size]
            arrays = {name: np.take(array, run, axis=0, mode="clip") for name, array in self._arrays.items()}
            lists: dict[str, list[Any]] = {name: array[run].tolist() for name, array in self._lists.items()}
            for start in range(0, len(run), size):
                batch: Batch = {name: array[start : start + size] for name, array in arrays.items()}
                batch |= {name: values[start : start + size] for name, values in lists.items()}
                yield transformed(batch, self._workload.transform)

    def close(self) -> None:
        pass

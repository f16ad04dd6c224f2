"""What no loader can beat: the wire alone, the decoder alone, memory alone."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq

from dataload.benchmarks.batches import Batch, batches_of, transformed, values
from dataload.benchmarks.systems.base import BUCKET, Setting

RANGE_BYTES = 8 << 20
RUN_BATCHES = 32


class Saturator:
    """Ranged GETs of every file, many in flight, into buffers that are used again; nobody looks at the bytes.

    Its epoch yields counts of rows: the share of the dataset that has arrived.
    """

    def __init__(self, setting: Setting) -> None:
        self._address = urlsplit(setting.endpoint_url).netloc
        self._of_thread = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._rows = setting.workload.rows
        self._ranges = [
            (f"/{BUCKET}/{setting.prefix}/{path.name}", start, min(start + RANGE_BYTES, path.stat().st_size))
            for path in sorted(setting.files.glob("*.parquet"))
            for start in range(0, path.stat().st_size, RANGE_BYTES)
        ]
        self._pool = ThreadPoolExecutor(setting.in_flight)

    def epoch(self, number: int) -> Iterator[int]:
        order = np.random.default_rng(number).permutation(len(self._ranges))
        total = sum(stop - start for _, start, stop in self._ranges)
        arrived = rows = 0
        for num_bytes in self._pool.map(self._get, [self._ranges[index] for index in order]):
            arrived += num_bytes
            yield self._rows * arrived // total - rows
            rows = self._rows * arrived // total

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()

    def _get(self, wanted: tuple[str, int, int]) -> int:
        path, start, stop = wanted
        here = self._of_thread
        if not hasattr(here, "connection"):
            here.connection = http.client.HTTPConnection(self._address)
            self._connections.append(here.connection)
            here.buffer = memoryview(bytearray(RANGE_BYTES))
        here.connection.request("GET", path, headers={"Range": f"bytes={start}-{stop - 1}"})
        response = here.connection.getresponse()
        got = 0
        while read := response.readinto(here.buffer[got : stop - start]):
            got += read
        response.read()
        if got != stop - start:
            raise OSError(f"{path}: {got} bytes came instead of {stop - start}")
        return got


class Decode:
    """Parquet files on the local disk, in the page cache since they were made, decoded in file order by Arrow."""

    def __init__(self, setting: Setting) -> None:
        self._workload = setting.workload
        self._files = sorted(setting.files.glob("*.parquet"))

    def epoch(self, number: int) -> Iterator[Batch]:  # noqa: ARG002 - the order of the files, always
        for path in self._files:
            with pq.ParquetFile(path, memory_map=True) as file:
                for group in range(file.num_row_groups):
                    yield from batches_of(file.read_row_group(group), self._workload)

    def close(self) -> None:
        pass


class Gather:
    """Every row in memory; batches in shuffled order, gathered in runs: numbers by row, bytes as they lie."""

    def __init__(self, setting: Setting) -> None:
        self._workload = workload = setting.workload
        table = pq.read_table(setting.files)
        columns = {name: values(table[name].combine_chunks()) for name in table.column_names}
        if workload.features:
            columns["x"] = np.stack([columns.pop(name) for name in workload.features], axis=1)
        self._lists = {
            name: np.array([*column, None], object)[:-1] for name, column in columns.items() if isinstance(column, list)
        }
        self._arrays = {name: column for name, column in columns.items() if name not in self._lists}
        self._seed = setting.seed

    def epoch(self, number: int) -> Iterator[Batch]:
        size = self._workload.batch_size
        order = np.random.default_rng([self._seed, number]).permutation(self._workload.rows)
        for first in range(0, len(order), RUN_BATCHES * size):
            run = order[first : first + RUN_BATCHES * size]
            arrays = {name: np.take(array, run, axis=0, mode="clip") for name, array in self._arrays.items()}
            lists: dict[str, list[Any]] = {name: array[run].tolist() for name, array in self._lists.items()}
            for start in range(0, len(run), size):
                batch: Batch = {name: array[start : start + size] for name, array in arrays.items()}
                batch |= {name: values[start : start + size] for name, values in lists.items()}
                yield transformed(batch, self._workload.transform)

    def close(self) -> None:
        pass

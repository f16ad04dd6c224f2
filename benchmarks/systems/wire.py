"""The network alone: every byte of the files in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET, Setting

IN_FLIGHT = 16
RANGE_BYTES = 8 << 20


class Saturator:
    """Concurrent ranged GETs of every file into reused buffers. The bytes are not read.

    An epoch yields numbers of rows, in proportion to the bytes that have arrived.
    """

    def __init__(self, setting: Setting) -> None:
        self._wire = Wire(setting.endpoint_url, f"{BUCKET}/{setting.prefix}", RANGE_BYTES)
        self._setting = setting
        self._ranges = [
            (path.name, start, min(start + RANGE_BYTES, path.stat().st_size))
            for path in sorted(setting.files.glob("*.parquet"))
            for start in range(0, path.stat().st_size, RANGE_BYTES)
        ]
        ends = np.cumsum([stop - start for _, start, stop in self._ranges])
        self._rows = np.diff(setting.workload.rows * ends // ends[-1], prepend=0).tolist()
        self._pool = ThreadPoolExecutor(IN_FLIGHT)

    def epoch(self, number: int) -> Iterator[int]:
        order = np.random.default_rng(number).permutation(len(self._ranges))[self._setting.rank :: self._setting.ranks]
        arrived = self._pool.map(self._wire.get, [self._ranges[index] for index in order])
        for index, _ in zip(order, arrived, strict=True):
            yield self._rows[index]

    def close(self) -> None:
        self._pool.shutdown()
        self._wire.close()

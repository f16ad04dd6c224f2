"""SPDL: threads that apply the workload's function to single rows. The rows are in memory, as in `torch_rows`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from spdl.pipeline import PipelineBuilder

from dataload.benchmarks.batches import Batch, stacked
from dataload.benchmarks.systems.base import Setting
from dataload.benchmarks.systems.torch_rows import Rows

COLLATE_THREADS = 1
BATCHES_AHEAD = 3  # SPDL's default


class Spdl:
    """A pipeline of as many threads as other systems have workers, besides one that collates."""

    def __init__(self, setting: Setting) -> None:
        self._rows = Rows(setting)
        self._setting = setting

    def epoch(self, number: int) -> Iterator[Batch]:
        setting, threads = self._setting, max(1, self._setting.num_workers)
        order = np.random.default_rng([setting.seed, number]).permutation(len(self._rows))
        pipeline = (
            PipelineBuilder()
            .add_source(order.tolist())
            .pipe(self._rows.__getitem__, concurrency=threads)
            .aggregate(setting.batch_size)
            .pipe(stacked)
            .add_sink(BATCHES_AHEAD)
            .build(num_threads=threads + COLLATE_THREADS)
        )
        with pipeline.auto_stop():
            yield from pipeline

    def close(self) -> None:
        del self._rows

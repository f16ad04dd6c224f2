"""One first epoch of one system, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dataload.benchmarks.machine.usage import cpu_seconds
from dataload.benchmarks.origin import s3
from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.wire import RANGE_BYTES

IN_FLIGHT = 32  # as many as a process may have that is alone on its host
LEAST_BYTES = 1 << 20  # of a bare GET


@dataclass(frozen=True)
class Task:
    """What one process reads: a prefix at the origin, the same files on disk, its rank of `ranks`, and its cache.

    Attributes:
        batch_size: Rows of a batch of the loader. pyarrow makes larger ones.
        window: Row groups that the loader shuffles together; None: its default.
        ranges: Byte ranges (name, start, stop) that the bare GETs fetch; None: all files.
    """

    endpoint_url: str
    prefix: str
    files: str
    batch_size: int
    ranks: int = 1
    cache_bytes: int | None = None
    window: int | None = None
    ranges: list[tuple[str, int, int]] | None = None
    rank: int = 0
    cache_dir: str = ""


def _ours(task: Task) -> Iterator[int]:
    return _loader(task, f"s3://{BUCKET}/{task.prefix}", storage_options=s3.storage_options(task.endpoint_url))


def _local(task: Task) -> Iterator[int]:
    return _loader(task, task.files)


def _loader(task: Task, source: str, **options: Any) -> Iterator[int]:
    import dataload

    dataset = dataload.make_dataset(source, cache=dataload.CacheConfig(task.cache_dir, task.cache_bytes), **options)
    world = dataload.World(task.rank, task.ranks, task.rank, task.ranks)
    for batch in dataload.make_loader(dataset, task.batch_size, world=world, window=task.window):
        yield len(next(iter(batch.values())))


def _pyarrow(task: Task) -> Iterator[int]:
    import pyarrow.dataset as ds
    from pyarrow.fs import S3FileSystem

    store = S3FileSystem(
        access_key="testing", secret_key="testing", endpoint_override=task.endpoint_url, region="us-east-1"
    )
    for batch in ds.dataset(f"{BUCKET}/{task.prefix}", format="parquet", filesystem=store).to_batches():
        yield len(batch)


def _wire(task: Task) -> Iterator[int]:
    wire = Wire(task.endpoint_url, f"{BUCKET}/{task.prefix}", RANGE_BYTES)
    whole = [(path.name, 0, path.stat().st_size) for path in sorted(Path(task.files).glob("*.parquet"))]
    ranges = whole if task.ranges is None else task.ranges
    most = -(-sum(stop - start for _, start, stop in ranges) // IN_FLIGHT)  # so that all connections are used
    step = min(RANGE_BYTES, max(LEAST_BYTES, most))
    requests = [
        (name, first, min(first + step, stop)) for name, start, stop in ranges for first in range(start, stop, step)
    ]
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        yield from pool.map(wire.get, requests)
    wire.close()


def _decode(task: Task) -> Iterator[int]:
    groups = [
        (path, number)
        for path in sorted(Path(task.files).glob("*.parquet"))
        for number in range(pq.read_metadata(path).num_row_groups)
    ]

    def rows(group: tuple[Path, int]) -> int:
        with pq.ParquetFile(group[0], memory_map=True) as file:
            return int(file.read_row_group(group[1], use_threads=False).num_rows)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(rows, groups)


SYSTEMS = {
    "dataload": _ours,
    "dataload, local files": _local,
    "pyarrow": _pyarrow,
    "bare GETs": _wire,
    "bare decode": _decode,
}


def epoch(system: str, task: str) -> None:
    """Read one epoch in this process. Print a JSON object of its figures. task: the fields of Task as JSON."""
    if system.startswith("dataload"):  # Imports are not measured.
        for module in ("obstore", "dataload.dataset", "dataload.loader.factory"):
            import_module(module)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()  # until the other ranks are ready
    started, first, rows, cpu = time.perf_counter(), None, 0, cpu_seconds()
    for count in SYSTEMS[system](Task(**json.loads(task))):
        first = first or time.perf_counter() - started
        rows += count
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    figures = {"seconds": seconds, "first": first, "rows": rows, "cpu": cpu}
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    epoch(*sys.argv[1:])

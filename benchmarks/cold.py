"""The first epoch, by size of row groups: `python -m dataload.benchmarks.cold`.

For each shape of data, size of row groups and origin, the table compares the first epoch from an empty cache with
pyarrow's own S3 client, which scans the same files in order and keeps nothing, and with bare ranged GETs. Every
measurement runs in its own process, and the systems take turns.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Annotated, Any, Self

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table

from dataload.benchmarks.measure import cpu_seconds
from dataload.benchmarks.origin import Behaviour, Origin, s3
from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.floors import RANGE_BYTES

IN_FLIGHT = 16
SAMPLE_SECONDS = 0.05  # between two samples of memory and of requests in flight
BATCH_ROWS = 256
ORIGINS = {
    "near": Behaviour(latency=0.03, bytes_per_second=90e6),
    "far": Behaviour(latency=0.1, bytes_per_second=40e6),
    "unlimited": Behaviour(),
}


def _images(rng: np.random.Generator, size: int) -> pa.Table:
    lengths = rng.integers(90_000, 110_000, max(1, size // 100_000))
    return pa.table({"image": pa.array([rng.bytes(int(length)) for length in lengths], pa.binary())})


def _numbers(count: int) -> Callable[[np.random.Generator, int], pa.Table]:
    def make(rng: np.random.Generator, size: int) -> pa.Table:
        values = rng.random((count, max(1, size // (4 * count))), np.float32)
        return pa.table({f"f{column:04d}": values[column] for column in range(count)})

    return make


def _tokens(rng: np.random.Generator, size: int) -> pa.Table:
    lengths = rng.integers(256, 1792, max(1, size // 4096))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    values = rng.integers(0, 50_257, offsets[-1], dtype=np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))})


def _texts(rng: np.random.Generator, size: int) -> pa.Array:
    lengths = rng.integers(200, 800, max(1, size // 500))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    letters = rng.integers(97, 123, offsets[-1], dtype=np.uint8)
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(letters))


def _text(rng: np.random.Generator, size: int) -> pa.Table:
    return pa.table({"text": _texts(rng, size)})


def _codes(rng: np.random.Generator, size: int) -> pa.Table:
    distinct = _texts(np.random.default_rng(0), 500_000)
    codes = rng.integers(0, len(distinct), max(1, size // 500), dtype=np.int32)
    return pa.table({"text": pa.DictionaryArray.from_arrays(codes, distinct).cast(pa.string())})


SHAPES: dict[str, Callable[[np.random.Generator, int], pa.Table]] = {
    "images": _images,
    "numbers": _numbers(18),
    "wide": _numbers(2000),
    "tokens": _tokens,
    "text": _text,
    "codes": _codes,
}


def write(shape: str, group_bytes: int, num_bytes: int, folder: Path) -> None:
    """Write a dataset of `num_bytes`, in row groups of `group_bytes` before encoding. Keep one that is complete."""
    complete = folder.with_name(f"{folder.name}.complete")
    if complete.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    groups, rng = max(1, num_bytes // group_bytes), np.random.default_rng(0)
    per_file = max(1, (256 << 20) // group_bytes)
    for number in range(0, groups, per_file):
        tables = [SHAPES[shape](rng, group_bytes) for _ in range(number, min(groups, number + per_file))]
        codec = "zstd" if shape in ("text", "codes") else "none"
        with pq.ParquetWriter(
            folder / f"{number:06d}.parquet", tables[0].schema, compression=codec, use_dictionary=shape == "codes"
        ) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(1, table.num_rows))
    complete.touch()


@dataclass(frozen=True)
class Task:
    """What one process reads: a prefix at the origin, the same files on disk, and its rank of `ranks`."""

    endpoint_url: str
    prefix: str
    files: str
    cache_dir: str
    rank: int
    ranks: int


def _ours(task: Task) -> Iterator[int]:
    import dataload

    dataset = dataload.make_dataset(
        f"s3://{BUCKET}/{task.prefix}",
        storage_options=s3.storage_options(task.endpoint_url),
        cache=dataload.CacheConfig(task.cache_dir),
    )
    world = dataload.World(task.rank, task.ranks, task.rank, task.ranks)
    for batch in dataload.make_loader(dataset, BATCH_ROWS, world=world):
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
    ranges = [
        (path.name, start, min(start + RANGE_BYTES, path.stat().st_size))
        for path in sorted(Path(task.files).glob("*.parquet"))
        for start in range(0, path.stat().st_size, RANGE_BYTES)
    ]
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        yield from pool.map(wire.get, ranges)
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


SYSTEMS = {"dataload": _ours, "pyarrow": _pyarrow, "bare GETs": _wire, "bare decode": _decode}


def epoch(system: str, task: str) -> None:
    """Read one epoch in this process. Print a JSON object of its figures. task: the fields of Task as JSON."""
    if system == "dataload":  # Imports are not measured.
        for module in ("s3fs", "obstore", "dataload.dataset", "dataload.loader"):
            import_module(module)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()  # until the other ranks are ready
    peak = _Peak()
    with peak:
        started, first, rows, cpu = time.perf_counter(), None, 0, cpu_seconds()
        for count in SYSTEMS[system](Task(**json.loads(task))):
            first = first or time.perf_counter() - started
            rows += count
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    figures = {"seconds": seconds, "first": first, "rows": rows, "cpu": cpu, "memory": peak.num_bytes}
    sys.stdout.write(json.dumps(figures))


class _Peak:
    """Samples the anonymous memory of this process and its children. Attribute `num_bytes`: the most seen."""

    def __enter__(self) -> Self:
        self.num_bytes, self._end = 0, Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        start = _anonymous()
        while not self._end.wait(SAMPLE_SECONDS):
            self.num_bytes = max(self.num_bytes, _anonymous() - start)


def _anonymous() -> int:
    total = 0
    for process in _processes():
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return total


def _processes() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def measure(system: str, origin: Origin, prefix: str, files: Path, folder: Path, ranks: int) -> dict[str, float]:
    """Run one epoch of a system with an empty cache, in `ranks` processes. Return the figures of the host."""
    origin.reset()
    server = psutil.Process(origin.pid)
    before = sum(server.cpu_times()[:2])
    call = "import sys; from dataload.benchmarks.cold import epoch; epoch(*sys.argv[1:])"
    with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as cache:
        tasks = [Task(origin.endpoint_url, prefix, str(files), cache, rank, ranks) for rank in range(ranks)]
        command = [sys.executable, "-c", call, system]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = [subprocess.Popen([*command, json.dumps(asdict(task))], **pipes) for task in tasks]
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(process.communicate()[0]) for process in running]
    origin_cpu = sum(server.cpu_times()[:2]) - before
    stats, num_bytes = origin.stats(), sum(path.stat().st_size for path in files.glob("*.parquet"))
    return {
        "seconds": max(figures["seconds"] for figures in found),
        "first": max(figures["first"] for figures in found),
        "rows": sum(figures["rows"] for figures in found),
        "cpu": sum(figures["cpu"] for figures in found),
        "memory": sum(figures["memory"] for figures in found),
        "bytes": stats["get_bytes"] / num_bytes,
        "requests": stats["get_requests"],
        "duplicates": stats["duplicate_gets"],
        "in_flight": stats["most_gets_at_once"],
        "busy": busy(origin.gets_over_time(), origin.behaviour.latency),
        "origin_cpu": origin_cpu,
    }


def busy(changes: list[tuple[float, int]], latency: float) -> float:
    """Return the mean share of `IN_FLIGHT` requests under way, except in the first 0.5 s and the last two latencies.

    It is NaN if the requests do not last that long.

    Args:
        changes: (seconds, requests under way from then on).
        latency: Latency of a request in seconds.
    """
    begin, end = (changes[0][0] + 0.5, changes[-1][0] - 2 * latency) if changes else (0.0, 0.0)
    if end <= begin:
        return math.nan
    total = 0.0
    for (at, count), (until, _) in pairwise(changes):
        total += max(0.0, min(until, end) - max(at, begin)) * min(count, IN_FLIGHT)
    return total / (IN_FLIGHT * (end - begin))


def bound(found: dict[str, dict[str, float]], system: str) -> float:
    """Return the seconds that the wire, or the processors of this machine, need at least.

    Args:
        found: The figures of each system.
        system: The system whose processor time counts, with that of the origin beside it.
    """
    cpu = found[system]["cpu"] + found[system]["origin_cpu"]
    wire = found["bare GETs"]["seconds"] if "bare GETs" in found else 0.0
    return max(wire, cpu / len(os.sched_getaffinity(0)))


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Shapes of the data; default: all.")] = None,
    group: Annotated[list[float] | None, typer.Option(help="Sizes of row groups in MB.")] = None,
    origin: Annotated[list[str] | None, typer.Option(help="Origins; default: all.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="Systems; default: all.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the host.")] = 1,
    megabytes: Annotated[int, typer.Option(help="Size of a dataset in MB.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Measurements of each system.")] = 5,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
    output: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Measure first epochs by the size of row groups."""
    table = Table("shape", "row groups, MB", "origin", "system", "seconds", "low", "high", "first batch, s", "CPU s/GB",
                  "memory, MB", "bytes", "duplicates", "requests", "in flight", "/ bound", title="Medians")  # fmt: skip
    data, every = folder.absolute() / "data", []
    for kind, size in product(shape or SHAPES, group or [1, 10, 50, 130, 500]):
        prefix = f"cold/{kind}-{size:g}-{megabytes}"
        files = data / BUCKET / prefix
        write(kind, int(size * 1e6), megabytes * 10**6, files)
        gigabytes = sum(path.stat().st_size for path in files.glob("*.parquet")) / 1e9
        for place in origin or ORIGINS:
            with Origin(data, behaviour=ORIGINS[place]) as server:
                names = system or list(SYSTEMS)
                found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
                for _, name in product(range(rounds), names):
                    found[name].append(measure(name, server, prefix, files, folder.absolute(), ranks))
            medians = {
                name: {key: statistics.median(run[key] for run in figures) for key in figures[0]}
                for name, figures in found.items()
            }
            for name, figures in found.items():
                middle = medians[name]
                seconds = [run["seconds"] for run in figures]
                table.add_row(
                    kind, f"{size:g}", place, name, f"{middle['seconds']:.2f}", f"{min(seconds):.2f}",
                    f"{max(seconds):.2f}", f"{middle['first']:.2f}", f"{middle['cpu'] / gigabytes:.2f}",
                    f"{middle['memory'] / 1e6:.0f}", f"{middle['bytes']:.3f}", f"{middle['duplicates']:.0f}",
                    f"{middle['requests']:.0f}", f"{middle['busy']:.0%}",
                    f"{middle['seconds'] / bound(medians, name):.2f}",
                )  # fmt: skip
                every.append({"shape": kind, "group": size, "origin": place, "system": name, "runs": figures})
                if output is not None:
                    output.write_text(json.dumps(every, indent=1))
    Console(width=180).print(table)


if __name__ == "__main__":
    typer.run(main)

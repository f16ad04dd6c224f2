"""A cold scan of a gigabyte from the origin into the cache: `python -m dataload.benchmarks.scan [--wire]`.

Other readers of the same objects and bare ranged GETs run beside it. The readers alternate, each in its own process.
With --wire the origin has the latency of a network and 20 MB/s for each connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dataload.benchmarks.origin import Origin, s3
from dataload.benchmarks.origin.behaviour import S3
from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache.blob_file import WRITTEN_BYTES

OBJECT_BYTES = 64 << 20
RANGE_BYTES = 8 << 20
IN_FLIGHT = 16
WIRE_RATE = 20e6
FLOOR = "floor: ranged GETs"
STORED = "floor: ranged GETs into plain files"


@dataclass(frozen=True)
class Scan:
    """The input of a reader.

    Args:
        endpoint_url: URL of the origin.
        objects: Number of objects.
        object_bytes: Size of an object in bytes.
        cache_dir: Folder for a cache.
    """

    endpoint_url: str
    objects: int
    object_bytes: int
    cache_dir: str

    @property
    def folder(self) -> str:
        """Bucket and prefix of the objects."""
        return f"{BUCKET}/scan-{self.objects}-of-{self.object_bytes}"

    @property
    def names(self) -> list[str]:
        return [f"{number:02d}.bin" for number in range(self.objects)]

    @property
    def paths(self) -> list[str]:
        return [f"{self.folder}/{name}" for name in self.names]

    @property
    def ranges(self) -> list[tuple[str, int, int]]:
        """(name, start, stop) of all ranges of all objects."""
        starts = range(0, self.object_bytes, RANGE_BYTES)
        return [(name, start, min(start + RANGE_BYTES, self.object_bytes)) for name in self.names for start in starts]

    @property
    def options(self) -> dict[str, Any]:
        return s3.storage_options(self.endpoint_url)


def saturator(scan: Scan) -> int:
    return _by_range(scan, lambda _, data: len(data))


def stored(scan: Scan) -> int:
    """Write the bytes to plain files without checksums and without an index: the least work of a cache."""

    def store(requested: tuple[str, int, int], data: memoryview) -> int:
        name, start, _ = requested
        pieces = range(0, len(data), WRITTEN_BYTES)  # the cache's size of a write, which is faster than one write
        return sum(os.pwrite(files[name].fileno(), data[at : at + WRITTEN_BYTES], start + at) for at in pieces)

    with ExitStack() as opened:
        files = {name: opened.enter_context((Path(scan.cache_dir) / name).open("wb")) for name in scan.names}
        return _by_range(scan, store)


def _by_range(scan: Scan, use: Callable[[tuple[str, int, int], memoryview], int]) -> int:
    """Fetch all ranges concurrently. `use` processes each range and returns its bytes. Return the sum."""
    wire = Wire(scan.endpoint_url, scan.folder, RANGE_BYTES)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        total = sum(pool.map(lambda requested: use(requested, wire.read(requested)), scan.ranges))
    wire.close()
    return total


def tiercache(scan: Scan) -> int:
    import fsspec

    fs = fsspec.filesystem(
        "tiercache",
        target_protocol="s3",
        target_options=scan.options,
        cache_dir=scan.cache_dir,
        skip_instance_cache=True,
    )
    fs.prefetch(scan.folder, wait=True)
    return int(fs.stats()["bytes_origin"])


def cat_ranges(scan: Scan) -> int:
    import s3fs

    names, starts, stops = map(list, zip(*scan.ranges, strict=True))
    paths = [f"{scan.folder}/{name}" for name in names]
    filesystem = s3fs.S3FileSystem(**scan.options)
    return sum(map(len, filesystem.cat_ranges(paths, starts, stops, batch_size=IN_FLIGHT)))


def arrow_over_s3fs(scan: Scan) -> int:
    import pyarrow.fs
    import s3fs

    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(s3fs.S3FileSystem(**scan.options)))
    return _by_file(scan, filesystem.open_input_file)


def blockcache(scan: Scan) -> int:
    import fsspec

    filesystem = fsspec.filesystem(
        "blockcache", target_protocol="s3", target_options=scan.options, cache_storage=scan.cache_dir
    )
    return _by_file(scan, filesystem.open, threads=1)  # blockcache is not thread-safe


def sequential(scan: Scan) -> int:
    import s3fs

    return _by_file(scan, s3fs.S3FileSystem(**scan.options).open, threads=1)


def _by_file(scan: Scan, opened: Callable[[str], Any], threads: int = IN_FLIGHT) -> int:
    """Read each object in a thread from beginning to end. Return the bytes."""

    def read(path: str) -> int:
        size = 0
        with opened(path) as file:
            while data := file.read(RANGE_BYTES):
                size += len(data)
        return size

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, scan.paths))


SCANNERS: dict[str, Callable[[Scan], int]] = {
    "dataload, into the cache": tiercache,
    "s3fs cat_ranges": cat_ranges,
    "pyarrow over s3fs": arrow_over_s3fs,
    "blockcache": blockcache,
    "s3fs, sequential open": sequential,
    STORED: stored,
    FLOOR: saturator,
}


def timed(name: str, scan: Scan) -> tuple[float, float, int]:
    """Return the seconds, CPU seconds and bytes of a scan, without the time of imports."""
    import fsspec  # noqa: F401
    import pyarrow.fs  # noqa: F401
    import s3fs  # noqa: F401

    started, cpu = perf_counter(), process_time()
    size = SCANNERS[name](scan)
    return perf_counter() - started, process_time() - cpu, size


def write(data: Path, scan: Scan) -> None:
    """Write the objects to the folder of an origin, unless they exist."""
    (data / scan.folder).mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(scan.paths):
        if not (data / path).exists() or (data / path).stat().st_size != scan.object_bytes:
            (data / path).write_bytes(np.random.default_rng(number).bytes(scan.object_bytes))


def main(
    wire: Annotated[bool, typer.Option(help="Give the origin a network's latency and bandwidth.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the readers alternate in each.")] = 3,
    objects: Annotated[int, typer.Option(min=1, help="Number of objects.")] = 16,
    object_bytes: Annotated[int, typer.Option(min=1, help="Size of an object in bytes.")] = OBJECT_BYTES,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
) -> None:
    """Measure a cold scan beside other readers."""
    data = folder.absolute() / "data"
    data.mkdir(parents=True, exist_ok=True)
    total = objects * object_bytes
    spawn = get_context("spawn")
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SCANNERS}
    with Origin(data) as origin:
        scan = Scan(origin.endpoint_url, objects, object_bytes, "")
        write(data, scan)
        origin.behave(latency=S3.latency if wire else 0.0, bytes_per_second=WIRE_RATE if wire else None)
        for _ in range(rounds):
            for name in SCANNERS:
                origin.reset()
                with TemporaryDirectory(dir=folder) as cache_dir, ProcessPoolExecutor(1, spawn) as process:
                    seconds, cpu, size = process.submit(timed, name, replace(scan, cache_dir=cache_dir)).result()
                if size != total:
                    raise ValueError(f"{name} read {size} bytes of {total}")
                stats = origin.stats()
                figures[name].append((total / seconds, cpu / total * 1e9, stats["get_bytes"] / total))
    table = Table("reader", "MB/s", "of the floor", "CPU, s/GB", "bytes", title=f"{total / 1e9:.2f} GB, cold")
    for name, rows in figures.items():
        rates, cpus, shares = zip(*rows, strict=True)
        ratios = [rate / floor for rate, (floor, *_) in zip(rates, figures[FLOOR], strict=True)]
        table.add_row(name, _range([rate / 1e6 for rate in rates]), _range(ratios), _range(cpus), _range(shares))
    Console(width=120).print(table)


def _range(values: list[float] | tuple[float, ...]) -> str:
    return f"{median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


if __name__ == "__main__":
    typer.run(main)

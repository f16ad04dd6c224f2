"""A cold scan: `python -m dataload.benchmarks.scan [--wire]`, a gigabyte from the origin into the cache.

Beside a bare saturator and other readers of the same objects, which take turns, each in a process of its own. With
--wire the origin answers as S3 does over a network: late, and 20 MB/s for each connection.
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

from dataload.benchmarks import s3
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.suite import WIRE_LATENCY
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.wire import Wire
from dataload.cache.local.blob_file import WRITTEN_BYTES

OBJECT_BYTES = 64 << 20
RANGE_BYTES = 8 << 20
IN_FLIGHT = 16
WIRE_RATE = 20e6
FLOOR = "floor: ranged GETs"
STORED = "the same, into plain files"


@dataclass(frozen=True)
class Scan:
    """What a scanner is told: where the objects are, how large each is, and a folder for a cache."""

    endpoint_url: str
    objects: int
    object_bytes: int
    cache_dir: str

    @property
    def folder(self) -> str:
        """Bucket and prefix."""
        return f"{BUCKET}/scan-{self.objects}-of-{self.object_bytes}"

    @property
    def names(self) -> list[str]:
        return [f"{number:02d}.bin" for number in range(self.objects)]

    @property
    def paths(self) -> list[str]:
        return [f"{self.folder}/{name}" for name in self.names]

    @property
    def ranges(self) -> list[tuple[str, int, int]]:
        """(name, start, stop) of all there is."""
        starts = range(0, self.object_bytes, RANGE_BYTES)
        return [(name, start, min(start + RANGE_BYTES, self.object_bytes)) for name in self.names for start in starts]

    @property
    def options(self) -> dict[str, Any]:
        return s3.storage_options(self.endpoint_url)


def saturator(scan: Scan) -> int:
    return _by_range(scan, lambda _, came: len(came))


def stored(scan: Scan) -> int:
    """The least that a cache has to do: what comes is written down, unproven and not to be found again."""

    def store(wanted: tuple[str, int, int], came: memoryview) -> int:
        name, start, _ = wanted
        pieces = range(0, len(came), WRITTEN_BYTES)  # as large as the cache's own, which is much faster than at once
        return sum(os.pwrite(files[name].fileno(), came[at : at + WRITTEN_BYTES], start + at) for at in pieces)

    with ExitStack() as opened:
        files = {name: opened.enter_context((Path(scan.cache_dir) / name).open("wb")) for name in scan.names}
        return _by_range(scan, store)


def _by_range(scan: Scan, use: Callable[[tuple[str, int, int], memoryview], int]) -> int:
    """All there is, in ranges, by a client that does nothing else. use: what is done with each, and how many bytes."""
    wire = Wire(scan.endpoint_url, scan.folder, RANGE_BYTES)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        got = sum(pool.map(lambda wanted: use(wanted, wire.read(wanted)), scan.ranges))
    wire.close()
    return got


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
    return _by_file(scan, filesystem.open, threads=1)  # It loses its books among several.


def sequential(scan: Scan) -> int:
    import s3fs

    return _by_file(scan, s3fs.S3FileSystem(**scan.options).open, threads=1)


def _by_file(scan: Scan, opened: Callable[[str], Any], threads: int = IN_FLIGHT) -> int:
    """Each object by a thread, from its beginning to its end."""

    def read(path: str) -> int:
        got = 0
        with opened(path) as file:
            while data := file.read(RANGE_BYTES):
                got += len(data)
        return got

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
    """(seconds, seconds of the processor, bytes) of a scan. What it imports is there before."""
    import fsspec  # noqa: F401
    import pyarrow.fs  # noqa: F401
    import s3fs  # noqa: F401

    started, cpu = perf_counter(), process_time()
    got = SCANNERS[name](scan)
    return perf_counter() - started, process_time() - cpu, got


def write(data: Path, scan: Scan) -> None:
    """The objects, in the folder that an origin serves, unless they are there."""
    (data / scan.folder).mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(scan.paths):
        if not (data / path).exists() or (data / path).stat().st_size != scan.object_bytes:
            (data / path).write_bytes(np.random.default_rng(number).bytes(scan.object_bytes))


def main(
    wire: Annotated[bool, typer.Option(help="An origin with a network's latency and rates.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often each reader runs, in turns.")] = 3,
    objects: Annotated[int, typer.Option(min=1, help="How many objects there are.")] = 16,
    object_bytes: Annotated[int, typer.Option(min=1, help="Bytes of each.")] = OBJECT_BYTES,
    folder: Annotated[Path, typer.Option(help="For the data: made once, kept for the next time.")] = Path(".bench"),
) -> None:
    """Measure a cold scan beside other readers."""
    data = folder.absolute() / "data"
    data.mkdir(parents=True, exist_ok=True)
    total = objects * object_bytes
    spawn = get_context("spawn")
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SCANNERS}
    with Origin(data) as origin:
        scan = Scan(origin.endpoint_url, objects, object_bytes, "")
        write(data, scan)
        origin.behave(latency=WIRE_LATENCY if wire else 0.0, bytes_per_second=WIRE_RATE if wire else None)
        for _ in range(rounds):
            for name in SCANNERS:
                origin.reset()
                with TemporaryDirectory(dir=folder) as cache_dir, ProcessPoolExecutor(1, spawn) as process:
                    seconds, cpu, got = process.submit(timed, name, replace(scan, cache_dir=cache_dir)).result()
                if got != total:
                    raise ValueError(f"{name} read {got} bytes of {total}")
                stats = origin.stats()
                seen[name].append((total / seconds, cpu / total * 1e9, stats["get_bytes"] / total))
    table = Table("reader", "MB/s", "of the floor", "CPU, s/GB", "bytes", title=f"{total / 1e9:.2f} GB, cold")
    for name, figures in seen.items():
        rates, cpus, shares = zip(*figures, strict=True)
        ratios = [rate / floor for rate, (floor, *_) in zip(rates, seen[FLOOR], strict=True)]
        table.add_row(name, _range([rate / 1e6 for rate in rates]), _range(ratios), _range(cpus), _range(shares))
    Console(width=120).print(table)


def _range(values: list[float] | tuple[float, ...]) -> str:
    return f"{median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


if __name__ == "__main__":
    typer.run(main)

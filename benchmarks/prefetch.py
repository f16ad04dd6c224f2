"""The effect of prefetching: `python -m dataload.benchmarks.prefetch [--part NAME]`, with an S3 of network latency.

Each part prints a table. The parts are the first epoch, alone and beside a training step; a CPU-bound step beside the
background decoder; a cache smaller than the data; two ranks of a host; the first batch; and footers of many files.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table
from s3fs import S3FileSystem

from dataload.benchmarks.origin import Origin
from dataload.benchmarks.origin.behaviour import S3, Behaviour
from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.floors import RANGE_BYTES
from dataload.benchmarks.workloads import Workload, workloads, write
from dataload.cache.config import CacheConfig
from dataload.cache.local.tier import LocalTier
from dataload.catalog.footer_cache import FOOTERS_IN_FLIGHT
from dataload.dataset import Dataset, make_dataset
from dataload.errors import ConfigError
from dataload.loader import Loader, make_loader
from dataload.rows.background_decoder.client import BackgroundDecoder, DemandSignal
from dataload.runtime.counters import Counters
from dataload.world import World

IN_FLIGHT = 16
MANY = 10_000  # files


@dataclass(frozen=True)
class Bench:
    """A workload's objects at an origin, and a folder for caches."""

    origin: Origin
    workload: Workload
    size: str
    files: Path
    caches: Path

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.glob("*.parquet"))

    @contextmanager
    def dataset(self, cache_bytes: int | None = None) -> Iterator[Dataset]:
        """Open the dataset with an empty cache."""
        url = f"s3://{BUCKET}/{self.size}/{self.workload.name}/parquet"
        with TemporaryDirectory(dir=self.caches, ignore_cleanup_errors=True) as folder:
            cache = CacheConfig(folder, cache_bytes)
            yield make_dataset(url, storage_options=self.origin.storage_options, cache=cache)

    def wire_seconds(self) -> float:
        """Return the seconds of concurrent ranged GETs of all objects."""
        wire = Wire(self.origin.endpoint_url, f"{BUCKET}/{self.size}/{self.workload.name}/parquet", RANGE_BYTES)
        ranges = [
            (path.name, start, min(start + RANGE_BYTES, path.stat().st_size))
            for path in sorted(self.files.glob("*.parquet"))
            for start in range(0, path.stat().st_size, RANGE_BYTES)
        ]
        started = time.perf_counter()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(wire.get, ranges))
        wire.close()
        return time.perf_counter() - started


def loader_of(dataset: Dataset, workload: Workload, **options: Any) -> Loader:
    group = {"x": list(workload.features)} if workload.features else None
    return make_loader(dataset, workload.batch_size, group=group, **options)


def timed(loader: Loader, step: Callable[[], object] = lambda: None) -> float:
    started = time.perf_counter()
    for _ in loader:
        step()
    return time.perf_counter() - started


def cold(bench: Bench) -> Table:
    """The first epoch from an empty cache, with listing and footers; batches are not used."""
    table = Table("wire, s", "first epoch, s", "of the wire's speed")
    for _ in range(3):
        wire, started = bench.wire_seconds(), time.perf_counter()
        with bench.dataset() as dataset:
            timed(loader_of(dataset, bench.workload))
            taken = time.perf_counter() - started
        table.add_row(f"{wire:.2f}", f"{taken:.2f}", f"{wire / taken:.2f}")
    return table


def step(bench: Bench) -> Table:
    """The first epoch beside a step of fixed time, with windows of a 16th of the data."""
    table = Table("step, ms", "wire, s", "compute, s", "first epoch, s", "of the longer", "utilisation")
    for share in (0.8, 1.0, 1.25):
        wire = bench.wire_seconds()
        with bench.dataset() as dataset:
            loader = loader_of(dataset, bench.workload, window=max(1, len(dataset.row_groups) // 16))
            pause = share * wire / len(loader)
            taken = timed(loader, partial(time.sleep, pause))
            compute = pause * len(loader)
            table.add_row(
                f"{pause * 1e3:.1f}", f"{wire:.2f}", f"{compute:.2f}", f"{taken:.2f}",
                f"{taken / max(wire, compute):.2f}", f"{compute / taken:.0%}",
            )  # fmt: skip
    return table


def _burn() -> None:
    """Run bytecode for about two milliseconds."""
    total = 0
    for number in range(40_000):
        total += number & 7


def _steps(seconds: float) -> float:
    """Return the rate of CPU-bound steps per second."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        _burn()
        count += 1
    return count / (time.perf_counter() - started)


def burn(bench: Bench) -> Table:
    """A CPU-bound step: alone, and while the background decoder fetches and decodes all row groups."""
    table = Table("alone, steps/s", "beside the decoder, steps/s", "ratio", "decoder, MB/s")
    for _ in range(3):
        with bench.dataset() as dataset:
            decoder = BackgroundDecoder(dataset.rowstore.blobs)
            account = Counters()
            make = partial(decoder.make, demand=DemandSignal(), account=account)
            while not make(0):
                time.sleep(0.05)
            requests = [Thread(target=make, args=(group,)) for group in range(1, len(dataset.row_groups))]
            alone, before = _steps(2.0), account.snapshot()["bytes_origin"]
            for request in requests:
                request.start()
            beside = _steps(2.0)
            rate = (account.snapshot()["bytes_origin"] - before) / 2.0
            for request in requests:
                request.join()
            decoder.end()
            table.add_row(f"{alone:.0f}", f"{beside:.0f}", f"{beside / alone:.1%}", f"{rate / 1e6:.0f}")
    return table


def smaller(bench: Bench) -> Table:
    """Caches smaller than the decoded data: the share that later epochs fetch, beside the share that is not pinned.

    The stall is that of a step that needs the bytes at 1 / 1.2 of the network's bandwidth.
    """
    table = Table("cache", "pinned", "fetched an epoch", "of the rest", "refused", "stall")
    wire = bench.wire_seconds()
    with bench.dataset() as dataset:
        decoded = dataset.rowstore.blobs.num_bytes
    for share in (0.25, 0.5, 0.75, 0.9):
        with bench.dataset(int(share * decoded)) as dataset:
            try:
                loader = loader_of(dataset, bench.workload, window=max(1, len(dataset.row_groups) // 25))
            except ConfigError:  # Two windows are more than this share of a small workload.
                table.add_row(f"{share:.0%}", "too small")
                continue
            timed(loader)
            bench.origin.reset()
            for _ in range(3):
                timed(loader)
            fetched = bench.origin.stats()["get_bytes"] / 3 / bench.num_bytes
            assert isinstance(dataset.blocks.tier, LocalTier)
            pinned = share - dataset.blocks.tier.division().region / decoded
            refused = dataset.blocks.stats()["refused"]
            timed(loader, pause := partial(time.sleep, 1.2 * fetched * wire / len(loader)))
            stalls = []
            for _ in range(3):
                timed(loader, pause)
                stalls.append(loader.stats().stall_fraction)
            table.add_row(
                f"{share:.0%}", f"{pinned:.1%}", f"{fetched:.1%}", f"{fetched / (1 - pinned):.3f}", str(refused),
                f"{sum(stalls) / 3:.1%}",
            )  # fmt: skip
    return table


RANK = """
import sys
from dataload.benchmarks.prefetch import rank
rank(*sys.argv[1:])
"""


def rank(number: str, endpoint_url: str, url: str, cache_dir: str) -> None:
    """Read an epoch as one of two ranks, with two workers. Print the number of rows."""
    from dataload.benchmarks.origin import s3

    dataset = make_dataset(url, storage_options=s3.storage_options(endpoint_url), cache=CacheConfig(cache_dir))
    loader = make_loader(dataset, 64, world=World(int(number), 2, int(number), 2), num_workers=2, transform=_identity)
    sys.stdout.write(str(sum(len(batch["label"]) for batch in loader)))


def _identity(batch: Any) -> Any:
    return batch


def ranks(bench: Bench) -> Table:
    """Two ranks with two workers each, on one host, from an empty cache."""
    table = Table("rows", "bytes from the origin", "of the data", "duplicate GETs", "seconds")
    url = f"s3://{BUCKET}/{bench.size}/{bench.workload.name}/parquet"
    for _ in range(2):
        bench.origin.reset()
        with TemporaryDirectory(dir=bench.caches, ignore_cleanup_errors=True) as folder:
            started = time.perf_counter()
            command = [sys.executable, "-c", RANK]
            args = [bench.origin.endpoint_url, url, folder]
            both = [
                subprocess.Popen([*command, str(number), *args], stdout=subprocess.PIPE, text=True)
                for number in range(2)
            ]
            rows = sum(int(process.communicate()[0]) for process in both)
            seconds = time.perf_counter() - started
        stats = bench.origin.stats()
        share = stats["get_bytes"] / bench.num_bytes
        table.add_row(
            str(rows), str(stats["get_bytes"]), f"{share:.4f}", str(stats["duplicate_gets"]), f"{seconds:.1f}"
        )
    return table


def first(bench: Bench) -> Table:
    """The first batch from an empty cache, after the manifest, beside the network's time for its row groups."""
    table = Table("first batch, s", "its row groups' bytes", "6 x latency + 1.3 x the network's time, s")
    for _ in range(3):
        with bench.dataset() as dataset:
            started = time.perf_counter()
            loader = loader_of(dataset, bench.workload)
            next(iter(loader))
            taken = time.perf_counter() - started
            end = loader.rank_sampler.global_batch_size
            groups = [group for position, group in loader.rank_sampler.needs_from(0, 0) if position < end]
            size = sum(dataset.row_groups[group].bytes for group in groups)
            pieces = max(1, -(-size // RANGE_BYTES))
            rate = (bench.workload.bytes_per_second or 1e12) * min(pieces, IN_FLIGHT)
            table.add_row(f"{taken:.3f}", str(size), f"{6 * S3.latency + 1.3 * (S3.latency + size / rate):.3f}")
    return table


def footers(bench: Bench) -> Table:
    """Ten thousand new files, listed and pinned, beside bare requests with 128 in flight."""
    table = Table("listing, s", "GETs of footers, s", "both x 1.3, s", "the dataset, s")
    data = bench.files.parents[3]
    folder = data / BUCKET / "footers"
    names = [f"{number:05d}.parquet" for number in range(MANY)]
    content = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": np.arange(100), "b": np.arange(100.0)}), content)
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(content.getvalue())
    size, url = content.getvalue().size, f"s3://{BUCKET}/footers"
    for _ in range(3):
        bare, started = S3FileSystem(**bench.origin.storage_options, skip_instance_cache=True), time.perf_counter()
        assert len(bare.find(url)) == MANY
        listing = time.perf_counter() - started
        wire, started = Wire(bench.origin.endpoint_url, f"{BUCKET}/footers", size), time.perf_counter()
        with ThreadPoolExecutor(FOOTERS_IN_FLIGHT) as pool:
            list(pool.map(wire.get, [(name, 0, size) for name in names]))
        gets = time.perf_counter() - started
        wire.close()
        with TemporaryDirectory(dir=bench.caches, ignore_cleanup_errors=True) as cache:
            started = time.perf_counter()
            make_dataset(url, storage_options=bench.origin.storage_options, cache=CacheConfig(cache))
            taken = time.perf_counter() - started
        table.add_row(f"{listing:.2f}", f"{gets:.2f}", f"{1.3 * (listing + gets):.2f}", f"{taken:.2f}")
    return table


PARTS = {
    "cold": cold,
    "step": step,
    "burn": burn,
    "smaller": smaller,
    "ranks": ranks,
    "first": first,
    "footers": footers,
}


def main(
    part: Annotated[list[str] | None, typer.Option(help="Names of parts; default: all.")] = None,
    workload: Annotated[str, typer.Option(help="Name of the workload.")] = "images",
    size: Annotated[str, typer.Option(help="Size of the workload: tiny, small, middle or full.")] = "middle",
    wire: Annotated[bool, typer.Option(help="Give the origin a network's latency and bandwidth.")] = True,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
) -> None:
    """Measure the effect of prefetching."""
    data = folder.absolute() / "data"
    chosen = workloads(size)[workload]
    files = data / BUCKET / size / workload / "parquet"
    write(chosen, files)
    behaviour = Behaviour(S3.latency, chosen.bytes_per_second) if wire else Behaviour()
    for name in part or PARTS:
        # A real S3 takes no CPU time from the CPU-bound step, so the server yields to it.
        with Origin(data, behaviour=behaviour, nice=19 if name == "burn" else 0) as origin:
            table = PARTS[name](Bench(origin, chosen, size, files, folder.absolute()))
            table.title = " ".join((PARTS[name].__doc__ or "").split())
            Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

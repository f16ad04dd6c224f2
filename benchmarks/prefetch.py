"""What prefetching is for: `python -m dataload.benchmarks.prefetch [--part NAME]`, against an S3 as late as a network.

Each part prints a table: the first epoch, alone and beside a training step, a step that burns the interpreter beside a
filler, a cache smaller than the data, ranks of one host that share the work, the first batch, many files' footers.
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

from dataload.benchmarks.behaviour import Behaviour
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.suite import WIRE_LATENCY
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.floors import RANGE_BYTES
from dataload.benchmarks.wire import Wire
from dataload.benchmarks.workloads import Workload, workloads, write
from dataload.cache.config import CacheConfig
from dataload.cache.local.tier import LocalTier
from dataload.catalog.footer_cache import FOOTERS_IN_FLIGHT
from dataload.dataset import Dataset, make_dataset
from dataload.loader.loader import Loader, make_loader
from dataload.rows.background_decoder.client import BackgroundDecoder
from dataload.world import World

IN_FLIGHT = 16
MANY = 10_000  # files


@dataclass(frozen=True)
class Place:
    """A workload's objects at an origin that answers late, and room for caches."""

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
        """The dataset, behind a cache that is empty."""
        url = f"s3://{BUCKET}/{self.size}/{self.workload.name}/parquet"
        with TemporaryDirectory(dir=self.caches, ignore_cleanup_errors=True) as folder:
            cache = CacheConfig(folder, cache_bytes)
            yield make_dataset(url, storage_options=self.origin.storage_options, cache=cache)

    def wire_seconds(self) -> float:
        """What ranged GETs of everything take, when nobody looks at the bytes."""
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


def cold(place: Place) -> Table:
    """The first epoch from an empty cache, listing and footers included, whose batches nobody looks at."""
    table = Table("wire, s", "first epoch, s", "of the wire's speed")
    for _ in range(3):
        wire, started = place.wire_seconds(), time.perf_counter()
        with place.dataset() as dataset:
            timed(loader_of(dataset, place.workload))
            taken = time.perf_counter() - started
        table.add_row(f"{wire:.2f}", f"{taken:.2f}", f"{wire / taken:.2f}")
    return table


def step(place: Place) -> Table:
    """The first epoch beside a step of a fixed time, in windows of a 16th of the data: the last has no successor."""
    table = Table("step, ms", "wire, s", "compute, s", "first epoch, s", "of the longer", "utilisation")
    for share in (0.8, 1.0, 1.25):
        wire = place.wire_seconds()
        with place.dataset() as dataset:
            loader = loader_of(dataset, place.workload, window=max(1, len(dataset.row_groups) // 16))
            pause = share * wire / len(loader)
            taken = timed(loader, partial(time.sleep, pause))
            compute = pause * len(loader)
            table.add_row(
                f"{pause * 1e3:.1f}", f"{wire:.2f}", f"{compute:.2f}", f"{taken:.2f}",
                f"{taken / max(wire, compute):.2f}", f"{compute / taken:.0%}",
            )  # fmt: skip
    return table


def _burn() -> None:
    """About two milliseconds of bytecode."""
    total = 0
    for number in range(40_000):
        total += number & 7


def _steps(seconds: float) -> float:
    """Steps a second that burn the interpreter."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        _burn()
        count += 1
    return count / (time.perf_counter() - started)


def burn(place: Place) -> Table:
    """A step that burns the interpreter: alone, and while all row groups are being fetched and decoded."""
    table = Table("alone, steps/s", "beside a filler, steps/s", "of that", "filler, MB/s")
    for _ in range(3):
        with place.dataset() as dataset:
            filler = BackgroundDecoder(dataset.rowstore.blobs)
            while not filler.make(0):
                time.sleep(0.05)
            asked = [Thread(target=filler.make, args=(group,)) for group in range(1, len(dataset.row_groups))]
            alone, before = _steps(2.0), filler.counts()["bytes_origin"]
            for one in asked:
                one.start()
            beside = _steps(2.0)
            filled = (filler.counts()["bytes_origin"] - before) / 2.0
            for one in asked:
                one.join()
            filler.end()
            table.add_row(f"{alone:.0f}", f"{beside:.0f}", f"{beside / alone:.1%}", f"{filled / 1e6:.0f}")
    return table


def smaller(place: Place) -> Table:
    """Caches of a part of the decoded data: what is fetched in later epochs, beside what stays.

    And how long these wait beside a step to which the wire could give 1.2 times what it asks.
    """
    table = Table("cache", "of which stays", "fetched an epoch", "of what does not stay", "refused", "stall")
    wire = place.wire_seconds()
    with place.dataset() as dataset:
        decoded = dataset.rowstore.blobs.num_bytes
    for share in (0.25, 0.5, 0.75, 0.9):
        with place.dataset(int(share * decoded)) as dataset:
            loader = loader_of(dataset, place.workload, window=max(1, len(dataset.row_groups) // 25))
            timed(loader)
            place.origin.reset()
            for _ in range(3):
                timed(loader)
            fetched = place.origin.stats()["get_bytes"] / 3 / place.num_bytes
            assert isinstance(dataset.blocks.tier, LocalTier)
            stays = share - dataset.blocks.tier.region / decoded
            refused = dataset.blocks.stats()["refused"]
            timed(loader, pause := partial(time.sleep, 1.2 * fetched * wire / len(loader)))
            stalls = []
            for _ in range(3):
                timed(loader, pause)
                stalls.append(loader.stats().stall_fraction)
            table.add_row(
                f"{share:.0%}", f"{stays:.1%}", f"{fetched:.1%}", f"{fetched / (1 - stays):.3f}", str(refused),
                f"{sum(stalls) / 3:.1%}",
            )  # fmt: skip
    return table


RANK = """
import sys
from dataload.benchmarks.prefetch import rank
rank(*sys.argv[1:])
"""


def rank(number: str, endpoint_url: str, url: str, cache_dir: str) -> None:
    """A rank of two, with two workers: an epoch."""
    from dataload.benchmarks import s3

    dataset = make_dataset(url, storage_options=s3.storage_options(endpoint_url), cache=CacheConfig(cache_dir))
    loader = make_loader(dataset, 64, world=World(int(number), 2, int(number), 2), num_workers=2, transform=_as_it_is)
    sys.stdout.write(str(sum(len(batch["label"]) for batch in loader)))


def _as_it_is(batch: Any) -> Any:
    return batch


def ranks(place: Place) -> Table:
    """Two ranks with two workers each, on one host, from an empty cache."""
    table = Table("rows", "bytes from the origin", "of the data", "duplicate GETs", "seconds")
    url = f"s3://{BUCKET}/{place.size}/{place.workload.name}/parquet"
    for _ in range(2):
        place.origin.reset()
        with TemporaryDirectory(dir=place.caches, ignore_cleanup_errors=True) as folder:
            started = time.perf_counter()
            command = [sys.executable, "-c", RANK]
            given = [place.origin.endpoint_url, url, folder]
            both = [
                subprocess.Popen([*command, str(number), *given], stdout=subprocess.PIPE, text=True)
                for number in range(2)
            ]
            rows = sum(int(one.communicate()[0]) for one in both)
            seconds = time.perf_counter() - started
        stats = place.origin.stats()
        share = stats["get_bytes"] / place.num_bytes
        table.add_row(
            str(rows), str(stats["get_bytes"]), f"{share:.4f}", str(stats["duplicate_gets"]), f"{seconds:.1f}"
        )
    return table


def first(place: Place) -> Table:
    """The first batch from an empty cache, once the manifest is there; against the wire's time for its row groups."""
    table = Table("first batch, s", "its row groups' bytes", "6 x latency + 1.3 x the wire's time, s")
    for _ in range(3):
        with place.dataset() as dataset:
            started = time.perf_counter()
            loader = loader_of(dataset, place.workload)
            next(iter(loader))
            taken = time.perf_counter() - started
            end = loader.sampler.global_batch_size
            groups = [group for position, group in loader.sampler.needs_from(0, 0) if position < end]
            size = sum(dataset.row_groups[group].bytes for group in groups)
            pieces = max(1, -(-size // RANGE_BYTES))
            rate = (place.workload.bytes_per_second or 1e12) * min(pieces, IN_FLIGHT)
            table.add_row(f"{taken:.3f}", str(size), f"{6 * WIRE_LATENCY + 1.3 * (WIRE_LATENCY + size / rate):.3f}")
    return table


def footers(place: Place) -> Table:
    """Ten thousand files that nobody has read yet: listed and pinned, beside bare requests, 128 in flight."""
    table = Table("listing, s", "GETs of footers, s", "both x 1.3, s", "the dataset, s")
    data = place.files.parents[3]
    folder = data / BUCKET / "footers"
    names = [f"{number:05d}.parquet" for number in range(MANY)]
    content = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": np.arange(100), "b": np.arange(100.0)}), content)
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(content.getvalue())
    size, url = content.getvalue().size, f"s3://{BUCKET}/footers"
    for _ in range(3):
        bare, started = S3FileSystem(**place.origin.storage_options, skip_instance_cache=True), time.perf_counter()
        assert len(bare.find(url)) == MANY
        listing = time.perf_counter() - started
        wire, started = Wire(place.origin.endpoint_url, f"{BUCKET}/footers", size), time.perf_counter()
        with ThreadPoolExecutor(FOOTERS_IN_FLIGHT) as pool:
            list(pool.map(wire.get, [(name, 0, size) for name in names]))
        gets = time.perf_counter() - started
        wire.close()
        with TemporaryDirectory(dir=place.caches, ignore_cleanup_errors=True) as cache:
            started = time.perf_counter()
            make_dataset(url, storage_options=place.origin.storage_options, cache=CacheConfig(cache))
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
    part: Annotated[list[str] | None, typer.Option(help="Which parts; all, unless told.")] = None,
    workload: Annotated[str, typer.Option(help="Whose data.")] = "images",
    size: Annotated[str, typer.Option(help="tiny, small, full, large or huge.")] = "full",
    wire: Annotated[bool, typer.Option(help="An origin with a network's latency and rates.")] = True,
    folder: Annotated[Path, typer.Option(help="For the data: made once, kept for the next time.")] = Path(".bench"),
) -> None:
    """Measure what prefetching is for."""
    data = folder.absolute() / "data"
    chosen = workloads(size)[workload]
    files = data / BUCKET / size / workload / "parquet"
    write(chosen, files)
    late = Behaviour(WIRE_LATENCY, chosen.bytes_per_second) if wire else Behaviour()
    for name in part or PARTS:
        # S3 is elsewhere: it does not take the cores of a step that is to be left alone.
        with Origin(data, behaviour=late, nice=19 if name == "burn" else 0) as origin:
            table = PARTS[name](Place(origin, chosen, size, files, folder.absolute()))
            table.title = " ".join((PARTS[name].__doc__ or "").split())
            Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

"""First epochs from simulated S3: beside a step of fixed time, and beside one that burns the interpreter; footers."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3fs import S3FileSystem

from dataload import CacheConfig, make_dataset, make_loader
from dataload.benchmarks.origin import Behaviour, Origin
from dataload.benchmarks.origin.behaviour import S3
from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.wire import RANGE_BYTES

IN_FLIGHT = 16
WIRES = {"images": Behaviour(S3.latency, 20e6), "tokens": Behaviour(S3.latency, 6e6)}  # bytes/s of a connection
BURNT_SECONDS = 0.5  # of a step


def wire_seconds(origin: Origin, folder: Path, in_flight: int = IN_FLIGHT) -> float:
    """Return the seconds of bare GETs of all files."""
    wire = Wire(origin.endpoint_url, str(folder.relative_to(origin.folder)), RANGE_BYTES)
    sizes = [(path.name, path.stat().st_size) for path in sorted(folder.glob("*.parquet"))]
    ranges = [
        (name, start, min(start + RANGE_BYTES, size)) for name, size in sizes for start in range(0, size, RANGE_BYTES)
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(wire.get, ranges))
    wire.close()
    return time.perf_counter() - started


def cold(origin: Origin, folder: Path, cache: Path) -> Any:
    url = f"s3://{folder.relative_to(origin.folder)}"
    return make_dataset(url, storage_options=origin.storage_options, cache=CacheConfig(str(cache)))


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("share", [0.8, 1.0, 1.25])
def test_beside_a_step(
    benchmark: Any, files: Any, origin_of: Any, name: str, share: float, tmp_path: Path, record_property: Any
) -> None:
    """The steps take `share` of the time of bare GETs."""
    benchmark.group = f"first epoch beside a step: {name}"
    workload, folder = files(name)
    origin = origin_of(WIRES[name])
    wire, numbers = wire_seconds(origin, folder), itertools.count()

    def start() -> tuple[tuple[Any], dict[str, Any]]:
        dataset = cold(origin, folder, tmp_path / f"{next(numbers)}")
        window = max(1, len(dataset.row_groups) // 16)
        return (make_loader(dataset, workload.batch_size, window=window),), {}

    def epoch(loader: Any) -> None:
        for _ in loader:
            time.sleep(share * wire / len(loader))

    benchmark.pedantic(epoch, setup=start, rounds=3)
    record_property("GETs, s", f"{wire:.2f}")
    if benchmark.stats:
        record_property("x the longer", f"{benchmark.stats.stats.median / max(wire, share * wire):.2f}")


def burn() -> float:
    """Run bytecode for BURNT_SECONDS. Return the rate of steps."""
    count, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < BURNT_SECONDS:
        count += sum(number & 7 for number in range(40_000)) > 0
    return count / took


def test_beside_a_burning_step(files: Any, origin_of: Any, tmp_path: Path, record_property: Any) -> None:
    workload, folder = files("images")
    origin = origin_of(WIRES["images"])
    os.setpriority(os.PRIO_PROCESS, origin.pid, 19)  # Real S3 takes no CPU time from the step.
    alone = np.median([burn() for _ in range(6)])
    loader = make_loader(cold(origin, folder, tmp_path), workload.batch_size)
    beside = np.median([burn() for _ in loader])
    record_property("steps/s alone", f"{alone:.0f}")
    record_property("kept beside the decoder", f"{beside / alone:.1%}")
    stats = loader.stats()
    record_property(
        "MB/s of the decoder", f"{sum(path.stat().st_size for path in folder.iterdir()) / stats.seconds / 1e6:.0f}"
    )


@pytest.mark.benchmark(group="listing and footers of new files")
@pytest.mark.parametrize("reader", ["make_dataset", "listing and GETs"])
def test_footers(benchmark: Any, origin_of: Any, scaled: Any, reader: str, tmp_path: Path) -> None:
    origin, count, numbers = origin_of(S3), scaled(10_000), itertools.count()
    folder = origin.folder / BUCKET / f"footers-{count}"
    content = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": np.arange(100), "b": np.arange(100.0)}), content)
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number:05d}.parquet").write_bytes(content.getvalue())

    def bare() -> None:
        assert (
            len(S3FileSystem(**origin.storage_options, skip_instance_cache=True).find(f"{BUCKET}/{folder.name}"))
            == count
        )
        wire_seconds(origin, folder, 128)

    read = bare if reader == "listing and GETs" else lambda: cold(origin, folder, tmp_path / f"{next(numbers)}")
    benchmark.pedantic(read, rounds=3)

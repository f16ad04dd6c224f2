"""The speed of this host on a dataset: a part of it is read twice, from an empty cache, in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dataload.cache.config import CacheConfig
from dataload.errors import DataloadError
from dataload.planning.forecast import ROUND_TRIPS, Host
from dataload.runtime.child_process import as_child
from dataload.runtime.redact import redacted
from dataload.runtime.resource_limits import usable_cores

if TYPE_CHECKING:
    from dataload.dataset import Dataset

PART_BYTES = 512 * 10**6  # of the objects, about, in whole row groups
WARM_SECONDS = 1.0
RANGE_BYTES, RANGES, AT_ONCE = 8 << 20, 64, 32  # requested for the bandwidth
LOOKS = 5  # requests of a byte, one after the other, for the latency


def measure(folder: Path, cache: CacheConfig, batch_size: int, reads: dict[str, Any]) -> Host:
    """Measure the speed of this host.

    Args:
        folder: An existing folder on the disk of the cache, for a cache that is removed afterwards.
        cache: How the store is read.
        batch_size: Rows of a batch.
        reads: Other arguments of `make_dataset`, as JSON values.

    Raises:
        DataloadError: The dataset cannot be read.
    """
    with TemporaryDirectory(dir=folder, prefix="measure-") as cache_dir:
        own = asdict(replace(cache, cache_dir=cache_dir, cache_bytes=None, cluster=None, cluster_key=None))
        asked = {"started": time.time(), "batch_size": batch_size, "reads": reads, "cache": own}
        before = _cpu_of_children()
        child = subprocess.run(
            [sys.executable, *as_child(__name__)], input=json.dumps(asked), capture_output=True, text=True, check=False
        )
        cpu = _cpu_of_children() - before
    if child.returncode:
        said = child.stderr.strip().splitlines() or ["the measurement ended without a message"]
        raise DataloadError(redacted(said[-1]))
    found = json.loads(child.stdout.splitlines()[-1])
    if not found["bytes"]:
        raise DataloadError("the dataset is too small to measure: its rows come with the footers; name a larger one")
    return Host(
        cores=usable_cores(),
        start_seconds=max(0.1, found["start"] - ROUND_TRIPS * found["latency"]),
        cpu_seconds_per_gb=(cpu - found["cpu_elsewhere"]) / (found["bytes"] / 1e9),
        rows_per_second=found["rows_per_second"],
        gbps=found["gbps"],
        latency_ms=1e3 * found["latency"],
    )


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Read the dataset that standard input asks for. Print what was measured, as JSON."""
    asked = json.load(sys.stdin)
    from dataload.dataset import make_dataset
    from dataload.loader.factory import make_loader
    from dataload.world import World

    dataset = make_dataset(**asked["reads"], cache=CacheConfig(**asked["cache"]))
    share = PART_BYTES / max(1, sum(group.bytes for group in dataset.row_groups))
    part = dataset if share >= 1 or len(dataset.row_groups) < 2 else dataset.split([share, 1 - share])[0]
    loader = make_loader(part, asked["batch_size"], world=World(0, 1, 0, 1))
    start, cpu_before = time.time() - asked["started"], time.process_time()
    for _ in loader:
        pass
    num_bytes, cpu_between = loader.stats().bytes_origin, time.process_time()
    rows_per_second = _rate(lambda: sum(1 for _ in loader) and len(part), WARM_SECONDS)
    cpu_elsewhere = cpu_before + time.process_time() - cpu_between
    found = {"start": start, "bytes": num_bytes, "rows_per_second": rows_per_second, **_link(dataset)}
    sys.stdout.write(json.dumps({**found, "cpu_elsewhere": cpu_elsewhere}) + "\n")


def _link(dataset: Dataset) -> dict[str, float]:
    """Return the latency in seconds, and the bandwidth, of bare requests."""
    origin, group = dataset.blocks.origin, max(dataset.manifest.row_groups, key=lambda group: group.file.size)
    file = group.file

    def fetch(start: int, stop: int) -> float:
        began = time.perf_counter()
        origin.read(file.path, start, stop, file.version)
        return time.perf_counter() - began

    latency = median(fetch(0, 1) for _ in range(LOOKS))
    starts = [number * RANGE_BYTES % max(1, file.size - RANGE_BYTES) for number in range(RANGES)]
    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda start: fetch(start, min(start + RANGE_BYTES, file.size)), starts))
    seconds = time.perf_counter() - began
    return {"latency": latency, "gbps": RANGES * min(RANGE_BYTES, file.size) * 8 / 1e9 / seconds}


def _rate(read: Callable[[], int], least: float) -> float:
    """Return how many a second `read` reads, over at least some seconds."""
    count, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < least:
        count += read()
    return count / seconds


if __name__ == "__main__":
    main()

"""Caches smaller than the data: what later epochs fetch from S3, in multiples of the data, and how long they wait."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, islice, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prefetch import WIRES, wire_seconds

from dataload import CacheConfig, ConfigError, World, make_dataset, make_loader
from dataload.benchmarks.origin import s3
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.workloads import write

EPOCHS = 4  # after the first
ROWS, COLUMNS = 2000, 16  # of a row group
BATCHES_PER_GROUP = 10
NAMES = ("one", "other")


def exhaust(batches: Iterable[Any], pause: float = 0.0) -> None:
    for _ in batches:
        time.sleep(pause)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.9])
def test_one_dataset(files: Any, origin_of: Any, share: float, tmp_path: Path, record_property: Any) -> None:
    """The waits are those of a step that needs the bytes at 1 / 1.2 of the network's bandwidth."""
    workload, folder = files("images")
    truth, origin = write(workload, folder), origin_of(WIRES["images"])
    url, limit = f"s3://{folder.relative_to(origin.folder)}", int(share * truth.decoded_bytes)
    cache = CacheConfig(str(tmp_path), limit)
    dataset = make_dataset(url, storage_options=origin.storage_options, cache=cache)
    try:
        loader = make_loader(dataset, workload.batch_size, window=max(1, len(dataset.row_groups) // 25))
    except ConfigError as error:
        pytest.skip(str(error))  # Two windows are more than this share of few row groups.
    exhaust(loader)
    origin.reset()
    for _ in range(3):
        exhaust(loader)
    fetched = origin.stats()["get_bytes"] / 3 / truth.parquet_bytes
    pause, stalls = 1.2 * fetched * wire_seconds(origin, folder) / len(loader), []
    for _ in range(3):
        exhaust(loader, pause)
        stalls.append(loader.stats().stall_fraction)
    record_property("fetched an epoch", f"{fetched:.1%}")
    record_property("waited", f"{np.mean(stalls):.1%}")


def loader_of(
    name: str, endpoint_url: str, cache: tuple[str, int], rank: int = 0, ranks: int = 1, workers: int = 0
) -> Any:
    url, options = f"s3://{BUCKET}/halves/{name}", s3.storage_options(endpoint_url)
    dataset = make_dataset(url, storage_options=options, cache=CacheConfig(*cache))
    given: dict[str, Any] = {"num_workers": workers, "transform": dict} if workers else {}
    batch_size = ROWS // BATCHES_PER_GROUP // ranks
    return make_loader(dataset, batch_size, window=2, world=World(rank, ranks, rank, ranks), **given)


def read_in_steps(barrier: Any, batches: int, step: int, *of: Any) -> None:
    """Read epochs of so many batches. Wait for all other processes after each `step` batches."""
    loader = chain.from_iterable(repeat(loader_of(*of)))
    for _ in range((1 + EPOCHS) * batches // step):
        barrier.wait()
        exhaust(islice(loader, step))
        barrier.wait()


# By name: ranks of each dataset, workers of each rank, and whether all processes wait for each other at each batch.
PROCESSES = {
    "two processes": (1, 0, False),
    "two processes with two workers each": (1, 2, False),
    "two ranks each, in step": (2, 0, True),
    "two ranks each, each at its own pace": (2, 0, False),
}


@pytest.mark.parametrize("case", ["by turns", "together", "the other starts later", *PROCESSES])
def test_two_datasets(case: str, origin_of: Any, scaled: Any, tmp_path: Path, record_property: Any) -> None:
    """Two datasets share a cache of 1.2 datasets."""
    origin, groups, step = origin_of(), min(60, max(20, scaled(60))), 1
    table = pa.table({f"x{number}": np.random.default_rng(number).random(groups * ROWS) for number in range(COLUMNS)})
    cache = str(tmp_path), int(1.2 * table.nbytes)
    for name in NAMES:
        path = origin.folder / BUCKET / "halves" / name / "0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=ROWS, compression="none", use_dictionary=False)
    fetched = list[float]()

    def epoch(read: Any) -> None:
        origin.reset()
        read()
        fetched.append(origin.stats()["get_bytes"] / path.stat().st_size)

    if case in PROCESSES:
        ranks, workers, in_step = PROCESSES[case]
        batches = BATCHES_PER_GROUP * groups
        step = 1 if in_step else batches
        context = get_context("spawn")
        barrier = context.Barrier(1 + len(NAMES) * ranks, timeout=300)
        children = [
            context.Process(
                target=read_in_steps,
                args=(barrier, batches, step, name, origin.endpoint_url, cache, rank, ranks, workers),
            )
            for name in NAMES
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        for _ in range(1 + EPOCHS):
            epoch(lambda: [barrier.wait() for _ in range(2 * batches // step)])
        for child in children:
            child.join()
    else:
        one = loader_of("one", origin.endpoint_url, cache)
        if case == "the other starts later":
            exhaust(one)
        other = loader_of("other", origin.endpoint_url, cache)
        for _ in range(1 + EPOCHS):
            epoch(lambda: exhaust(zip(one, other, strict=True) if case == "together" else chain(one, other)))
    record_property("datasets an epoch", ", ".join(f"{each:.2f}" for each in fetched[1:]))
    record_property("mean", f"{np.mean(fetched[1:]):.2f}")

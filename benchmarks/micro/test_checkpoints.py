"""A checkpoint in a simulated S3 beside bare requests of the same sizes, in turns. In bytes per second."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import obstore
import torch
from obstore.store import S3Store
from torch import nn

from dataload.benchmarks.origin import Origin
from dataload.cache.origin.obstore import UPLOAD_PART_BYTES, UPLOAD_PARTS
from dataload.cache.origin.store_path import BLOCK_BYTES, BLOCKS_AHEAD
from dataload.train.checkpoint.checkpoints import Checkpoints, load

ROUNDS = 3  # of each, in turns: the medians count
TENSORS = 64
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


def test_checkpoint(
    tmp_path: Path,
    scaled: Callable[[int], int],
    in_process: Callable[..., tuple[Any, int]],
    record_property: Callable[[str, object], None],
) -> None:
    """The rate of a rank that saves and resumes, and the memory that this takes beyond the model."""
    size = scaled(2_000_000_000 // TENSORS // 4)
    (tmp_path / "bucket").mkdir()
    with Origin(tmp_path, writable=True) as origin:
        rates, peak = in_process(measure, origin.endpoint_url, size)
        _, idle = in_process(hold, size)
    for name, bytes_per_second in rates.items():
        record_property(f"{name}, MB/s", round(bytes_per_second / 1e6))
    for name in ("save", "load"):
        record_property(f"{name} beside bare", f"{rates[name] / rates[f'bare {name}']:.2f}")
    record_property("MB beyond two models", round((peak - idle) / 1e6))


def parts_of(size: int) -> dict[str, nn.Module]:
    model = nn.Module()
    for number in range(TENSORS):
        model.register_buffer(f"t{number}", torch.full((size,), float(number)))
    return {"model": model}


def hold(size: int) -> None:
    """Hold as much memory as the state that is saved and the one that is loaded."""
    _ = parts_of(size), parts_of(size)


def measure(endpoint: str, size: int) -> dict[str, float]:
    """Return the bytes per second, and of CPU time, of saving and loading, and of bare requests."""
    os.environ.update({**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint})
    parts, total = parts_of(size), 4 * size * TENSORS
    store: Any = S3Store("bucket", endpoint=endpoint, client_options={"allow_http": True})
    run = Checkpoints("s3://bucket/run", 1)
    part = os.urandom(UPLOAD_PART_BYTES)
    pool = ThreadPoolExecutor(BLOCKS_AHEAD)

    def bare_save() -> None:
        uploads = ThreadPoolExecutor(UPLOAD_PARTS)
        list(
            uploads.map(lambda n: obstore.put(store, f"bare/{n}", part, use_multipart=False), range(total // len(part)))
        )

    def bare_load() -> None:
        blocks = [(n, start) for n in range(total // len(part)) for start in range(0, len(part), BLOCK_BYTES)]
        got = pool.map(lambda at: obstore.get_range(store, f"bare/{at[0]}", start=at[1], length=BLOCK_BYTES), blocks)
        assert sum(map(len, got)) == len(blocks) * BLOCK_BYTES

    def save() -> None:
        run.save({"model": parts["model"].state_dict()}, {"value": 1})

    def restore() -> None:
        found = run.find("auto")
        assert found is not None
        load(found, parts, dict)

    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, call in (("bare save", bare_save), ("save", save), ("bare load", bare_load), ("load", restore)):
            since, of_cpu = perf_counter(), process_time()
            call()
            seconds.setdefault(name, []).append(perf_counter() - since)
            seconds.setdefault(f"{name} by CPU", []).append(process_time() - of_cpu)
    run.close()
    return {name: total / median(times) for name, times in seconds.items()}

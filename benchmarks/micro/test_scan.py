"""A cold scan of a gigabyte into the cache, beside bare ranged GETs that discard the bytes or write plain files."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import process_time
from typing import Any

import fsspec
import numpy as np
import pytest

from dataload.benchmarks.origin import Behaviour
from dataload.benchmarks.origin.behaviour import S3
from dataload.benchmarks.origin.wire import Wire
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache.blob_file import WRITTEN_BYTES

OBJECT_BYTES, RANGE_BYTES, IN_FLIGHT, ROUNDS = 64 << 20, 8 << 20, 16, 3
WIRES = {"unlimited": Behaviour(), "20 MB/s a connection": Behaviour(S3.latency, 20e6)}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("reader", ["into the cache", "GETs into plain files", "GETs"])
def test_scan(
    benchmark: Any, origin_of: Any, scaled: Any, wire: str, reader: str, tmp_path: Path,
    per_second: Any, record_property: Any,
) -> None:  # fmt: skip
    origin = origin_of(WIRES[wire])
    benchmark.group = f"cold scan, {wire}"
    names, folder = [f"{number}.bin" for number in range(scaled(16))], f"{BUCKET}/scan"
    (origin.folder / folder).mkdir(exist_ok=True)
    for number, name in enumerate(names):
        if not (path := origin.folder / folder / name).exists():
            path.write_bytes(np.random.default_rng(number).bytes(OBJECT_BYTES))
    ranges = [(name, start, start + RANGE_BYTES) for name in names for start in range(0, OBJECT_BYTES, RANGE_BYTES)]
    bare = Wire(origin.endpoint_url, folder, RANGE_BYTES)
    caches = (tmp_path / f"{number}" for number in itertools.count())

    def into_cache(cache: Path) -> int:
        cached = fsspec.filesystem(
            "tiercache", target_protocol="s3", target_options=origin.storage_options, cache_dir=str(cache),
            skip_instance_cache=True,
        )  # fmt: skip
        cached.prefetch([f"{folder}/{name}" for name in names], wait=True)
        return int(cached.stats()["bytes_origin"])

    def into_files(cache: Path) -> int:
        """Do the least work of a cache: no checksums, no index."""

        def store(requested: tuple[str, int, int]) -> int:
            name, start, _ = requested
            data = bare.read(requested)
            pieces = range(0, len(data), WRITTEN_BYTES)  # faster than one write
            return sum(os.pwrite(files[name].fileno(), data[at : at + WRITTEN_BYTES], start + at) for at in pieces)

        cache.mkdir()
        with ExitStack() as opened, ThreadPoolExecutor(IN_FLIGHT) as pool:
            files = {name: opened.enter_context((cache / name).open("wb")) for name in names}
            return sum(pool.map(store, ranges))

    def discarded(_: Path) -> int:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return sum(pool.map(bare.get, ranges))

    read = {"into the cache": into_cache, "GETs into plain files": into_files, "GETs": discarded}[reader]
    total, cpu = len(names) * OBJECT_BYTES, process_time()
    size = benchmark.pedantic(read, setup=lambda: ((next(caches),), {}), rounds=ROUNDS)
    assert size == total
    per_second("MB", total / 1e6)
    record_property("CPU-s/GB", f"{(process_time() - cpu) / ROUNDS / total * 1e9:.2f}")
    bare.close()

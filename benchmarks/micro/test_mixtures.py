"""Mixtures: 200 sources beside one dataset of the same files, and mixtures of other libraries (after `make peers`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import mixture_peers
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.benchmarks.workloads import write

FILES, ROWS, BATCH = 10, 500, 256  # files of a source, rows of a file


def many_files(mixed: bool, folder: str, sources: int) -> dict[str, float]:
    cache, most = CacheConfig(f"{folder}/cache", "4GB"), np.zeros(2)
    began = perf_counter()
    paths = [f"{folder}/{source}" for source in range(sources)]
    data: Any
    if mixed:
        data = mix(paths, cache=cache)
    else:
        data = make_dataset([f"{path}/{file}.parquet" for path in paths for file in range(FILES)], cache=cache)
    opened = perf_counter()
    loader = make_loader(data, BATCH, world=World(0, 1))
    first = 0.0
    for number, _ in enumerate(loader):
        first = first or perf_counter() - opened
        if number % 10 == 0:
            most = np.maximum(most, (threading.active_count(), psutil.Process().num_fds()))
    again = perf_counter()
    rows = sum(len(batch["f0"]) for batch in loader)
    times = {"open, s": opened - began, "first batch, s": first, "warm rows/s": rows / (perf_counter() - again)}
    return times | {"threads": most[0], "open files": most[1]}


@pytest.mark.parametrize("mixed", [False, True], ids=["one dataset", "200 sources"])
def test_many_sources(mixed: bool, scaled: Any, tmp_path: Path, in_process: Any, record_property: Any) -> None:
    sources, values = min(200, scaled(200)), np.random.default_rng(0).random((ROWS, 8), np.float32)
    table = pa.table({f"f{column}": values[:, column] for column in range(8)})
    for source in range(sources):
        (tmp_path / f"{source}").mkdir()
        for file in range(FILES):
            pq.write_table(table, tmp_path / f"{source}" / f"{file}.parquet")
    found, _ = in_process(many_files, mixed, str(tmp_path), sources)
    for name, value in found.items():
        record_property(name, f"{value:,.2f}")


@pytest.mark.parametrize("system", mixture_peers.SYSTEMS)
def test_beside_other_libraries(
    system: str, request: pytest.FixtureRequest, tmp_path: Path, record_property: Any
) -> None:
    """Three sources of tokens on the local disk, mixed by weights and shuffled, with two workers."""
    peers = request.config.rootpath / ".venv-peers/bin/python"
    if system != "ours" and not peers.exists():
        pytest.skip("needs the peers' environment: make peers")
    size = request.config.getoption("size")
    for source in range(len(mixture_peers.WEIGHTS)):
        write(mixture_peers.workload_of(source, size), tmp_path / f"{source}" / "parquet")
    python = sys.executable if system == "ours" else peers
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    command = [python, mixture_peers.__file__, system, size, tmp_path, tmp_path / "cache"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for name, value in json.loads(done.stdout.splitlines()[-1]).items():
        record_property(name, f"{value:,.0f}")

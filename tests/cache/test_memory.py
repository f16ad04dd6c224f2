"""The private memory of a process does not grow with the dataset, nor with a row group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import make_loader

ROWS, WIDTH = 100_000, 1024  # 410 MB in one row group
MOST = 300 << 20
EPOCH = """
import json, sys, threading
import psutil, pyarrow.parquet, s3fs, torch
from dataload import make_loader
import dataload.loader.loader
from dataload.rows.making import row_group_memory

row_group_memory.usable_memory = lambda: 2 << 30

def private():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared

def watch():
    while not stop.wait(0.005):
        peak.append(private())

stop, peak, start = threading.Event(), [], private()
watcher = threading.Thread(target=watch)
watcher.start()
loader = make_loader(sys.argv[1], 256, cache_dir=sys.argv[2], cache_bytes="2GB")
rows = [sum(len(batch["label"]) for batch in loader) for epoch in range(2)]
stop.set()
watcher.join()
print(json.dumps({"rows": rows, "grown": max(peak) - start}))
"""


@pytest.fixture(scope="module")
def one_row_group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "x.parquet"
    tokens = np.random.default_rng(0).integers(0, 50_000, ROWS * WIDTH, dtype=np.int32)
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens), WIDTH), "label": np.arange(ROWS)})
    pq.write_table(table, path, row_group_size=ROWS, compression="none", use_dictionary=False)
    return path


@pytest.mark.slow
def test_a_large_row_group_is_decoded_in_little_memory(one_row_group: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", EPOCH, str(one_row_group), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    found = json.loads(done.stdout)
    assert found["rows"] == [ROWS, ROWS]
    assert found["grown"] < MOST
    kept = sum(path.stat().st_size for path in (tmp_path / "cache" / "blobs").rglob("*") if path.is_file())
    assert kept < 1.01 * ROWS * (4 * WIDTH + 8)


def rows_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the private memory in place of the tokens."""
    memory = psutil.Process().memory_info()
    return {"label": batch["label"], "private": torch.tensor(memory.rss - memory.shared)}


@pytest.mark.slow
def test_workers_do_not_grow(tmp_path: Path, one_row_group: Path) -> None:
    loader = make_loader(
        str(one_row_group),
        256,
        cache_dir=str(tmp_path / "cache"),
        cache_bytes="2GB",
        num_workers=1,
        persistent_workers=True,
        transform=rows_of,
    )
    ends = []
    for _ in range(3):
        private = [batch["private"].item() for batch in loader]
        ends.append(private[-1])
    assert max(ends) - ends[0] < 20 << 20

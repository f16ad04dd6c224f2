"""First epochs over files of a bad shape, and over what `convert` makes of them; and how fast it converts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import convert, make_loader
from dataload.benchmarks.origin import Behaviour
from dataload.benchmarks.systems.base import BUCKET

ROWS, COLUMNS, BATCH, ROUNDS = 4_000_000, 16, 1024, 3  # 256 MB
NEAR = Behaviour(latency=0.03, bytes_per_second=90e6)
SHAPES = {"row groups of 1,000 rows": (ROWS, 1000), "one row group of 2 GB": (8 * ROWS, 8 * ROWS)}


def written(folder: Path, group: int, rows: int) -> None:
    """Write a file of random numbers, once."""
    if (folder / "x.parquet").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    table = pa.table({f"x{number}": draw.random(rows, np.float32) for number in range(COLUMNS)})
    pq.write_table(table, folder / "x.parquet", row_group_size=min(group, rows), use_dictionary=False)


@pytest.mark.parametrize("converted", [False, True], ids=["as it is", "converted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_epoch(
    benchmark: Any, origin_of: Any, scaled: Any, shape: str, converted: bool, tmp_path: Path, per_second: Any
) -> None:
    origin = origin_of(NEAR)
    benchmark.group = f"first epoch, {shape}"
    rows, group = SHAPES[shape]
    rows, group = scaled(rows), min(group, scaled(rows))
    name = f"conversion/{rows}-by-{group}"
    written(origin.folder / BUCKET / name, group, rows)
    if converted:
        source, name = origin.folder / BUCKET / name, f"{name}-converted"
        convert(source, origin.folder / BUCKET / name, shuffle=0)
    caches = (tmp_path / f"{number}" for number in itertools.count())

    def epoch(cache: Path) -> None:
        options = {"storage_options": origin.storage_options, "cache_dir": cache, "cache_bytes": "4GB"}
        loader = make_loader(f"s3://{BUCKET}/{name}/", BATCH, **options)
        assert sum(len(batch["x0"]) for batch in loader) == rows

    benchmark.pedantic(epoch, setup=lambda: ((next(caches),), {}), rounds=ROUNDS)
    per_second("rows", rows)


@pytest.mark.parametrize("seed", [None, 0], ids=["in order", "shuffled"])
def test_convert(benchmark: Any, scaled: Any, seed: int | None, tmp_path: Path, per_second: Any) -> None:
    rows = scaled(ROWS)
    written(tmp_path / "in", 1000, rows)
    folders = (tmp_path / f"out-{number}" for number in itertools.count())
    benchmark.pedantic(
        lambda folder: convert(tmp_path / "in", folder, shuffle=seed),
        setup=lambda: ((next(folders),), {}),
        rounds=ROUNDS,
    )
    per_second("MB", rows * COLUMNS * 4 / 1e6)

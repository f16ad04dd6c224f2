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
from dataload.benchmarks.accelerators import LOAD, Clock
from dataload.benchmarks.origin import Behaviour
from dataload.benchmarks.systems.base import BUCKET

ROWS, COLUMNS, BATCH, ROUNDS = 4_000_000, 16, 1024, 3  # 256 MB
NEAR = Behaviour(latency=0.03, bytes_per_second=90e6)
SHAPES = {"row groups of 1,000 rows": (ROWS, 1000), "one row group of 2 GB": (8 * ROWS, 8 * ROWS)}


@pytest.fixture(scope="module")
def rates() -> dict[str, float]:
    """Rows per second that the loader reads from the files as they are, by shape. Tests of reading write them."""
    return dict.fromkeys(SHAPES, 1e6)


def written(folder: Path, group: int, rows: int) -> None:
    """Write a file of random numbers, once."""
    if (folder / "x.parquet").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    table = pa.table({f"x{number}": draw.random(rows, np.float32) for number in range(COLUMNS)})
    pq.write_table(table, folder / "x.parquet", row_group_size=min(group, rows), use_dictionary=False)


@pytest.mark.parametrize("converted", [False, True], ids=["as it is", "converted"])
@pytest.mark.parametrize("load", [0, LOAD], ids=["reading", "training"])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_epoch(
    benchmark: Any,
    origin_of: Any,
    scaled: Any,
    rates: dict[str, float],
    shape: str,
    load: float,
    converted: bool,
    tmp_path: Path,
    per_second: Any,
) -> None:
    """Emulated accelerators train on a part of the rows per second that the loader reads from the files as they are."""
    origin = origin_of(NEAR)
    benchmark.group = f"first epoch, {shape}, {'training' if load else 'reading'}"
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
        clock = Clock(load * rates[shape]) if load else None
        read = 0
        for batch in loader:
            read += len(batch["x0"])
            if clock is not None:
                clock.take(len(batch["x0"]))
        assert read == rows

    benchmark.pedantic(epoch, setup=lambda: ((next(caches),), {}), rounds=ROUNDS)
    if not load and not converted and benchmark.stats:
        rates[shape] = rows / benchmark.stats.stats.median
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

"""Shapes of data, and datasets of them in row groups of a given size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def _images(rng: np.random.Generator, size: int) -> pa.Table:
    lengths = rng.integers(90_000, 110_000, max(1, size // 100_000))
    return pa.table({"image": pa.array([rng.bytes(int(length)) for length in lengths], pa.binary())})


def _numbers(count: int) -> Callable[[np.random.Generator, int], pa.Table]:
    def make(rng: np.random.Generator, size: int) -> pa.Table:
        values = rng.random((count, max(1, size // (4 * count))), np.float32)
        return pa.table({f"f{column:04d}": values[column] for column in range(count)})

    return make


def _tokens(rng: np.random.Generator, size: int) -> pa.Table:
    lengths = rng.integers(256, 1792, max(1, size // 4096))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    values = rng.integers(0, 50_257, offsets[-1], dtype=np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))})


def _texts(rng: np.random.Generator, size: int) -> pa.Array:
    lengths = rng.integers(200, 800, max(1, size // 500))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    letters = rng.integers(97, 123, offsets[-1], dtype=np.uint8)
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(letters))


def _text(rng: np.random.Generator, size: int) -> pa.Table:
    return pa.table({"text": _texts(rng, size)})


def _labelled(rng: np.random.Generator, size: int) -> pa.Table:
    rows = max(1, size // 20)
    numbers = {name: rng.random(rows, np.float32) for name in ("x", "y")}
    return pa.table({"id": np.arange(rows), **numbers, "label": rng.integers(0, 10, rows, np.int32)})


def _codes(rng: np.random.Generator, size: int) -> pa.Table:
    distinct = _texts(np.random.default_rng(0), 500_000)
    codes = rng.integers(0, len(distinct), max(1, size // 500), dtype=np.int32)
    return pa.table({"text": pa.DictionaryArray.from_arrays(codes, distinct).cast(pa.string())})


SHAPES: dict[str, Callable[[np.random.Generator, int], pa.Table]] = {
    "images": _images,
    "numbers": _numbers(18),
    "wide": _numbers(2000),
    "tokens": _tokens,
    "text": _text,
    "codes": _codes,
    "files": _labelled,
}
ONE_A_FILE = "files"  # a shape whose files have a row group each


def write(shape: str, group_bytes: int, num_bytes: int, folder: Path) -> None:
    """Write a dataset of `num_bytes`, in row groups of `group_bytes` before encoding. Keep one that is complete."""
    complete = folder.with_name(f"{folder.name}.complete")
    if complete.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    groups, rng = max(1, num_bytes // group_bytes), np.random.default_rng(0)
    per_file = 1 if shape == ONE_A_FILE else max(1, (256 << 20) // group_bytes)
    for number in range(0, groups, per_file):
        tables = [SHAPES[shape](rng, group_bytes) for _ in range(number, min(groups, number + per_file))]
        codec = "zstd" if shape in ("text", "codes") else "none"
        with pq.ParquetWriter(
            folder / f"{number:06d}.parquet", tables[0].schema, compression=codec, use_dictionary=shape == "codes"
        ) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(1, table.num_rows))
    complete.touch()

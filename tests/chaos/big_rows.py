"""A column of more than 2 GiB in one row group, which overflows 32-bit offsets. It takes minutes and 10 GB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset

ROWS, LENGTH = 270_000, 8_000


def text_of(row: int) -> str:
    return f"{row:08d}" * (LENGTH // 8)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_more_text_than_32_bits_count(tmp_path: Path, compression: str) -> None:
    def chunk(first: int) -> pa.Array:
        return pa.array([text_of(row) for row in range(first, first + 10_000)], pa.large_string())

    text = pa.chunked_array([chunk(first) for first in range(0, ROWS, 10_000)])
    assert text.nbytes > 2**31
    path = tmp_path / "x.parquet"
    table = pa.table({"text": text, "id": np.arange(ROWS)})
    pq.write_table(table, path, row_group_size=ROWS, compression=compression, use_dictionary=False)
    del table, text
    dataset = make_dataset(str(path), cache=CacheConfig(str(tmp_path / "cache"), "20GB"))
    assert len(dataset.row_groups) == 1
    rows = np.random.default_rng(0).integers(0, ROWS, 5_000)
    batch = dataset.__getitems__(rows).columns
    assert batch["id"].tolist() == rows.tolist()
    assert batch["text"] == [text_of(row) for row in rows.tolist()]

"""Lists of fixed-size lists, such as boxes, arrive as a tensor [n, …] for each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from decoded import whole
from row_groups import make_in_background

from dataload import CacheConfig, make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.errors import DataError
from dataload.formats import parquet
from dataload.rows.background_decoder.client import BackgroundDecoder
from dataload.rows.collate import Flat

BOXES = pa.list_(pa.list_(pa.float32(), 4))
ROWS = [[[row, n, 2.0, 3.0] for n in range(row % 4)] for row in range(40)]


@pytest.fixture
def dataset(tmp_path: Path, cache: CacheConfig) -> Dataset:
    table = pa.table({"boxes": pa.array([*ROWS[:-1], None], BOXES), "id": range(len(ROWS))})
    pq.write_table(table, tmp_path / "boxes.parquet", row_group_size=10)
    return make_dataset(tmp_path / "boxes.parquet", cache=cache)


def in_order(batches: Any) -> list[Any]:
    """Return the boxes of all rows as Python values."""
    rows = [row for batch in batches for row in zip(batch["id"].tolist(), batch["boxes"], strict=True)]
    return [None if boxes is None else boxes.tolist() for _, boxes in sorted(rows, key=lambda row: row[0])]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"device": "cpu"}], ids=str)
def test_each_row_is_a_tensor(dataset: Dataset, options: dict[str, Any]) -> None:
    for _ in range(2):  # the second time, from the cache
        batches = list(make_loader(dataset, 8, **options))
        assert in_order(batches) == [*ROWS[:-1], None]
    boxes = [row for batch in batches for row in batch["boxes"] if row is not None]
    assert {(row.dtype, row.shape[1:]) for row in boxes} == {(torch.float32, (4,))}
    assert dataset[0]["boxes"].shape == (0, 4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_flat(dataset: Dataset, num_workers: int) -> None:
    batches = list(make_loader(dataset, 8, shuffle=False, ragged="flat", num_workers=num_workers))
    flats = [batch["boxes"] for batch in batches]
    assert all(isinstance(flat, Flat) for flat in flats)
    values = torch.cat([flat.values for flat in flats])
    assert values.shape == (sum(map(len, ROWS[:-1])), 4)
    assert values.tolist() == [box for row in ROWS[:-1] for box in row]
    assert flats[0].offsets.diff().tolist() == [len(row) for row in ROWS[:8]]


def test_the_background_decoder_makes_the_same_blobs(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    try:
        make_in_background(decoder, 0)  # starts it
        assert decoder._process is not None
        assert decoder._process.ready.wait(200)
        assert make_in_background(decoder, 1)
    finally:
        decoder.end()
    monkeypatch.setattr(parquet.ParquetFooter, "open_row_group", None)
    assert [boxes.tolist() for boxes in dataset.__getitems__(range(10, 20)).columns["boxes"]] == ROWS[10:20]


def test_map_gets_and_keeps_them(dataset: Dataset) -> None:
    def counted(batch: dict[str, Any]) -> dict[str, Any]:
        assert all(boxes is None or boxes.shape[1:] == (4,) for boxes in batch["boxes"])
        return {"count": np.array([0 if boxes is None else len(boxes) for boxes in batch["boxes"]])}

    counts = dataset.map(counted).__getitems__(range(len(ROWS))).columns["count"]
    assert counts.tolist() == [*map(len, ROWS[:-1]), 0]
    kept = dataset.map(lambda batch: {"id": batch["id"] + 1}, columns=["id"])
    assert [row.tolist() for row in kept.__getitems__([3, 7]).columns["boxes"]] == [ROWS[3], ROWS[7]]


def test_nulls_inside_of_them() -> None:
    floats = pa.table({"c": pa.array([[[1, None]], [None, [3, 4]], None], pa.list_(pa.list_(pa.float64(), 2)))})
    found = whole(floats)["c"]
    assert np.isnan(found[0].numpy()).tolist() == [[False, True]]
    assert np.isnan(found[1].numpy()).tolist() == [[True, True], [False, False]]
    assert found[2] is None
    assert [row.tolist() for row in whole(floats, 0.0)["c"][:2]] == [[[1, 0]], [[0, 0], [3, 4]]]
    assert whole(floats, {"c": [9.0, 8.0]})["c"][1].tolist() == [[9, 8], [3, 4]]
    ints = pa.table({"c": pa.array([[[1, 2]], [[3, None], None]], pa.list_(pa.list_(pa.int8(), 2)))})
    with pytest.raises(DataError, match="column 'c' has 2 nulls inside its lists: pass fill_null="):
        whole(ints)
    masked = whole(ints, null_masks=True)
    assert (masked["c.is_null"].tolist(), masked["c"][1].tolist()) == ([False, True], [[3, 0], [0, 0]])
    assert whole(ints, {"c": 7})["c"][1].tolist() == [[3, 7], [7, 7]]


def test_tensors_in_lists_keep_their_permutation() -> None:
    tensor = pa.fixed_shape_tensor(pa.int16(), (2, 3), permutation=[1, 0])
    inner = pa.ExtensionArray.from_storage(
        tensor, pa.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], pa.list_(pa.int16(), 6))
    )
    rows = pa.ListArray.from_arrays([0, 2, 2], inner)
    found = whole(pa.table({"c": rows}))["c"]
    assert [row.shape for row in found] == [(2, 3, 2), (0, 3, 2)]
    assert found[0][0].tolist() == [[1, 4], [2, 5], [3, 6]]


def test_lists_of_lists_stay_python_values() -> None:
    rows = [[[1, 2], []], [], None]
    assert whole(pa.table({"c": pa.array(rows, pa.list_(pa.list_(pa.int64())))}))["c"] == rows


def test_files_with_boxes_of_other_sizes_become_lists(tmp_path: Path) -> None:
    for size in (2, 3):
        table = pa.table({"c": pa.array([[[1] * size]], pa.list_(pa.list_(pa.int64(), size)))})
        pq.write_table(table, tmp_path / f"{size}.parquet")
    assert make_dataset(tmp_path, cache=False).__getitems__([0, 1]).columns["c"] == [[[1, 1]], [[1, 1, 1]]]

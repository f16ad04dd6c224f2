"""`dataset["column"]`: all values of a column as an array, for stratified splits and weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import make_dataset, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.rows.whole_column import whole_column

N = 1000


def table() -> pa.Table:
    draw = np.random.default_rng(0)
    return pa.table(
        {
            "label": draw.integers(0, 9, N).astype(np.int32),
            "score": pa.array([None if row % 7 == 0 else row / 2 for row in range(N)]),
            "vector": pa.FixedSizeListArray.from_arrays(draw.random(3 * N, np.float32), 3),
            "word": [f"w{row % 13}" if row % 5 else None for row in range(N)],
            "tokens": [[row] * 2 for row in range(N)],
            "blob": [b"%d" % row for row in range(N)],
            "nested": [[{"a": row}] for row in range(N)],
        }
    )


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr("dataload.dataset.BYTES_AT_ONCE", 4096)  # several parts
    pq.write_table(table(), tmp_path / "x.parquet", row_group_size=150)
    return make_dataset(tmp_path, cache=False)


def test_each_kind_of_column(dataset: Dataset) -> None:
    stored = table()
    label = dataset["label"]
    assert (label.dtype, label.tolist()) == (np.dtype(np.int32), stored["label"].to_pylist())
    score = dataset["score"]
    assert np.array_equal(np.isnan(score), [row % 7 == 0 for row in range(N)])
    assert score[8] == 4.0
    assert np.array_equal(dataset["vector"], np.array(stored["vector"].to_pylist(), np.float32))
    for name in ("word", "blob", "nested"):
        column = dataset[name]
        assert (column.dtype, column.shape) == (np.dtype(np.object_), (N,))
        assert column.tolist() == stored[name].to_pylist()
    assert [each.tolist() for each in dataset["tokens"]] == stored["tokens"].to_pylist()
    label[0] = 99  # The array is the caller's.
    assert dataset["label"][0] != 99


def test_it_has_the_rows_of_splits_selections_filters_and_maps(dataset: Dataset) -> None:
    label = np.array(table()["label"].to_pylist())
    rows = np.flatnonzero(label == 3)
    assert np.array_equal(dataset.select(rows[::-1])["word"], dataset["word"][rows])
    assert np.array_equal(dataset.filter([("label", "=", 3)])["label"], label[rows])
    parts = dataset.split([0.5, 0.5])
    assert sorted(np.concatenate([part["blob"] for part in parts])) == sorted(dataset["blob"])
    doubled = dataset.map(lambda batch: {"label": 2 * batch["label"]}, columns=["label"]).select(rows)
    assert np.array_equal(doubled["label"], 2 * label[rows])
    assert np.array_equal(doubled["word"], dataset["word"][rows])
    mixture = mix(dataset.split([0.5, 0.5]), [1, 1])
    assert sorted(mixture["label"].tolist()) == sorted(label.tolist())
    with pytest.raises(ConfigError, match="column 'labels' is not in the dataset: did you mean 'label'"):
        dataset["labels"]


def test_arguments_of_the_dataset_hold_for_the_column(tmp_path: Path) -> None:
    columns = {"x": pa.array([1, None]), "y": [1, 2], "text": pa.array([b"a", b"\xff"]).view(pa.string())}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    filled = make_dataset(tmp_path, fill_null={"x": -1}, errors="replace", cache=False)
    assert filled["x"].tolist() == [1, -1]
    assert filled["text"].tolist() == ["a", "\ufffd"]
    masked = make_dataset(tmp_path, null_masks=True, errors="replace", cache=False)
    assert masked["x"].tolist() == [1, 0]
    assert masked["x.is_null"].tolist() == [False, True]
    with pytest.raises(ConfigError, match=r"column 'x.is_nul' is not in the dataset: did you mean 'x.is_null'"):
        masked["x.is_nul"]
    with pytest.raises(DataError, match="'x' has 1 nulls"):
        make_dataset(tmp_path, cache=False)["x"]


def test_a_struct_names_its_members(tmp_path: Path) -> None:
    pq.write_table(pa.table({"box": [{"left": 1, "top": 2}]}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    with pytest.raises(ConfigError, match=r"'box' is a struct: name one of its members, 'box\.left', 'box\.top'"):
        dataset["box"]


def test_parts_are_copied_one_by_one() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def parts() -> Iterator[torch.Tensor]:
        for number in range(4):
            part = torch.full((2, 3), number)
            made.append(weakref.ref(part))
            assert sum(each() is not None for each in made) <= 2
            yield part
            del part

    assert whole_column(parts(), 8)[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_only_the_bytes_of_the_column_are_fetched(bucket: Any) -> None:
    draw = np.random.default_rng(0)
    large = pa.table({"label": np.arange(N), "image": [draw.bytes(2000) for _ in range(N)]})
    bucket.put_table("data/x.parquet", large, row_group_size=500)
    dataset = make_dataset(bucket.url("data"), storage_options=bucket.options, cache=False)
    before = dataset.blocks.stats()["bytes_origin"]
    assert dataset["label"].tolist() == [*range(N)]
    assert dataset.blocks.stats()["bytes_origin"] - before < 100_000


def test_rows_of_no_row_group_are_an_empty_array(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.int32()), "y": pa.array([], pa.string())}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    assert (dataset["x"].dtype, dataset["x"].shape) == (np.dtype(np.int32), (0,))
    assert dataset["y"].shape == (0,)


def test_rows_that_flat_map_made(dataset: Dataset) -> None:
    twice = dataset.flat_map(lambda batch: {"label": batch["label"].repeat_interleave(2)}, columns=["label"])
    assert np.array_equal(twice["label"], np.repeat(dataset["label"], 2))
    assert np.array_equal(twice.map(lambda batch: {"half": batch["label"] / 2})["half"], twice["label"] / 2)

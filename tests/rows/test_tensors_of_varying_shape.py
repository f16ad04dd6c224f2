"""Columns of `arrow.variable_shape_tensor` arrive as a tensor for each row."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import CacheConfig, make_dataset, make_loader
from dataload.catalog.preview import first_rows
from dataload.errors import DataError

STORAGE = pa.struct([("data", pa.list_(pa.uint8())), ("shape", pa.list_(pa.int32(), 3))])
IMAGES = [None if n % 5 == 4 else np.full((n % 3 + 1, n % 2 + 1, 3), n, np.uint8) for n in range(20)]


def column(name: str = "image", metadata: str = "{}", kind: pa.DataType = STORAGE) -> pa.Field:
    extension = {"ARROW:extension:name": "arrow.variable_shape_tensor", "ARROW:extension:metadata": metadata}
    return pa.field(name, kind, metadata=extension)


def rows_of(images: list[Any]) -> list[Any]:
    return [None if each is None else {"data": each.reshape(-1).tolist(), "shape": each.shape} for each in images]


def table_of(values: list[Any], field: pa.Field | None = None, **others: Any) -> pa.Table:
    field = field or column()
    fields = [field, *(pa.field(name, each.type) for name, each in others.items())]
    return pa.Table.from_arrays([pa.array(values, field.type), *others.values()], schema=pa.schema(fields))


def write(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=10)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, 10)
    return path


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"ragged": "flat"}], ids=str)
def test_each_row_is_a_tensor(tmp_path: Path, cache: CacheConfig, ending: str, options: dict[str, Any]) -> None:
    path = write(table_of(rows_of(IMAGES), n=pa.array(range(20))), tmp_path / f"x.{ending}")
    dataset = pickle.loads(pickle.dumps(make_dataset(path, cache=cache)))
    assert dataset.schema.names == ["image", "n"]
    for _ in range(2):  # the second time, from the cache
        for batch in make_loader(dataset, 6, **options):
            for number, image in zip(batch["n"].tolist(), batch["image"], strict=True):
                expected = IMAGES[number]
                assert image is None if expected is None else np.array_equal(image, expected)
                assert image is None or (image.dtype, image.ndim) == (torch.uint8, 3)


def test_rows_for_a_collate_function_have_tensors(tmp_path: Path) -> None:
    path = write(table_of(rows_of(IMAGES[:4])), tmp_path / "x.parquet")
    [rows] = make_loader(make_dataset(path, cache=False), 4, shuffle=False, collate_fn=list)
    assert [row["image"].shape for row in rows] == [image.shape for image in IMAGES[:4] if image is not None]


def test_map_gets_them_and_keeps_them(tmp_path: Path, cache: CacheConfig) -> None:
    dataset = make_dataset(write(table_of(rows_of(IMAGES), n=pa.array(range(20))), tmp_path / "x.parquet"), cache=cache)
    doubled = dataset.map(lambda batch: {**batch, "image": [None if x is None else 2 * x for x in batch["image"]]})
    kept = doubled.map(lambda batch: {"m": batch["n"] + 1}, columns=["n"])
    for number, image in enumerate(kept.__getitems__(range(20)).columns["image"]):
        assert image is None if IMAGES[number] is None else np.array_equal(image, 2 * IMAGES[number])


def test_head_and_a_member_of_a_struct(tmp_path: Path) -> None:
    inner = pa.field("s", pa.struct([column(), pa.field("n", pa.int64())]))
    rows = [{"image": row, "n": 1} for row in rows_of(IMAGES[:3])]
    dataset = make_dataset(write(table_of(rows, inner), tmp_path / "x.parquet"), cache=False)
    assert dataset.schema.names == ["s.image", "s.n"]
    found = dataset.__getitems__([0, 1, 2]).columns["s.image"]
    assert [tuple(image.shape) for image in found] == [image.shape for image in IMAGES[:3] if image is not None]
    [row] = first_rows(dataset.manifest, ["s.image"], dataset.blocks, 1)
    assert row["s.image"]["shape"] == list(found[0].shape)


def test_numbers_of_files_are_promoted(tmp_path: Path) -> None:
    wide = pa.struct([("data", pa.list_(pa.float32())), ("shape", pa.list_(pa.int32(), 3))])
    write(table_of(rows_of(IMAGES[:2])), tmp_path / "a.parquet")
    write(table_of(rows_of(IMAGES[2:3]), column(kind=wide)), tmp_path / "b.parquet")
    found = make_dataset(tmp_path, cache=False).__getitems__([0, 1, 2]).columns["image"]
    assert [(image.dtype, tuple(image.shape)) for image in found] == [
        (torch.float32, image.shape) for image in IMAGES[:3] if image is not None
    ]


def test_a_permutation_leaves_data_and_shape(tmp_path: Path) -> None:
    path = write(table_of(rows_of(IMAGES[:2]), column(metadata='{"permutation":[2,0,1]}')), tmp_path / "x.parquet")
    assert make_dataset(path, cache=False).schema.names == ["image.data", "image.shape"]


@pytest.mark.parametrize(
    "row",
    [
        {"data": [1, 2, 3], "shape": [1, 1, 2]},
        {"data": [1, 2, 3], "shape": [-1, -1, 3]},
        {"data": [1, None, 3], "shape": [1, 1, 3]},
        {"data": [1, 2, 3], "shape": [1, None, 3]},
        {"data": [], "shape": [2**31 - 1, 2**31 - 1, 2**31 - 1]},
    ],
    ids=str,
)
def test_other_numbers_than_the_shape_tells(tmp_path: Path, row: Any) -> None:
    dataset = make_dataset(write(table_of([row]), tmp_path / "x.parquet"), cache=False)
    with pytest.raises(
        DataError, match=r"x\.parquet row group 0 column 'image' has nulls inside its tensors, or other"
    ):
        dataset.__getitems__([0])

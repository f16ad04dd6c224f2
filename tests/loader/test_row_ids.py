"""Batches with row numbers, and errors that name them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dataload import CacheConfig, World, evaluate_over, fit, make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.loader.bad_rows import ranges
from dataload.rows.numbered_rows import ROW_IDS

FILES = [[40, 60], [7, 0, 93], [50, 50, 1]]
N = 301


@pytest.fixture
def dataset(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Dataset:
    """Row i has half == i / 2."""
    columns = ["half", "vector", "text"]
    return make_dataset(dataset_of(FILES), columns=columns, storage_options=bucket.options, cache=cache)


def check(batches: list[dict[str, Any]]) -> list[int]:
    """Check the row numbers of batches against a column. Return them."""
    for batch in batches:
        assert batch["row_id"].dtype == torch.int64
        assert batch["row_id"].shape == batch["half"].shape
        assert torch.equal(batch["row_id"] / 2, batch["half"])
    return [int(row) for batch in batches for row in batch["row_id"]]


def sees_row_id(batch: dict[str, Any]) -> dict[str, Any]:
    assert torch.equal(batch["row_id"] / 2, batch["half"])
    return {**batch, "seen": batch["row_id"] * 3}


@pytest.mark.variants
@pytest.mark.parametrize("shuffle", [True, "full", False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transform": sees_row_id},
        {"transform": sees_row_id, "num_workers": 2},
        {"ragged": "flat"},
        {"pin_memory": False, "device": "cpu"},
        {"collate_fn": lambda rows: rows.columns},
    ],
    ids=" ".join,
)
def test_batches_have_the_numbers_of_their_rows(
    dataset: Dataset, shuffle: Any, drop_last: bool, options: dict[str, Any]
) -> None:
    found = []
    for rank in range(2):
        loader = make_loader(
            dataset, 16, shuffle=shuffle, drop_last=drop_last, row_ids=True, world=World(rank, 2), **options
        )
        mine = check(list(loader))
        plain = make_loader(dataset, 16, shuffle=shuffle, drop_last=drop_last, world=World(rank, 2))
        assert mine == [int(2 * half) for batch in plain for half in batch["half"]]
        found += mine[: len(mine) - (0 if drop_last else loader.padding)]
    assert len(found) == len(set(found)) == (288 if drop_last else N)


def test_without_row_ids_there_are_none(dataset: Dataset) -> None:
    assert "row_id" not in next(iter(make_loader(dataset, 16)))
    assert "row_id" not in dataset.__getitems__([3]).columns


def test_groups_and_row_dicts_have_row_ids(dataset: Dataset) -> None:
    group = {"both": ["half"]}
    for batch in make_loader(dataset, 16, group=group, row_ids=True):
        assert torch.equal(batch["both"][:, 0], batch["row_id"] / 2)
    dicts = make_loader(dataset, 16, collate_fn=lambda rows: [dict(row) for row in rows], row_ids=True)
    rows = [row for batch in dicts for row in batch]
    assert all(row["row_id"] == 2 * row["half"] for row in rows)
    assert {row["row_id"].dtype for row in rows} == {torch.int64}


def test_a_plain_dataloader_of_the_loader_s_parts_has_row_ids(dataset: Dataset) -> None:
    loader = make_loader(dataset, 16, row_ids=True)
    plain = DataLoader(dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    assert sorted(check(list(plain))) == list(range(N))


def test_row_ids_are_in_the_memory_for_the_device(dataset: Dataset) -> None:
    made: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(shape, dtype=dtype))
        return made[-1]

    batch = dataset.__getitems__([7, 3, 300]).shaped(computed=ROW_IDS).batch(empty)
    assert batch["row_id"].tolist() == [7, 3, 300]
    assert any(batch["row_id"] is tensor for tensor in made)


def test_a_transform_that_changes_the_numbers_changes_no_row(dataset: Dataset) -> None:
    def forget(batch: dict[str, Any]) -> dict[str, Any]:
        batch["row_id"].zero_()
        return batch

    loader = make_loader(dataset, 16, transform=forget, row_ids=True, seed=3)
    halves = [[batch["half"].tolist() for batch in loader] for _ in range(2)]
    plain = make_loader(dataset, 16, seed=3)
    assert halves == [[batch["half"].tolist() for batch in plain] for _ in range(2)]


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
def test_row_ids_of_a_resumed_epoch(dataset: Dataset, workers: int) -> None:
    options: dict[str, Any] = {"row_ids": True, "transform": sees_row_id, "num_workers": workers}
    whole = check(list(make_loader(dataset, 16, **options)))
    loader, resumed = (make_loader(dataset, 16, **options) for _ in range(2))
    batches = iter(loader)
    first = check([next(batches) for _ in range(5)])
    batches.close()
    resumed.load_state_dict(loader.state_dict())
    assert first + check(list(resumed)) == whole


def test_row_ids_of_a_split_are_those_of_the_split(dataset: Dataset) -> None:
    for part in dataset.split([0.6, 0.4]):
        for batch in make_loader(part, 16, row_ids=True):
            where = part.locate(batch["row_id"])
            numbers = [dataset.locate(range(N)).index(location) for location in where]
            assert numbers == (batch["half"] * 2).tolist()


def test_fit_and_evaluate_over_get_row_ids(dataset: Dataset) -> None:
    model = nn.Linear(3, 1)
    seen: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        seen.extend(check([batch]))
        return model(batch["vector"]).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    fit(model, optimizer, make_loader(dataset, 16, row_ids=True), loss, epochs=1)
    assert sorted(seen) == list(range(N))
    mean = evaluate_over(model, make_loader(dataset, 16, row_ids=True), lambda model, batch: {"row": batch["row_id"]})
    assert mean == {"row": (N - 1) / 2, "rows": N}


@pytest.mark.parametrize(
    "options", [{"columns": ["row_id", "half"]}, {"columns": ["half"], "group": {"row_id": ["half"]}}], ids=str
)
def test_a_column_of_that_name(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, options: dict[str, Any]
) -> None:
    url = dataset_of(FILES)
    with pytest.raises(ConfigError, match="row_ids=True adds the column 'row_id'"):
        make_loader(url, 16, row_ids=True, storage_options=bucket.options, cache=cache, **options)


# Errors


def broken(batch: dict[str, Any]) -> dict[str, Any]:
    if 75.0 in batch["half"]:
        raise LookupError("a broken transform")
    return batch


def broken_rows(rows: Any) -> Any:
    return broken(rows.columns)


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("user", [{"transform": broken}, {"collate_fn": broken_rows}], ids=["transform", "collate_fn"])
def test_an_error_names_the_rows_of_its_batch(dataset: Dataset, workers: int, shuffle: bool, user: Any) -> None:
    loader = make_loader(dataset, 16, shuffle=shuffle, num_workers=workers, world=World(1, 2), **user)
    loader.set_epoch(4)
    plain = make_loader(dataset, 16, shuffle=shuffle, world=World(1, 2))
    plain.set_epoch(4)
    batches = [(batch["half"] * 2).long() for batch in plain]
    [bad] = [number for number, rows in enumerate(batches) if 150 in rows] or [None]
    if bad is None:  # The row is in a batch of the other rank.
        list(loader)
        return
    with pytest.raises(LookupError, match="a broken transform") as caught:
        list(loader)
    text = "".join(traceback.format_exception(caught.value))
    assert f"rank 1, epoch 4, batch {bad} has 16 rows of the dataset: {ranges(batches[bad].numpy())}\n" in text
    assert "loader.dataset.locate(" in text


def test_the_rank_of_the_row_raises(dataset: Dataset) -> None:
    """One of two ranks must have raised above, in each order."""
    for shuffle in (True, False):
        errors = 0
        for rank in range(2):
            loader = make_loader(dataset, 16, shuffle=shuffle, transform=broken, world=World(rank, 2))
            try:
                list(loader)
            except LookupError:
                errors += 1
        assert errors == 1


def test_an_error_of_a_plain_dataloader_names_its_rows(dataset: Dataset) -> None:
    loader = make_loader(dataset, 50, shuffle=False, transform=broken)
    plain = DataLoader(dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    with pytest.raises(LookupError) as caught:
        list(plain)
    assert "this batch has 50 rows of the dataset: 150-199\n" in caught.value.__notes__[0]


def test_an_error_of_a_value_names_the_rows_of_its_batch_though_batches_are_made_together(tmp_path: Path) -> None:
    texts = pa.array([b"\xff" if row == 40 else b"row" for row in range(64)]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="'text' has a string that is not UTF-8") as caught:
        list(make_loader(make_dataset(tmp_path, cache=False), 8, shuffle=False))
    assert "rank 0, epoch 0, batch 5 has 8 rows of the dataset: 40-47\n" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("numbers", "most", "text"),
    [
        ([5], 100, "5"),
        ([3, 1, 2, 9, 7, 8, 5], 100, "1-3, 5, 7-9"),
        ([1, 1, 0], 100, "0-1"),
        (range(0, 100, 2), 15, "0, 2, 4, 6, …"),
        (range(0, 100, 2), 3, "…"),
    ],
)
def test_ranges(numbers: Any, most: int, text: str) -> None:
    found = ranges(np.array(numbers), most)
    assert found == text
    assert len(found) <= most


def test_row_numbers_of_a_large_batch_are_cut() -> None:
    assert len(ranges(np.arange(0, 2_000_000, 2))) <= 4000

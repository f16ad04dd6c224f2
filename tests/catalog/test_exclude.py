"""Rows that are excluded come in no batch, and the rest as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.errors import ConfigError


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    for number in range(2):
        ids = np.arange(50) + 50 * number
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{number}.parquet", row_group_size=20)
    return make_dataset(tmp_path, cache=False)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.int32)])
def test_excluded_rows_come_in_no_batch(dataset, kind):
    rows = [3, 99, -2, 3, 41]
    kept = dataset.exclude(kind(rows))
    expected = np.delete(np.arange(100), rows)
    assert kept["id"].tolist() == expected.tolist()
    seen = [number for batch in make_loader(kept, 7) for number in batch["id"].tolist()]
    assert sorted(seen) == expected.tolist()


def test_exclusions_are_selections(dataset):
    once = dataset.exclude([1, 2, 98])
    rest = np.delete(np.arange(100), [1, 2, 98])
    assert once.fingerprint == dataset.select(rest).fingerprint != dataset.fingerprint
    twice = dataset.exclude([1]).exclude([1, 97])  # 2 and 98, of which the numbers have moved by one
    assert twice["id"].tolist() == once["id"].tolist()
    assert dataset.filter([("id", "<", 60)]).exclude([0])["id"].tolist() == list(range(1, 60))
    assert dataset.exclude([]).fingerprint == dataset.fingerprint


def test_row_ids_of_batches_can_be_excluded(dataset):
    bad = [
        row
        for batch in make_loader(dataset, 9, row_ids=True)
        for row in batch["row_id"][batch["id"] % 10 == 0].tolist()
    ]
    assert all(dataset.exclude(bad)["id"] % 10)


def test_rows_that_cannot_be_excluded_are_told(dataset):
    for mask in (np.arange(len(dataset)) == 1, [True] * len(dataset)):
        with pytest.raises(ConfigError, match=r"exclude takes row numbers, not a mask: give it np.flatnonzero\(mask\)"):
            dataset.exclude(mask)
    with pytest.raises(ConfigError, match="exclude leaves no row"):
        dataset.exclude(range(100))
    with pytest.raises(IndexError, match="row 100 of a dataset of 100 rows"):
        dataset.exclude([100])
    with pytest.raises(ConfigError, match="rows must be a list of row numbers"):
        dataset.exclude([0.5])


def test_a_row_may_be_named_from_both_ends(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "x.parquet")
    assert make_dataset(tmp_path / "x.parquet", cache=False).exclude([0, -10, 9])["id"].tolist() == [*range(1, 9)]

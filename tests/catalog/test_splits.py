"""Splits of a dataset are disjoint, complete, close to the fractions, and always the same."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import make_dataset
from dataload.cache.blocks.reader import Object
from dataload.cache.config import CacheConfig
from dataload.catalog.footer_cache import FooterLocation
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.catalog.splits import COARSE, split
from dataload.errors import ConfigError

FOOTER_AT = FooterLocation(Object("bucket", 0, "run"), 0)


def manifest_of(files: Sequence[Sequence[int]]) -> Manifest:
    groups = [
        RowGroup(Object(f"bucket/{name}.parquet", 1, "v"), FOOTER_AT, number, rows, 10 * rows)
        for name, counts in enumerate(files)
        for number, rows in enumerate(counts)
    ]
    return Manifest(pa.schema({"a": pa.int64()}), tuple(groups), "whole")


def fractions_of(weights: Sequence[int]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


@given(
    files=st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=8),
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    seed=st.integers(0, 5),
)
def test_parts(files: list[list[int]], weights: list[int], seed: int) -> None:
    whole, fractions = manifest_of(files), fractions_of(weights)
    total = sum(map(sum, files))
    if total < len(fractions):
        return  # see below
    parts = split(whole, fractions, seed)
    shares = [part.num_rows / total for part in parts]
    if any(part.selection is not None for part in parts):
        assert shares == pytest.approx(fractions, abs=len(parts) / total)
        assert sorted(itertools.chain(*(_rows_of(part, whole) for part in parts))) == list(range(total))
        return
    assert shares == pytest.approx(fractions, abs=COARSE)
    together = [group for part in parts for group in part.row_groups]
    assert len(together) == len(whole.row_groups)
    assert set(together) == set(whole.row_groups)
    place = {group: at for at, group in enumerate(whole.row_groups)}
    for part in parts:
        assert part.num_rows > 0
        assert [place[group] for group in part.row_groups] == sorted(place[group] for group in part.row_groups)
        assert part.schema == whole.schema
    assert len({part.fingerprint for part in parts}) == len(parts)
    assert split(whole, fractions, seed) == parts


@given(
    rows=st.lists(st.integers(1, 50), min_size=20, max_size=60),
    weights=st.lists(st.integers(3, 5), max_size=3, min_size=2),
)
def test_parts_are_as_near_the_fractions_as_row_groups_allow(rows: list[int], weights: list[int]) -> None:
    whole, fractions = manifest_of([rows]), fractions_of(weights)
    ends = list(itertools.accumulate(part.num_rows for part in split(whole, fractions, 0)))
    for end, expected in zip(ends, itertools.accumulate(fractions), strict=True):
        assert abs(end - expected * sum(rows)) <= max(rows) / 2 + 1e-6


@pytest.mark.parametrize("counts", [[1000], [0, 990, 10], [3]])
def test_with_few_row_groups_the_parts_have_random_rows(counts: list[int]) -> None:
    whole, fractions = manifest_of([counts]), [0.7, 0.1, 0.1, 0.1][: min(4, sum(counts))]
    fractions[0] += 1 - math.fsum(fractions)
    parts = split(whole, fractions, 3)
    prints = [part.fingerprint for part in parts]
    assert [part.fingerprint for part in split(whole, fractions, 3)] == prints
    assert len({whole.fingerprint, *prints}) == len(parts) + 1
    rows = [_rows_of(part, whole) for part in parts]
    assert sorted(itertools.chain(*rows)) == list(range(sum(counts)))
    if sum(counts) >= 1000:
        assert [len(each) for each in rows] == [700, 100, 100, 100]
        assert all(np.std(each) > 200 for each in rows)  # all over the row groups: 289 for uniform ones
        assert rows != [_rows_of(part, whole) for part in split(whole, fractions, 4)]


def _rows_of(part: Manifest, whole: Manifest) -> list[int]:
    """Return the numbers in `whole` of the rows of a part."""
    starts = dict(zip(whole.row_groups, np.cumsum([0, *whole.block_lengths]).tolist(), strict=False))
    whole_groups = [np.ones(rows, np.bool_) for rows in part.block_lengths]
    masks = whole_groups if part.selection is None else map(part.selection.mask, range(len(part.row_groups)))
    return [
        starts[group] + row
        for group, mask in zip(part.row_groups, masks, strict=True)
        for row in np.flatnonzero(mask).tolist()
    ]


@pytest.mark.parametrize("counts", [[], [0], [1]])
def test_each_part_needs_a_row(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"need 2 rows, and the dataset has {sum(counts)}: make fewer splits"):
        split(manifest_of([counts]), [0.5, 0.5], 0)


@pytest.mark.parametrize("fractions", [0.5, ["0.5", 0.5], None])
def test_fractions_are_numbers(fractions: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a list of numbers, such as \[0.9, 0.1\]"):
        split(manifest_of([[5, 5]]), fractions, 0)


@pytest.mark.parametrize(
    ("counts", "fractions", "rows"),
    [
        ([1000] * 10, [0.998, 0.001, 0.001], [9980, 10, 10]),
        ([576, 24], [0.5, 0.5], [300, 300]),  # such as `convert` writes of a small dataset
        ([1000] * 4, [0.8, 0.2], [3200, 800]),
    ],
)
def test_rows_are_chosen_where_row_groups_are_too_coarse(counts: list[int], fractions: list[float], rows: Any) -> None:
    assert [part.num_rows for part in split(manifest_of([counts]), fractions, 0)] == rows


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_coarse_row_groups_stay_in_their_split_when_files_come(seed: int) -> None:
    """The new file comes somewhere in the order: at most what it pushes over the border changes its split."""
    smaller, larger = (manifest_of([[1000]] * files) for files in (4, 5))
    before, after = (
        {row for part in split(whole, [0.5, 0.5], seed)[:1] for row in _rows_of(part, whole)}
        for whole in (smaller, larger)
    )
    assert len(before) == 2000
    assert len(after) == 2500
    assert len(before & after) >= 1500


def test_row_groups_that_fit_stay_whole() -> None:
    for part in split(manifest_of([[1000] * 10]), [0.5, 0.3, 0.2], 0):
        assert part.selection is None


def test_it_is_the_same_for_ever() -> None:
    """Golden splits: a resumed training must not find its training rows in the validation split."""
    train, val = split(manifest_of([[3, 4, 5], [6, 7], [8, 9, 10]]), [0.7, 0.3], 7)
    assert [(group.file.path, group.number) for group in val.row_groups] == [
        ("bucket/0.parquet", 0),
        ("bucket/0.parquet", 1),
        ("bucket/2.parquet", 1),
    ]
    assert (train.fingerprint, val.fingerprint) == (
        "59564c8df53242c8bde6cebfb1d61056",
        "d512ad537f2ae6f661212d5e0f0afc8c",
    )


def test_another_seed_splits_otherwise() -> None:
    whole = manifest_of([[1] * 20])
    found = {tuple(group.number for group in split(whole, [0.5, 0.5], seed)[0].row_groups) for seed in range(5)}
    assert len(found) == 5


def test_no_part_is_a_run_of_files() -> None:
    train, val = split(manifest_of([[10] * 10 for _ in range(10)]), [0.5, 0.5], 0)
    assert {group.file for group in train.row_groups} == {group.file for group in val.row_groups}


def test_row_groups_keep_their_order_when_files_come() -> None:
    """All old row groups of the first split stay there, except a few at the border."""
    files = [[10] * 10 for _ in range(10)]
    before, after = (split(manifest_of(some), [0.5, 0.5], 0)[0] for some in (files, [*files, [10] * 10]))
    old = {group for group in after.row_groups if group.file.path != "bucket/10.parquet"}
    assert len(old & set(before.row_groups)) >= 0.9 * len(before.row_groups)


def test_copies_elsewhere_are_split_alike(tmp_path: Path) -> None:
    """Each node may have its copy in a folder of its own."""
    for folder in ("one", "other/year=2024"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(20):
            pq.write_table(pa.table({"id": [number] * (number + 1)}), tmp_path / folder / f"{number}.parquet")
    datasets = [make_dataset(tmp_path / folder, columns=["id"], cache=False) for folder in ("one", "other")]
    one, other = (
        [group.file.name.rpartition("/")[2] for group in dataset.split([0.5, 0.5])[0].manifest.row_groups]
        for dataset in datasets
    )
    assert one == other


def test_files_of_one_name_are_not_split_in_their_order(tmp_path: Path) -> None:
    """A writer of partitions may give the file of each the same name."""
    for number in range(20):
        (tmp_path / f"day={number:02}").mkdir()
        pq.write_table(pa.table({"text": ["x"]}), tmp_path / f"day={number:02}" / "part-0.parquet")
    first, _ = make_dataset(tmp_path, columns=["text"], cache=False).split([0.5, 0.5])
    days = [int(re.search(r"day=(\d+)", group.file.name)[1]) for group in first.manifest.row_groups]
    assert days != list(range(days[0], days[0] + len(days)))


def test_one_part_is_the_whole() -> None:
    whole = manifest_of([[1, 0, 2]])
    assert split(whole, [1.0], 0) == [whole]


def test_a_part_can_be_split() -> None:
    whole = manifest_of([[5] * 12])
    parts = split(whole, [0.5, 0.5], 0)
    quarters = [quarter for part in parts for quarter in split(part, [0.5, 0.5], 0)]
    assert sorted(group.number for quarter in quarters for group in quarter.row_groups) == list(range(12))
    assert len({manifest.fingerprint for manifest in [whole, *parts, *quarters]}) == 7


@pytest.mark.parametrize(
    ("fractions", "says"),
    [
        ([], "sum to 1, not 0"),
        ([0.5, 0.4], r"\[0\.5, 0\.4\].*not 0\.9"),
        ([0.9, 0.10001], "not 1.00001"),
        ([1.0, 0.0], "positive"),
        ([1.5, -0.5], "positive"),
        ([0.5, math.nan], "positive"),
        ([1, 1], "not 2"),
    ],
)
def test_fractions_that_cannot_work(fractions: list[float], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        split(manifest_of([[1] * 10]), fractions, 0)
    assert "\n" not in str(caught.value)


def test_sums_need_only_be_near_one() -> None:
    assert len(split(manifest_of([[1] * 10]), [0.1] * 10, 0)) == 10
    assert len(split(manifest_of([[1] * 10]), [1 / 3, 1 / 3, 0.3333333], 0)) == 3


def test_datasets(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    whole = make_dataset(
        dataset_of([[3, 4], [5], [2, 6]]), columns=["half", "row_id"], storage_options=bucket.options, cache=cache
    )
    train, val = whole.split([0.7, 0.3], seed=3)
    rows = [row["row_id"].item() for part in (train, val) for row in part.__getitems__(range(len(part)))]
    assert sorted(rows) == list(range(20))
    assert train.blocks is val.blocks is whole.blocks
    assert train.schema.names == ["half", "row_id"]
    assert len({whole.fingerprint, train.fingerprint, val.fingerprint}) == 3
    again = pickle.loads(pickle.dumps(val))
    assert again.fingerprint == val.fingerprint
    assert again[0]["row_id"] == val[0]["row_id"]
    assert [part.fingerprint for part in whole.split([0.7, 0.3], seed=3)] == [train.fingerprint, val.fingerprint]
    assert len({whole.split([0.7, 0.3], seed=seed)[0].fingerprint for seed in range(10)}) > 1


def test_nulls_are_filled_in_parts(bucket: Any, cache: CacheConfig) -> None:
    bucket.put_table("data/x.parquet", pa.table({"a": [1, None, None, 4]}), row_group_size=1)
    whole = make_dataset(bucket.url("data"), fill_null=-1, storage_options=bucket.options, cache=cache)
    found = [part[number]["a"].item() for part in whole.split([0.5, 0.5]) for number in range(2)]
    assert sorted(found) == [-1, -1, 1, 4]


def test_paths_that_are_not_utf_8_are_split(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    for number in range(4):
        with (folder / f"{number}.parquet").open("wb") as file:
            pq.write_table(pa.table({"id": [number]}), file)
    splits = make_dataset(folder, cache=False).split([0.5, 0.5])
    assert sorted(int(split[row]["id"]) for split in splits for row in range(2)) == [0, 1, 2, 3]

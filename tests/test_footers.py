from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dataload import make_dataset
from dataload.cache.blocks import Object
from dataload.cache.config import CacheConfig
from dataload.cache.local import LocalTier
from dataload.dataset import Dataset
from dataload.footers import RUN, Kept, _runs, read_footer, read_footers, run_digest, stored_footer

FILES = 24


@pytest.fixture
def opened(bucket: Any, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Dataset]:
    """A dataset in runs of about four files."""
    monkeypatch.setattr("dataload.footers.RUN", 4)
    return lambda url: make_dataset(url, storage_options=bucket.options, cache=cache)


def runs_of(dataset: Dataset) -> set[Object]:
    return {group.kept.run for group in dataset.row_groups}


def fetched(bucket: Any) -> int:
    return int(bucket.server.stats()["get_requests"])


def objects(count: int) -> list[Object]:
    return [Object(f"bucket/part-{number:05d}.parquet", 1, "v") for number in range(count)]


def test_a_run_has_a_few_dozen_files_and_all_have_one() -> None:
    many = objects(10_000)
    runs = list(_runs(many))
    assert [obj for run in runs for obj in run] == many
    assert RUN / 1.3 < len(many) / len(runs) < RUN * 1.3
    assert list(_runs([])) == []


def test_one_file_more_or_less_changes_one_run() -> None:
    many = objects(10_000)
    before = {tuple(run) for run in _runs(many)}
    for number in range(0, 10_000, 97):
        after = {tuple(run) for run in _runs(many[:number] + many[number + 1 :])}
        assert len(after - before) <= 1


def test_one_file_more_fetches_the_footers_of_its_run(
    opened: Callable[[str], Dataset], bucket: Any, dataset_of: Callable[..., str]
) -> None:
    first = opened(dataset_of([[3, 1]] * FILES))
    assert fetched(bucket) == FILES
    second = opened(dataset_of([[3, 1]] * FILES + [[5]]))
    [run] = runs_of(second) - runs_of(first)
    assert fetched(bucket) == len({group.file for group in second.row_groups if group.kept.run == run})
    assert second.num_rows == first.num_rows + 5


def test_progress_has_each_file_fetched_or_kept(
    opened: Callable[[str], Dataset], bucket: Any, dataset_of: Callable[..., str]
) -> None:
    dataset = opened(dataset_of([[3]] * FILES))
    files = [group.file for group in dataset.row_groups]
    seen: list[Object] = []
    read_footers(files, dataset.blocks, seen.append)
    assert sorted(seen, key=lambda file: file.path) == files
    assert fetched(bucket) == FILES


def test_footers_are_told_apart(opened: Callable[[str], Dataset], dataset_of: Callable[..., str]) -> None:
    dataset = opened(dataset_of([[number + 1] * (1 + number % 3) for number in range(FILES)]))
    for group in dataset.row_groups:
        assert stored_footer(group.kept, dataset.blocks) is not None
        assert read_footer(group.file, group.kept, dataset.blocks).lengths[group.number] == group.rows


def test_where_a_run_is_gone_its_footers_are_fetched_one_by_one(
    opened: Callable[[str], Dataset], bucket: Any, dataset_of: Callable[..., str]
) -> None:
    dataset = opened(dataset_of([[3], [4], [5]]))
    tier, group = dataset.blocks.tier, dataset.row_groups[1]
    assert isinstance(tier, LocalTier)
    for run in runs_of(dataset):
        tier.folder.path_of(run_digest(run, dataset.blocks)).unlink()
    before = fetched(bucket)
    for _ in range(2):
        assert read_footer(group.file, group.kept, dataset.blocks).lengths == [4]
    assert fetched(bucket) - before == 1


def test_a_manifest_says_where_footers_are(opened: Callable[[str], Dataset], dataset_of: Callable[..., str]) -> None:
    url = dataset_of([[3], [0], [5]] * 5)
    first, again = opened(url), opened(url)
    assert [group.kept for group in again.row_groups] == [group.kept for group in first.row_groups]
    assert all(isinstance(group.kept, Kept) for group in again.row_groups)
    part = first.manifest.only([len(first.row_groups) - 1])
    assert part.row_groups[0].kept == first.row_groups[-1].kept

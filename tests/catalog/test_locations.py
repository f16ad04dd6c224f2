"""A row number is found in its file and row group, in a dataset and in its splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import CacheConfig, make_dataset, mix
from dataload.catalog.locations import Location, Locator
from dataload.dataset import Dataset

FILES = [[40, 60], [7, 0, 93], [50, 50, 1]]
N = 301


@pytest.fixture
def dataset(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Dataset:
    return make_dataset(dataset_of(FILES), storage_options=bucket.options, cache=cache)


def locations(folder: str, files: Sequence[Sequence[int]]) -> list[Location]:
    return [
        Location(f"{folder}/part-{file:03d}.parquet", group, row)
        for file, counts in enumerate(files)
        for group, count in enumerate(counts)
        for row in range(count)
    ]


def test_each_row_has_its_location(dataset: Dataset, bucket: Any) -> None:
    expected = locations(bucket.url("data"), FILES)
    assert [dataset.locate(row) for row in range(N)] == expected
    assert dataset.locate([*range(N)] * 4) == expected * 4  # more than IntervalIndex finds by a plain search
    assert dataset.locate(np.arange(N)[::-1]) == expected[::-1]


def test_numbers_are_an_int_or_a_sequence_or_a_tensor(dataset: Dataset, bucket: Any) -> None:
    expected = Location(f"{bucket.url('data')}/part-001.parquet", 2, 3)
    for one in (110, np.int32(110), torch.tensor(110)):
        assert dataset.locate(one) == expected
    for several in ([110, 110], (110, 110), torch.tensor([110, 110]), [torch.tensor(110), 110]):
        assert dataset.locate(several) == [expected] * 2
    assert dataset.locate([]) == []
    assert dataset.locate(torch.empty(0, dtype=torch.int64)) == []


def test_a_mixture_locates_the_rows_of_each_source_together(
    dataset: Dataset, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, expected = mix(dataset.split([0.5, 0.5])), locations(bucket.url("data"), FILES)
    calls, locate = list[int](), Locator.locate

    def counted(locator: Locator, numbers: Any) -> list[Location]:
        calls.append(len(numbers))
        return locate(locator, numbers)

    monkeypatch.setattr(Locator, "locate", counted)
    numbers = np.random.default_rng(0).permutation(N)
    found = mixture.locate(numbers)
    assert sorted(calls) == sorted(len(each) for each in mixture.datasets)
    assert sorted(found) == sorted(expected)
    for number, location in zip(numbers.tolist(), found, strict=True):
        assert mixture.locate(number) == location
    assert mixture.locate([]) == []


@pytest.mark.parametrize("wrong", [-1, N, [0, N], [-1, 0], torch.tensor([N]), 10**30, np.uint64(2**63)], ids=str)
def test_a_number_outside_the_dataset(dataset: Dataset, wrong: Any) -> None:
    with pytest.raises(IndexError, match="of a dataset of 301 rows"):
        dataset.locate(wrong)


@pytest.mark.parametrize("wrong", [1.5, [0.0], [True], "7"], ids=str)
def test_a_number_that_is_no_integer(dataset: Dataset, wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be integers"):
        dataset.locate(wrong)


@pytest.mark.parametrize("wrong", [1.5, slice(0, 2), None], ids=str)
def test_a_row_is_read_by_an_integer(dataset: Dataset, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"a row number, not {type(wrong).__name__}: .*__getitems__"):
        dataset[wrong]


@pytest.mark.parametrize("wrong", [[0.5], [True, False], np.zeros(N, np.bool_), ["7"]], ids=str)
def test_rows_are_read_by_integers(dataset: Dataset, wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be integers"):
        dataset.__getitems__(wrong)


def test_a_split_numbers_its_own_rows(dataset: Dataset) -> None:
    found: list[Location] = []
    for part in dataset.split([0.5, 0.3, 0.2]):
        for row, location in enumerate(part.locate(range(len(part)))):
            whole = dataset.locate(range(N)).index(location)
            assert part[row]["row_id"] == whole
        found += part.locate(range(len(part)))
    assert sorted(found) == sorted(dataset.locate(range(N)))


def test_the_url_of_a_local_file_opens(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.5]}), tmp_path / "x.parquet")
    url = make_dataset(tmp_path, cache=False).locate(0).url
    assert float(make_dataset(url, cache=False)[0]["x"]) == 1.5

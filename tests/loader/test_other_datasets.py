"""Loaders of torch's subsets and of datasets of Hugging Face; other objects say what to write."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, random_split

from dataload import make_dataset, make_loader, mix
from dataload.errors import ConfigError

N = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": np.arange(N), "y": np.arange(N) % 4}), tmp_path / "x.parquet", row_group_size=20)
    return tmp_path / "x.parquet"


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hugging Face datasets, without the thread of its progress bars."""
    found = pytest.importorskip("datasets")
    import tqdm  # installed with it

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    return found


def rows(source: Any, **options: Any) -> list[int]:
    options = {"shuffle": False, **({} if isinstance(source, Subset) else {"cache": False}), **options}
    return [x for batch in make_loader(source, 7, **options) for x in batch["x"].tolist()]


def test_a_subset_of_a_dataset_selects_its_rows(path: Path) -> None:
    dataset = make_dataset(path, cache=False)
    subset = Subset(dataset, [30, 5, 17, 41])
    assert rows(subset) == [5, 17, 30, 41]
    assert rows(Subset(subset, [2, 0])) == [17, 30]
    train, test = random_split(dataset, [0.8, 0.2])  # type: ignore[arg-type]
    assert sorted(rows(train) + rows(test, shuffle=True)) == [*range(N)]
    with pytest.raises(ConfigError, match=r"selects: a row number comes twice: .*, and mix repeats rows by weights"):
        make_loader(Subset(dataset, [5, 5]), 2)
    with pytest.raises(ConfigError, match="columns cannot be combined with a dataset"):
        make_loader(subset, 2, columns=["x"])
    with pytest.raises(ConfigError, match="a Subset of a mixture: select the rows of its sources"):
        make_loader(Subset(mix([dataset, dataset]), [1]), 2)


class Transformed(Subset[Any]):
    def __getitem__(self, number: Any) -> Any:
        return {"x": -self.dataset[self.indices[number]]["x"]}

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


def test_what_a_subset_does_to_its_rows_is_not_left_out(path: Path) -> None:
    source = Transformed(make_dataset(path, cache=False), [1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a Transformed, whose own __getitem__ no loader calls: pass transform="):
        make_loader(source, 2)


@pytest.mark.parametrize(
    ("indices", "outer", "says"),
    [
        ([1.9], [0], "the indices of a Subset must be a list of integers, not float64"),
        ([True, False], [0], "must be a list of integers, not bool"),
        ([5, 6], [2], "a Subset selects a row that its source does not have: index 2 is out of bounds"),
        ([N], [0], f"the rows that the source selects: row {N} of a dataset of {N} rows: row numbers count from 0$"),
    ],
)
def test_indices_that_select_no_rows(path: Path, indices: Any, outer: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_loader(Subset(Subset(make_dataset(path, cache=False), indices), outer), 2)


def test_an_order_of_the_source_that_is_not_kept_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_dataset(path, cache=False)
    assert rows(Subset(dataset, [3, -1])) == [3, N - 1]
    rows(Subset(dataset, [5, 3]), shuffle=True)
    assert not caplog.records
    rows(Subset(dataset, [5, 3]))
    assert caplog.messages == ["the source selects rows in an order of its own, and they come in that of the files"]


def test_a_package_of_the_user_called_datasets(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dataset:
        pass

    class Own(Subset[Any]):
        pass

    module = ModuleType("datasets")
    module.Dataset = Dataset  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.startswith("datasets.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "datasets", module)
    Dataset.__module__ = Own.__module__ = "datasets.images"
    assert rows(Own(make_dataset(path, cache=False), [2])) == [2]
    with pytest.raises(ConfigError, match="the source is of type Dataset: use a URL, a path, or a list of them"):
        make_loader(Dataset(), 2)  # type: ignore[arg-type]


def test_a_dataset_of_hugging_face_is_read_from_its_arrow_files(datasets: Any, path: Path, tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"x": list(range(N)), "y": [row % 4 for row in range(N)]})
    whole.save_to_disk(tmp_path / "saved", num_shards=3)
    source = datasets.load_from_disk(tmp_path / "saved")
    assert rows(source) == [*range(N)]
    assert rows(source.select(range(10, 30, 3))) == [*range(10, 30, 3)]
    shuffled = source.shuffle(seed=1)
    assert rows(shuffled.select(range(20))) == sorted(shuffled["x"][:20])
    assert rows(source.filter(lambda row: row["y"] == 2)) == [*range(2, N, 4)]
    assert rows(source.select(range(30)), filters=[("y", "=", 1)]) == [*range(1, 30, 4)]
    assert rows(Subset(source, [3, 40]), cache=False) == [3, 40]
    [batch] = make_loader(source.remove_columns("y"), N, cache=False)
    assert [*batch] == ["x"]
    parts = [source.shard(3, number, contiguous=True) for number in (2, 0)]
    assert rows(datasets.concatenate_datasets(parts)) == [*range(20), *range(40, 60)]
    for part in (source.select(range(15, 55)), source.select(range(5, 58)).select(range(10, 50))):
        assert rows(part) == [*range(15, 55)]
        assert rows(part.select([39, 0])) == [15, 54]
    [batch] = make_loader(source.with_format("numpy", columns=["y"]), N, cache=False)
    assert [*batch] == ["y"]
    [batch] = make_loader(source.with_format("numpy", columns=["y"], output_all_columns=True), N, cache=False)
    assert [*batch] == ["x", "y"]
    with pytest.raises(ConfigError, match="the source has no rows: select at least one"):
        make_loader(source.select([]), 7, cache=False)
    for make in (make_dataset, lambda source: mix([source])):
        with pytest.raises(ConfigError, match="of type Dataset: pass it to make_loader, or write it by to_parquet"):
            make(source)
    split = source.train_test_split(0.25, seed=0)
    assert sorted(rows(split["train"]) + rows(split["test"], shuffle=True)) == [*range(N)]
    [batch] = make_loader(source.cast_column("x", datasets.Value("int32")), N, cache=False)
    assert batch["x"].dtype == torch.int32
    with pytest.raises(ConfigError, match=r"other columns than its files: write it by to_parquet\(path\)"):
        make_loader(source.rename_columns({"x": "y", "y": "x"}), 7, cache=False)
    added = datasets.concatenate_datasets([source, datasets.Dataset.from_dict({"z": [0] * N})], axis=1)
    with pytest.raises(ConfigError, match="in memory, or with other columns"):
        make_loader(added, 7, cache=False)


@pytest.mark.parametrize("values", [[0, 1, 2, 3], [0.5] * 5], ids=["rows", "types"])
def test_files_that_have_changed_are_an_error(datasets: Any, tmp_path: Path, values: list[Any]) -> None:
    for name, own in (("a", [*range(5)]), ("b", values)):
        datasets.Dataset.from_dict({"x": own}).save_to_disk(tmp_path / name)
    source = datasets.load_from_disk(tmp_path / "a")
    [file] = source.cache_files
    (tmp_path / "b" / Path(file["filename"]).name).replace(file["filename"])
    with pytest.raises(ConfigError, match="other rows or types than its Arrow files"):
        make_loader(source, 2, cache=False)


def test_files_in_another_order_than_their_paths(datasets: Any, tmp_path: Path) -> None:
    parts = []
    for name, first in (("b", 0), ("a", 100)):
        datasets.Dataset.from_dict({"x": list(range(first, first + 10))}).save_to_disk(tmp_path / name)
        parts.append(datasets.load_from_disk(tmp_path / name))
    source = datasets.concatenate_datasets(parts)
    assert source["x"][12] == 102
    assert rows(source.select([1, 12])) == [102, 1]  # in the order of paths


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda hf, whole: whole, r"in memory, or with other columns than its files: write it by to_parquet\(path\)"),
        (lambda hf, whole: hf.DatasetDict({"train": whole}), r"pass one of its splits, such as source\['train'\]"),
        (lambda hf, whole: whole.to_iterable_dataset(), "an IterableDataset, without files of its own"),
        (lambda hf, whole: whole.with_transform(dict), "set_transform, which no loader calls: pass transform="),
        (lambda hf, whole: type("Mine", (hf.Dataset,), {})(whole.data), "in memory, or with other columns than its"),
    ],
    ids=["memory", "dict", "iterable", "transform", "derived"],
)
def test_what_has_no_files_says_what_to_write(datasets: Any, change: Any, says: str) -> None:
    whole = datasets.Dataset.from_dict({"x": [1, 2]})
    with pytest.raises(ConfigError, match=says):
        make_loader(change(datasets, whole), 2)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (pd.DataFrame({"x": [1]}), r"of type DataFrame: write it by to_parquet\(path\), and pass that path"),
        (pl.DataFrame({"x": [1]}), r"of type DataFrame: write it by write_parquet\(path\)"),
        (pl.LazyFrame({"x": [1]}), r"of type LazyFrame: write it by sink_parquet\(path\)"),
        (pa.table({"x": [1]}), r"of type Table: write it by pyarrow.parquet.write_table\(table, path\)"),
        ({"a": "x.parquet"}, r"of type dict: pass one of its values, or mix\(source\)"),
        (7, "of type int: use a URL, a path, or a list of them"),
    ],
    ids=["pandas", "polars", "lazy", "arrow", "dict", "int"],
)
def test_other_objects_say_what_to_write(source: Any, says: str) -> None:
    for make in (make_dataset, lambda source: make_loader(source, 2)):
        with pytest.raises(ConfigError, match=says):
            make(source)


def test_several_datasets_and_loaders_say_what_to_pass(path: Path) -> None:
    dataset = make_dataset(path, cache=False)
    for source, says in (
        (ConcatDataset([dataset, dataset]), r"of type ConcatDataset: pass mix\(source.datasets\)"),
        ([dataset, dataset], r"an item of type Dataset: mix\(\[…\]\) reads several datasets"),
        (make_loader(dataset, 2), "of type Loader: pass its .dataset"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_loader(source, 2)  # type: ignore[arg-type]


def test_a_subset_as_the_source_of_a_dataset_names_select(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of type Subset: pass it to make_loader, or use dataset.select\(subset"):
        make_dataset(Subset(make_dataset(path, cache=False), [1]))  # type: ignore[arg-type]

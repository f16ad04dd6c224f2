"""Folders of repositories: what lies beside the data is skipped, unless it is named."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset
from dataload.errors import DataError, OriginNotFound


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"name": [name]}), path)
        else:
            path.write_bytes(b"no data")


HUB = ["README.md", ".gitattributes", "LICENSE", "LICENSE-MIT", "dataset_infos.json", "croissant.JSON", "loader.py"]
HUB += ["license", "LICENSE_CODE", "CHANGELOG", "SHA256SUMS", "0.parquet.sha256", "Makefile"]
LEROBOT = ["meta/info.json", "meta/stats.json", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"]
LEROBOT += ["videos/top/chunk-000/file-000.mp4", "images/0.png", "README.md"]


@pytest.mark.parametrize("glob", ["", "/**"])
def test_documents_beside_the_data_are_skipped(tmp_path: Path, glob: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, *HUB, *LEROBOT, "data/chunk-000/file-000.parquet", "data/README.md")
    with caplog.at_level(logging.INFO):
        dataset = make_dataset(f"{tmp_path}{glob}", cache=False)
    assert [row["name"] for row in dataset.__getitems__([0])] == ["data/chunk-000/file-000.parquet"]
    assert len(dataset) == 1
    assert re.search("skips [0-9]+ files beside the data, such as .*gitattributes", caplog.text)


def test_a_folder_of_a_dataset_of_robots_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path, *(f"robot/{name}" for name in LEROBOT), "robot/data/file-000.parquet", "other/meta/x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    names = [row["name"] for row in dataset.__getitems__(range(len(dataset)))]
    assert names == ["other/meta/x.parquet", "robot/data/file-000.parquet"]  # The first has no data beside it.


def test_a_file_or_folder_that_is_named_is_not_skipped(tmp_path: Path) -> None:
    write(tmp_path, *LEROBOT, "data/0.parquet")
    assert len(make_dataset(tmp_path / "meta", cache=False)) == 2
    (tmp_path / "data" / "0.parquet").rename(tmp_path / "table.json")
    assert len(make_dataset(tmp_path / "table.json", cache=False)) == 1
    with pytest.raises(DataError, match=r"README\.md is not a Parquet file"):
        make_dataset(tmp_path / "README.md", cache=False)


@pytest.mark.parametrize("names", [["README.md", "train.json"], ["images/0.png"]])
def test_a_folder_without_data_says_what_it_has(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path, *names)
    says = f"has no Parquet or Arrow files, only others such as .*{min(names)}.*or convert images"
    with pytest.raises(OriginNotFound, match=says):
        make_dataset(tmp_path, cache=False)


def test_a_glob_that_names_an_ending_reads_files_of_it(tmp_path: Path) -> None:
    write(tmp_path, "data/a.json.parquet", "data/b.parquet")
    (tmp_path / "data" / "a.json.parquet").rename(tmp_path / "data" / "a.json")
    assert [row["name"] for row in make_dataset(tmp_path / "*" / "*.json", cache=False)] == ["data/a.json.parquet"]
    (tmp_path / "data" / "c.json").write_text("{}")
    with pytest.raises(DataError, match=r"c\.json is not a Parquet file"):
        make_dataset(tmp_path / "data" / "*.json", cache=False)


def test_a_file_of_another_format_is_an_error_beside_the_data(tmp_path: Path) -> None:
    write(tmp_path, "train.parquet", "test.csv")
    with pytest.raises(DataError, match=r"test\.csv is not a Parquet file"):
        make_dataset(tmp_path, cache=False)

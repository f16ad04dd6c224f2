"""Errors of URLs and lists of them that no single filesystem can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset
from dataload.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> str:
    pq.write_table(pa.table({"x": range(3)}), tmp_path / "a.parquet")
    return str(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "others",
    [
        ["/data/a.parquet", "s3://bucket/x.parquet"],
        ["s3://bucket/x.parquet", "/data/a.parquet"],
        ["memory://a", "/data/a.parquet"],
        ["s3://bucket/x", "s3a://bucket/y", "http://server/z"],
        ["tiercache::s3://bucket/x", "s3://bucket/y"],
        ["tiercache::s3://bucket/x", "tiercache::gs://bucket/y"],
    ],
    ids=str,
)
def test_a_list_of_two_filesystems(others: list[str], bucket: Any) -> None:
    with pytest.raises(ConfigError, match=r"are of two filesystems: make_dataset for each, and mix\(\) them"):
        make_dataset(others, cache=False)


def test_a_list_of_one_filesystem_by_several_names(path: str, bucket: Any) -> None:
    assert len(make_dataset([path, f"file://{path}", f"file:{path}"], cache=False)) == 3
    for name in ("x", "y"):
        bucket.put_table(f"{name}.parquet", pa.table({"x": range(3)}))
    urls = [bucket.url("x.parquet"), bucket.url("y.parquet").replace("s3://", "s3a://")]
    assert len(make_dataset(urls, storage_options=bucket.options, cache=False)) == 6


@pytest.mark.parametrize("source", [Path("s3://bucket/train"), "s3:/bucket/train", [Path("gs://bucket/x")]], ids=str)
def test_a_path_of_a_url(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"has a single slash behind (s3|gs): pass the text '(s3|gs)://…', because"):
        make_dataset(source, cache=False)


def test_a_folder_may_be_called_like_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s3:").mkdir()
    pq.write_table(pa.table({"x": range(3)}), tmp_path / "s3:" / "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert len(make_dataset("s3:/a.parquet", cache=False)) == 3

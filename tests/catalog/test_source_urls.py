"""Errors of URLs and lists of them that no single filesystem can read."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from ports import free_port

from dataload import CacheConfig, make_dataset
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.errors import ConfigError, OriginError


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


@pytest.mark.parametrize("source", ["s3://bucket/x", "delta+s3://bucket/x", "iceberg://catalog/space.table"])
def test_options_that_are_no_mapping_are_not_shown(source: str) -> None:
    with pytest.raises(ConfigError, match="storage_options is of type str: pass a dict") as found:
        make_dataset(source, storage_options='{"secret": "S3CRET"}', cache=False)  # type: ignore[arg-type]
    assert "S3CRET" not in str(found.value)


def test_a_folder_may_be_called_like_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s3:").mkdir()
    pq.write_table(pa.table({"x": range(3)}), tmp_path / "s3:" / "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert len(make_dataset("s3:/a.parquet", cache=False)) == 3


@pytest.mark.parametrize("url", ["s3://", "s3a:///", "gs://", "tiercache::s3://"])
def test_a_url_without_a_bucket(url: str) -> None:
    with pytest.raises(ConfigError, match=f"^{url} names no bucket: name one"):
        make_dataset(url, cache=False)


def test_a_file_in_an_archive(path: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.write(path, "in/a.parquet")
    with pytest.raises(ConfigError, match=r"names a file in an archive by '::', which .*: unpack the archive"):
        make_dataset(f"zip://in/a.parquet::file://{tmp_path}/z.zip", cache=False)


@pytest.mark.parametrize("form", ["{}", "tiercache::{}", "tiercache"])
def test_a_server_that_is_down(tmp_path: Path, form: str) -> None:
    """FTP connects when its filesystem is created."""
    url = f"ftp://user:s3cret@127.0.0.1:{free_port()}/x.parquet"
    with pytest.raises(OriginError, match=r"ftp://127\.0\.0\.1.*: the server failed: ConnectionRefused") as raised:
        if form == "tiercache":
            TierCacheFileSystem("ftp", {"host": "127.0.0.1", "port": free_port()}, cache_dir=str(tmp_path))
        else:
            make_dataset(form.format(url))
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "source", ["set/a.parquet", "set", "set/*.parquet", ["set/a.parquet", "set/b.parquet"]], ids=str
)
def test_a_url_of_tiercache_with_its_origin_in_the_options(tmp_path: Path, source: Any) -> None:
    memory = MemoryFileSystem()
    for name in ("a", "b"):
        with memory.open(f"/set/{name}.parquet", "wb") as file:
            pq.write_table(pa.table({"x": range(3)}), file)
    options = {"target_protocol": "memory", "cache_dir": str(tmp_path / "cache")}
    urls = [f"tiercache://{path}" for path in ([source] if isinstance(source, str) else source)]
    try:
        dataset = make_dataset(urls[0] if isinstance(source, str) else urls, storage_options=options)
        assert len(dataset) == (3 if source == "set/a.parquet" else 6)
        assert dataset[2]["x"] == 2
    finally:
        memory.rm("/set", recursive=True)


@pytest.mark.parametrize("given", [
    {"cache_dir": "/nvme/cache"},
    {"cache_bytes": "1GB"},
    {"cluster": "valkey://host"},
    {"cache": CacheConfig("/nvme/cache")},
    {"cache": False},
], ids=str)  # fmt: skip
def test_settings_of_a_cache_for_a_url_that_has_one(path: str, tmp_path: Path, given: dict[str, Any]) -> None:
    options = {"tiercache": {"cache_dir": str(tmp_path / "cache")}}
    assert len(make_dataset(f"tiercache::file://{path}", storage_options=options)) == 3
    advice = r"give its settings in storage_options=\{'tiercache': \{\.\.\.\}\}, or leave out tiercache::"
    with pytest.raises(ConfigError, match=f"tiercache:: has a cache of its own: {advice}"):
        make_dataset(f"tiercache::file://{path}", storage_options=options, **given)


def test_a_local_name_with_two_colons(path: str, tmp_path: Path) -> None:
    other = tmp_path / "run::1" / "b::c.parquet"
    other.parent.mkdir()
    pq.write_table(pa.table({"x": range(3)}), other)
    assert len(make_dataset(other, cache=False)) == 3
    assert len(make_dataset([other, path], cache=False)) == len(make_dataset([path, other.parent], cache=False)) == 6

"""Credentials in the URL of a dataset come into no error, no repr and no file."""

from __future__ import annotations

import http.server
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from http_servers import serving

from dataload import DataError, make_dataset
from dataload.cache.filesystem import TierCacheFileSystem

SECRET = "s3cret"


class _Files(http.server.SimpleHTTPRequestHandler):
    """Serves files of a folder, whatever the query."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.partition("?")[0])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url_of(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Return the URL of a file in the temporary folder, with credentials as user, password and signature."""
    with serving(partial(_Files, directory=str(tmp_path))) as url:
        host = url.removeprefix("http://")
        yield lambda name: f"http://{SECRET}:{SECRET}@{host}/{name}?signature={SECRET}"


def _fail(_: Any) -> Any:
    raise ValueError("no")


def _same(batch: Any) -> Any:
    return batch


def _shown(error: BaseException) -> str:
    return "\n".join([str(error), repr(error), *getattr(error, "__notes__", ())])


def test_errors_of_a_file_have_no_credentials(tmp_path: Path, url_of: Callable[[str], str]) -> None:
    pq.write_table(pa.table({"number": [1, None, 3]}), tmp_path / "nulls.parquet")
    (tmp_path / "text.parquet").write_text("no Parquet file")
    (tmp_path / "short.parquet").write_bytes((tmp_path / "nulls.parquet").read_bytes()[-200:])
    with pa.OSFile(str(tmp_path / "short.arrow"), "wb") as file, pa.ipc.new_stream(file, pa.schema({"a": pa.int8()})):
        pass
    (tmp_path / "short.arrow").write_bytes((tmp_path / "short.arrow").read_bytes()[:-60])
    nulls = make_dataset(url_of("nulls.parquet"), cache=False)
    for read in (
        lambda: nulls[0],
        lambda: make_dataset(url_of("nulls.parquet"), cache=False, null_masks=True).map(_fail, version=1),
        *(partial(make_dataset, url_of(f"{name}.parquet"), cache=False) for name in ("text", "short")),
        partial(make_dataset, url_of("short.arrow"), cache=False),
    ):
        with pytest.raises(DataError, match=r"http://127\.0\.0\.1:\d+/[a-z]+\.(parquet|arrow)") as caught:
            read()
        assert SECRET not in _shown(caught.value)


def test_reprs_have_no_credentials(tmp_path: Path, url_of: Callable[[str], str]) -> None:
    pq.write_table(pa.table({"number": [1, 2, 3]}), tmp_path / "rows.parquet")
    dataset = make_dataset(url_of("rows.parquet"), cache=False)
    group = dataset.row_groups[0]
    filesystem = fsspec.filesystem("tiercache", target_protocol="http", cache_dir=str(tmp_path / "cache"))
    with filesystem.open(url_of("rows.parquet")) as file:
        for value in (dataset, dataset.calls, group, group.file, dataset.blocks.key(group.file, "part"), file):
            assert SECRET not in repr(value)
            assert "rows.parquet" in repr(value)


def test_a_cache_has_no_credentials_on_disk(tmp_path: Path, url_of: Callable[[str], str]) -> None:
    cache, url = tmp_path / "cache", url_of("rows.parquet")
    pq.write_table(pa.table({"number": range(6)}), tmp_path / "rows.parquet", row_group_size=2)
    dataset = make_dataset(url, cache_dir=str(cache), cache_bytes="1GB")
    assert [int(row["number"]) for row in dataset.filter([("number", ">", 3)])] == [4, 5]
    assert int(dataset.map(_same, version=1)[1]["number"]) == 1
    assert make_dataset(url, cache_dir=str(cache), cache_bytes="1GB").manifest == dataset.manifest
    options = {"target_protocol": "http", "cache_dir": str(cache), "consistency": "immutable", "cache_bytes": "1GB"}
    infos = [fsspec.filesystem("tiercache", **options, skip_instance_cache=True).info(url) for _ in range(2)]
    assert {info["name"] for info in infos} == {url}
    assert {info["size"] for info in infos} == {(tmp_path / "rows.parquet").stat().st_size}
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("given", [
    {"target_protocol": "s3", "target_options": {"key": "a-secret", "secret": "a-secret", "token": "a-secret"}},
    {"target_protocol": "s3", "target_options": {"client_kwargs": {"aws_secret_access_key": "a-secret"}}},
    {"target_protocol": "http", "target_options": {"headers": {"Authorization": "a-secret"}}},
    {"target_protocol": "s3", "target_options": {"anon": True}, "cluster": "valkey://user:a-secret@host:6379"},
    {"target_protocol": "s3", "cluster": "valkey://host:6379", "cluster_key": "a-secret-of-32-characters-at-least"},
    {"fs": MemoryFileSystem(password="a-secret")},
])  # fmt: skip
def test_the_json_of_a_filesystem_has_no_credentials(tmp_path: Path, given: dict[str, Any]) -> None:
    fs = TierCacheFileSystem(cache_dir=str(tmp_path), skip_instance_cache=True, **given)
    found = fs.to_json(include_password=False)
    assert "a-secret" not in found
    assert str(tmp_path) in found
    assert "a-secret" in fs.to_json()

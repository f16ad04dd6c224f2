"""Versions of objects: what changes them, and what does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import dataload
from dataload.cache.origin.version import version_of


def version(path: Path) -> str:
    return version_of(LocalFileSystem().info(str(path)))


def rewrite(path: Path) -> None:
    path.write_bytes(b"other")
    os.utime(path, ns=(0, 10**18 + 10**6))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    os.utime(other, ns=(0, 10**18))
    other.replace(path)


@pytest.mark.parametrize(("change", "is_other"), [
    (lambda path: path.chmod(0o600), False),
    (lambda path: os.link(path, path.with_name("backup")), False),
    (rewrite, True),
    (replace, True),
])  # fmt: skip
def test_a_local_file_has_another_version_if_its_bytes_may_differ(
    tmp_path: Path, change: Callable[[Path], None], is_other: bool
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"bytes")
    os.utime(path, ns=(0, 10**18))
    before = version(path)
    change(path)
    assert (version(path) != before) == is_other


def test_a_backup_and_a_change_of_rights_do_not_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "data" / "x.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"x": range(10)}), path)
    dataset = dataload.make_dataset(str(path.parent), cache=False)
    path.chmod(0o600)
    os.link(path, tmp_path / "backup")
    assert [dataset[number]["x"] for number in range(10)] == list(range(10))
    assert dataload.make_dataset(str(path.parent), cache=False).fingerprint == dataset.fingerprint


def test_new_metadata_of_an_object_of_google_are_no_new_version() -> None:
    """Its etag changes when a read moves it to another storage class."""
    info = {"name": "bucket/x", "size": 3, "etag": "CKih16GjycICEAE=", "generation": "1446000000000000"}
    assert version_of(info) == version_of({**info, "etag": "CKih16GjycICEAI=", "storageClass": "STANDARD"})
    assert version_of(info) != version_of({**info, "generation": "1446000000000001"})


WEBHDFS = {"pathSuffix": "x", "size": 3, "fileId": 7, "accessTime": 1, "modificationTime": 5, "type": "file"}
SFTP = {"size": 3, "uid": 0, "time": datetime(2024, 1, 1, tzinfo=UTC), "mtime": datetime(2023, 1, 1, tzinfo=UTC)}
SMB = {"size": 3, "uid": 0, "time": 1.5, "mtime": 5.5}


@pytest.mark.parametrize(("info", "read", "written"), [
    (WEBHDFS, {"pathSuffix": "", "accessTime": 2}, {"modificationTime": 6}),
    (SFTP, {"time": datetime(2024, 1, 2, tzinfo=UTC)}, {"mtime": datetime(2024, 1, 1, tzinfo=UTC)}),
    (SMB, {"time": 2.5}, {"mtime": 6.5}),
    ({"size": 3, "time": 5}, {}, {"time": 6}),  # the only time that there is
], ids=["webhdfs", "sftp", "smb", "another"])  # fmt: skip
def test_a_read_makes_no_new_version(info: dict[str, Any], read: dict[str, Any], written: dict[str, Any]) -> None:
    assert version_of({**info, **read}) == version_of(info)
    assert version_of({**info, **written}) != version_of(info)
    assert version_of({**info, "size": 4}) != version_of(info)


def test_a_listing_and_a_read_of_memory_have_one_version(cache: dataload.CacheConfig) -> None:
    """The listing of fsspec's memory filesystem has the time of a file in another form."""
    memory = MemoryFileSystem()
    with memory.open("/versions/x.parquet", "wb") as file:
        pq.write_table(pa.table({"x": range(10)}), file)
    try:
        for kept in (False, cache):
            loader = dataload.make_loader("memory://versions", 5, shuffle=False, cache=kept)
            assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    finally:
        memory.rm("/versions", recursive=True)

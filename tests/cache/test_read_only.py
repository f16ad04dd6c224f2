"""A warmed cache that this process cannot write serves its hits, and nothing in it changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiers import data_of, fill_of, key, put
from typer.testing import CliRunner

import dataload
from dataload.cache.local.read_only import ReadOnlyTier
from dataload.cache.local.tier import LocalTier
from dataload.cli.app import app
from dataload.errors import ConfigError

Mount = Callable[[Path], Path]
ROWS = list(range(120))
NOBODY = 65534


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mount]:
    """Mount folders read-only, as images and ROX volumes are. Return where each is mounted."""
    points: list[Path] = []

    def mount(folder: Path) -> Path:
        point = tmp_path / f"read-only-{len(points)}"
        point.mkdir()
        for options in (["--bind"], ["-o", "remount,ro,bind"]):
            made = subprocess.run(["mount", *options, folder, point], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no read-only filesystem can be mounted here: {made.stderr.strip()}")
            points.append(point)
        return point

    yield mount
    for point in dict.fromkeys(points):
        subprocess.run(["umount", "--lazy", point], check=True)


@pytest.fixture
def another_user() -> Callable[[], AbstractContextManager[None]]:
    """Run the block as a user who is not root, and who may not see the files of modules: import them before."""
    if os.geteuid():
        pytest.skip("only root can run as another user")

    @contextmanager
    def become() -> Iterator[None]:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return become


@pytest.fixture
def url(dataset_of: Callable[..., str]) -> str:
    return dataset_of([[40, 40], [40]])


@pytest.fixture
def warmed(bucket: Any, url: str, tmp_path: Path) -> Path:
    """A copy of a cache that holds all rows, as in an image."""
    assert ids_of(loader_of(url, bucket, tmp_path / "cache")) == ROWS
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    bucket.server.reset()
    return tmp_path / "copy"


def loader_of(url: str, bucket: Any, folder: Path, **options: Any) -> Any:
    return dataload.make_loader(url, 16, storage_options=bucket.options, cache_dir=str(folder), **options)


def ids_of(loader: Any) -> list[int]:
    return sorted(row for batch in loader for row in batch["row_id"].tolist())


def everything_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last change of each file and folder."""
    found = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_ctime_ns) for path in found}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_warmed_cache_on_a_read_only_mount_serves_every_row(
    bucket: Any, url: str, warmed: Path, mounted: Mount, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    folder = mounted(warmed)
    before = everything_in(folder)
    loader = loader_of(url, bucket, folder, num_workers=num_workers)
    for _ in range(2):
        assert ids_of(loader) == ROWS
    assert bucket.server.stats()["get_requests"] == 0
    assert everything_in(folder) == before
    assert caplog.text == ""
    assert f"; read-only cache {folder}" in repr(loader.dataset)


def test_what_a_read_only_cache_lacks_comes_from_the_origin_with_one_warning(
    bucket: Any, url: str, warmed: Path, mounted: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    for blob in (warmed / "blobs").glob("*/*"):
        if b"part-000.parquet#" in blob.read_bytes():
            blob.unlink()
    folder = mounted(warmed)
    before = everything_in(folder)
    loader = loader_of(url, bucket, folder)
    for _ in range(2):
        assert ids_of(loader) == ROWS
    assert bucket.server.stats()["get_requests"] > 0
    assert everything_in(folder) == before
    [warning] = caplog.messages
    assert warning.startswith(f"cache {folder} is read-only and lacks {bucket.name}/data/part-00")
    assert warning.endswith(": what it lacks is read from the origin each time")


def test_a_blob_that_a_read_only_cache_lacks_is_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(LocalTier(tmp_path / "c"), "there")
    opened, real = list[str](), os.open

    def counting(path: Any, *given: Any, **options: Any) -> int:
        opened.append(str(path))
        return real(path, *given, **options)

    tier = ReadOnlyTier(tmp_path / "c", 1 << 20)
    monkeypatch.setattr(os, "open", counting)
    for _ in range(2):
        assert tier.get_or_fill(key("lacking"), fill_of("lacking")) == data_of("lacking")
    assert len([path for path in opened if key("lacking").digest.hex() in path]) == 1
    assert tier.get(key("there")) == data_of("there")
    assert tier.stats()["hits"] == 2


def test_a_damaged_blob_of_a_read_only_cache_is_fetched_instead(
    bucket: Any, url: str, warmed: Path, mounted: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    for file in (warmed / "blobs").glob("*/*"):
        file.write_bytes(bytes(file.stat().st_size))
    assert ids_of(loader_of(url, bucket, mounted(warmed))) == ROWS
    assert any("no valid footer" in message for message in caplog.messages)


def test_damaged_blobs_switch_no_read_only_cache_off(tmp_path: Path) -> None:
    writable = LocalTier(tmp_path / "cache")
    damaged = [f"x/{number}" for number in range(9)]
    for name in ("there", *damaged):
        put(writable, name)
    for name in damaged:
        os.truncate(writable.folder.path_of(key(name).digest), 1)
    tier = ReadOnlyTier(writable.path, 1 << 20)
    assert [tier.get(key(name)) for name in damaged] == [None] * len(damaged)
    assert tier.get(key("there")) == data_of("there")


def test_a_read_only_cache_goes_with_a_cluster(bucket: Any, url: str, warmed: Path, mounted: Mount) -> None:
    shutil.rmtree(min((warmed / "blobs").iterdir()))
    loader = loader_of(url, bucket, mounted(warmed), cluster="valkey://127.0.0.1:1")
    assert ids_of(loader) == ROWS


def test_a_cache_of_root_is_read_only_for_others(another_user: Any) -> None:
    """Such as in an image that root built, for a user who may not write to it."""
    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder, "rows.parquet"), Path(folder, "cache")
        pq.write_table(pa.table({"row_id": ROWS}), file)
        assert ids_of(dataload.make_loader(file, 16, cache_dir=str(cache))) == ROWS
        for path in [file.parent, *file.parent.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        with another_user():
            loader = dataload.make_loader(file, 16, cache_dir=str(cache))
            assert loader.dataset.blocks.tier.read_only
            assert ids_of(loader) == ROWS


def test_a_read_only_folder_that_is_no_cache_is_an_error(bucket: Any, url: str, tmp_path: Path, mounted: Mount) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be used \(Read-only file system\).*cache=False"):
        loader_of(url, bucket, mounted(tmp_path / "empty"))


def test_a_read_only_cache_of_another_format_is_an_error(bucket: Any, url: str, warmed: Path, mounted: Mount) -> None:
    (warmed / "FORMAT").write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="has format 1"):
        loader_of(url, bucket, mounted(warmed))


@pytest.mark.parametrize("command", [["warm", "x.parquet"], ["cache", "verify"], ["cache", "evict", "--all"]])
def test_commands_that_change_a_cache_say_that_it_is_read_only(
    warmed: Path, mounted: Mount, command: list[str]
) -> None:
    answer = CliRunner().invoke(app, [*command, "--cache-dir", str(mounted(warmed))])
    assert isinstance(answer.exception, ConfigError)
    assert "is read-only" in str(answer.exception)


def test_doctor_finds_a_read_only_cache_right(warmed: Path, mounted: Mount) -> None:
    answer = CliRunner().invoke(app, ["doctor", "--cache-dir", str(mounted(warmed))])
    assert "is a read-only cache: it serves what it holds" in " ".join(answer.output.split())
    assert "cache capacity" not in answer.output

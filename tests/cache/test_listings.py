"""No listing lacks a folder whose own listing fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import fail_at_once
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem

from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin.origin import Origin
from dataload.errors import OriginError

FOLDERS = {"root": ["a", "b"], "root/a": ["1"], "root/b": ["deep"], "root/b/deep": ["2"]}
FILES = ["root/a/1", "root/b/deep/2"]


class Shaky(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Two files in two folders. The listings of a folder fail as often as there are errors for it."""

    protocol = "shaky"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, list[OSError]] = {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = path.rstrip("/")
        if path in FOLDERS:
            return {"name": path, "size": 0, "type": "directory"}
        if path in FILES:
            return {"name": path, "size": 1, "type": "file"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = path.rstrip("/")
        if self.errors.get(path):
            raise self.errors[path].pop()
        if path in FILES:
            raise OSError(f"{path} is not a folder")  # as HDFS has it
        infos = [self.info(f"{path}/{name}") for name in FOLDERS[path]]
        return infos if detail else [info["name"] for info in infos]


class AsyncShaky(AsyncFileSystem):  # type: ignore[misc]
    """The same with asynchronous calls."""

    protocol = "shaky"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._shaky = Shaky()
        self.errors = self._shaky.errors

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._shaky.info(path, **kwargs)

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return self._shaky.ls(path, detail, **kwargs)


class OwnGlob(Shaky):
    """A filesystem with patterns of its own."""

    def glob(self, path: str, **kwargs: Any) -> Any:
        return super().glob(path.replace("any", "*"), **kwargs)


class AsyncOwnGlob(AsyncShaky):
    """The same with asynchronous calls."""

    async def _glob(self, path: str, **kwargs: Any) -> Any:
        return await super()._glob(path.replace("any", "*"), **kwargs)


LISTINGS: list[Callable[[TierCacheFileSystem], Any]] = [
    lambda fs: fs.find("root"),
    lambda fs: fs.glob("root/**/[12]"),
    lambda fs: [f"{folder}/{file}" for folder, _, files in fs.walk("root") for file in files],
    lambda fs: [*fs.blocks.origin.list("root")],
    lambda fs: [*fs.blocks.origin.list("root/*/*/*"), *fs.blocks.origin.list("root/a/*")][::-1],
]


@pytest.fixture(params=[Shaky, AsyncShaky])
def shaky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("dataload.cache.origin.retries.FIRST_PAUSE", 0.001)
    return request.param()


@pytest.fixture
def fs(shaky: Any, tmp_path: Path) -> TierCacheFileSystem:
    return TierCacheFileSystem(fs=shaky, cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)


@pytest.mark.parametrize("names", LISTINGS)
@pytest.mark.parametrize("folder", ["root", "root/b", "root/b/deep"])
def test_a_folder_that_fails_once_is_listed_again(
    fs: TierCacheFileSystem, shaky: Any, names: Callable[[TierCacheFileSystem], Any], folder: str
) -> None:
    shaky.errors[folder] = [ConnectionResetError("reset by the store")]
    assert names(fs) == FILES


@pytest.mark.parametrize("names", LISTINGS)
def test_a_folder_that_fails_is_no_empty_one(
    fs: TierCacheFileSystem, shaky: Any, names: Callable[[TierCacheFileSystem], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_once(monkeypatch)
    shaky.errors["root/b"] = [ConnectionResetError("reset by the store")] * 100
    with pytest.raises(OriginError, match="reset by the store"):
        names(fs)


def test_a_folder_in_a_filesystem_of_a_folder(shaky: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_once(monkeypatch)
    origin = Origin(DirFileSystem("root", shaky))
    assert [*origin.list("b")] == ["b/deep/2"]
    shaky.errors["root/b/deep"] = [ConnectionResetError("reset by the store")] * 100
    with pytest.raises(OriginError, match="reset by the store"):
        origin.list("b")


def test_a_folder_of_someone_else_is_left_out(fs: TierCacheFileSystem, shaky: Any) -> None:
    shaky.errors["root/b"] = [PermissionError("not yours")] * 100
    for names in LISTINGS[:4]:
        assert names(fs) == FILES[:1]


def test_the_caller_of_walk_decides_about_errors_of_all_folders(
    fs: TierCacheFileSystem, shaky: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_once(monkeypatch)
    shaky.errors["root/b/deep"] = [ConnectionResetError("reset by the store")] * 100
    assert [folder for folder, _, _ in fs.walk("root", on_error="omit")] == ["root", "root/a", "root/b"]
    found: list[OSError] = []
    assert len([*fs.walk("root", on_error=found.append)]) == 3
    assert len(found) == 1


@pytest.mark.parametrize("kind", [OwnGlob, AsyncOwnGlob])
def test_the_patterns_of_a_filesystem_hold(kind: type, tmp_path: Path) -> None:
    fs = TierCacheFileSystem(fs=kind(), cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    assert fs.glob("root/any/any/2") == FILES[1:]


def test_a_file_that_cannot_be_listed_is_found(tmp_path: Path) -> None:
    fs = TierCacheFileSystem(fs=Shaky(), cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    assert fs.find(FILES[0]) == FILES[:1]
    assert [*fs.blocks.origin.list(FILES[0])] == FILES[:1]

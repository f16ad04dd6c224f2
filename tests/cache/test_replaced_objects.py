"""Objects that are replaced while they are read, in stores that do not know If-Match: no versions mix."""

from __future__ import annotations

import http.server
import inspect
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import s3fs
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from http_servers import serving

from dataload.benchmarks.origin import s3
from dataload.benchmarks.origin.s3 import resolve_range
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin.origin import Origin
from dataload.errors import ObjectChanged

BLOCK = 4096
OLD, NEW = np.random.default_rng(5).bytes(3 * BLOCK), np.random.default_rng(6).bytes(4 * BLOCK)


class _Store(http.server.BaseHTTPRequestHandler):
    """A store with one object. It ignores If-Match, or rejects it."""

    protocol_version = "HTTP/1.1"
    data = OLD
    tag = '"old"'
    rejects = False
    requests: list[str]
    payers: list[str | None]  # of the bytes

    def do_GET(self) -> None:
        self.requests.append(self.command)
        if self.command == "GET":
            self.payers.append(self.headers.get("x-amz-request-payer"))
        if self.rejects and "If-Match" in self.headers:
            self._answer(501, b"")
            return
        try:
            span = resolve_range(self.headers.get("Range", ""), len(self.data))
        except ValueError:
            self._answer(416, b"")
            return
        if span is None:
            self._answer(200, self.data)
        else:
            self._answer(206, self.data[span.start : span.stop], f"{span.start}-{span.stop - 1}/{len(self.data)}")

    do_HEAD = do_GET  # noqa: N815 (http.server finds the method by this name)

    def _answer(self, status: int, body: bytes, sent: str | None = None) -> None:
        self.send_response(status)
        for name, value in {"ETag": self.tag, "Content-Length": str(len(body)), "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        if sent is not None:
            self.send_header("Content-Range", f"bytes {sent}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def store() -> Iterator[tuple[str, type[_Store]]]:
    kind = type("Store", (_Store,), {"requests": [], "payers": []})
    with serving(kind) as url:
        yield url, kind


def open_fs(cache_dir: Path, kind: str, url: str, **options: Any) -> tuple[TierCacheFileSystem, str]:
    """Return a filesystem of the store, read by "obstore", "fsspec" or "http", and the path of its object."""
    given = {"cache_dir": str(cache_dir), "block_bytes": BLOCK, "skip_instance_cache": True}
    if kind == "http":
        return TierCacheFileSystem(fs=fsspec.filesystem("http", skip_instance_cache=True), **given), f"{url}/x"
    origin = s3fs.S3FileSystem(**s3.storage_options(url), **options, skip_instance_cache=True)
    return TierCacheFileSystem(fs=origin, engine=kind, **given), "bucket/x"


def close(fs: TierCacheFileSystem) -> None:
    target = fs.fs
    if hasattr(target, "call_s3"):
        target.close_session(target.loop, target.s3)
    else:
        target.close_session(target.loop, target._session)


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["obstore", "fsspec", "http"])
@pytest.mark.parametrize("new", [NEW, NEW[: 2 * BLOCK - 1]], ids=["longer", "shorter"])
def test_versions_do_not_mix(store: tuple[str, type[_Store]], tmp_path: Path, kind: str, new: bytes) -> None:
    url, its = store
    fs, path = open_fs(tmp_path, kind, url)
    assert fs.cat_file(path, end=BLOCK) == OLD[:BLOCK]
    its.data, its.tag = new, '"new"'
    for start in (BLOCK, 2 * BLOCK):
        with pytest.raises(ObjectChanged, match=r"x.* was replaced after it was listed"):
            fs.blocks.read(fs.object(path), start, start + BLOCK)
    fs.invalidate_cache()
    assert fs.cat_file(path) == new
    close(fs)


def test_an_object_over_http_takes_a_request_for_each_block(store: tuple[str, type[_Store]], tmp_path: Path) -> None:
    fs, path = open_fs(tmp_path, "http", store[0])
    assert fs.cat_file(path) == OLD
    assert store[1].requests == ["HEAD", "GET", "GET", "GET"]
    close(fs)


@pytest.mark.skipif(
    "local_expiry_check" not in inspect.signature(s3fs.S3FileSystem.__init__).parameters,
    reason="this s3fs sends If-Match to all stores",
)
def test_a_store_that_rejects_if_match(store: tuple[str, type[_Store]], tmp_path: Path) -> None:
    url, its = store
    its.rejects = True
    fs, path = open_fs(tmp_path, "fsspec", url, local_expiry_check=True)
    assert fs.cat_file(path, end=BLOCK) == OLD[:BLOCK]
    its.data, its.tag = NEW, '"new"'
    with pytest.raises(ObjectChanged):
        fs.blocks.read(fs.object(path), BLOCK, 2 * BLOCK)
    close(fs)


def test_an_older_s3fs_tells_that_the_requester_pays(
    store: tuple[str, type[_Store]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `call_s3` sends only what it is given."""
    monkeypatch.setattr(
        s3fs.S3FileSystem,
        "_get_s3_method_kwargs",
        lambda filesystem, method, *more, **given: filesystem._filter_kwargs(method, dict(ChainMap(given, *more))),
    )
    url, its = store
    fs, path = open_fs(tmp_path, "fsspec", url, requester_pays=True)
    assert fs.cat_file(path) == OLD
    assert set(its.payers) == {"requester"}
    close(fs)


@pytest.mark.variants
@pytest.mark.parametrize("ask", [
    lambda fs, folder: fs.find(folder),
    lambda fs, folder: fs.find(folder, maxdepth=1),
    lambda fs, folder: fs.glob(f"{folder}/*"),
    lambda fs, folder: fs.glob(f"{folder}/**/x"),
])  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in dirfs"])
def test_an_older_listing_brings_back_no_older_version(
    bucket: Any, tmp_path: Path, ask: Callable[[Any, str], Any], wrapped: bool
) -> None:
    """S3fs keeps the listing of a folder that `ls` returned."""
    bucket.put("d/x", OLD)
    origin: Any = s3fs.S3FileSystem(**bucket.options, skip_instance_cache=True)
    origin, folder = (DirFileSystem(bucket.name, origin), "d") if wrapped else (origin, f"{bucket.name}/d")
    fs = TierCacheFileSystem(fs=origin, cache_dir=str(tmp_path / "cache"), block_bytes=BLOCK, skip_instance_cache=True)
    assert fs.cat_file(f"{folder}/x") == OLD
    fs.ls(folder)
    bucket.put("d/x", NEW)
    assert f"{folder}/x" in ask(fs, folder)
    assert fs.cat_file(f"{folder}/x") == NEW
    assert [info["size"] for info in fs.ls(folder)] == [len(NEW)]
    assert fs.cat_file(f"{folder}/x") == NEW


class KeepsListings(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A local folder. As with FTP and Azure, infos come from the kept listing of the folder."""

    protocol = "keeps-listings"
    cachable = False

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if path not in self.dircache:
            self.dircache[path] = [
                {
                    "name": str(file),
                    "size": file.stat().st_size,
                    "mtime": file.stat().st_mtime_ns,
                    "type": "directory" if file.is_dir() else "file",
                }
                for file in Path(path).iterdir()
            ]
        return self.dircache[path] if detail else [info["name"] for info in self.dircache[path]]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if Path(path).is_dir():
            return {"name": path, "size": 0, "type": "directory"}
        return next(info for info in self.ls(self._parent(path)) if info["name"] == path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return Path(path).read_bytes()[start:end]

    def invalidate_cache(self, path: str | None = None) -> None:
        if path and not path.startswith(self.root):
            raise ValueError(f"{path} is above the root")  # as that of Hugging Face
        self.dircache.pop(path, None) if path else self.dircache.clear()


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in dirfs"])
def test_listings_that_keep_infos_are_forgotten(tmp_path: Path, wrapped: bool) -> None:
    (folder := tmp_path / "data").mkdir()
    (folder / "x").write_bytes(OLD)
    origin: Any = KeepsListings(str(folder))
    origin, place = (DirFileSystem(str(tmp_path), origin), "data") if wrapped else (origin, str(folder))
    fs = TierCacheFileSystem(fs=origin, cache_dir=str(tmp_path / "cache"), block_bytes=BLOCK, skip_instance_cache=True)
    fs.ls(place)
    assert fs.cat_file(f"{place}/x", end=BLOCK) == OLD[:BLOCK]
    fs.ls(place)
    (folder / "x").write_bytes(NEW)
    with pytest.raises(ObjectChanged):
        fs.cat_file(f"{place}/x")
    fs.ls(place)
    assert fs.cat_file(f"{place}/x") == NEW
    (folder / "x").write_bytes(OLD)
    assert fs.info(f"{place}/x", refresh=True)["size"] == len(OLD)
    assert fs.blocks.origin.info(place)["type"] == "directory"


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in dirfs"])
def test_a_listing_finds_new_objects_in_folders_that_were_listed(tmp_path: Path, wrapped: bool) -> None:
    (folder := tmp_path / "data" / "inner" / "deep").mkdir(parents=True)
    (folder / "x").write_bytes(OLD)
    origin: Any = KeepsListings(str(tmp_path / "data"))
    filesystem, place = (DirFileSystem(str(tmp_path), origin), "data") if wrapped else (origin, str(tmp_path / "data"))
    origin.dircache["elsewhere"] = []
    store = Origin(filesystem)
    assert [info["size"] for info in store.list(place).values()] == [len(OLD)]
    (folder / "x").write_bytes(NEW)
    (folder / "y").write_bytes(OLD)
    assert sorted(info["size"] for info in store.list(place).values()) == [len(OLD), len(NEW)]
    assert [*origin.dircache] == ["elsewhere"], "a listing of a dataset would stay for the life of the process"


def test_references_are_listed_again() -> None:
    """Their filesystem makes the listings of all folders at once, and finds no folder without its listing."""
    references = {"data/a/x": "1", "data/b/deep/y": "2", "z": "3"}
    filesystem = fsspec.filesystem("reference", fo=references, skip_instance_cache=True)
    filesystem.ls("data")
    for _ in range(2):
        assert [*Origin(filesystem).list("data")] == ["data/a/x", "data/b/deep/y"]
        assert [*Origin(filesystem).list("data/*/x")] == ["data/a/x"]

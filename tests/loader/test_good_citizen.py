"""`tiercache` beside other fsspec filesystems: each way to read returns the same as the origin's own filesystem."""

from __future__ import annotations

import functools
import gc
import gzip
import http.server
import io
import json
import multiprocessing
import os
import pickle
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

import fsspec
import pytest
from attempts import fail_at_once
from fsspec.callbacks import Callback

from dataload.cache.filesystem import TierCacheFileSystem
from dataload.errors import ConfigError, ObjectChanged, OriginError

BLOCK = 1000
ROOT = "/citizen"
BODIES = {
    "one.bin": random.Random(1).randbytes(10_500),
    "two.bin": random.Random(2).randbytes(999),
    "deep/three.bin": random.Random(3).randbytes(4000),
    "deep/deeper/lines.txt": b"".join(b"line %d\n" % number for number in range(1000)),
    "empty.bin": b"",
}
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def memory() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    for name, body in BODIES.items():
        memory.pipe_file(f"{ROOT}/{name}", body)
    yield memory
    memory.rm(ROOT, recursive=True)


@pytest.fixture
def fs(memory: Any, tmp_path: Path) -> TierCacheFileSystem:
    return TierCacheFileSystem(
        fs=memory, cache_dir=str(tmp_path / "cache"), block_bytes=BLOCK, skip_instance_cache=True
    )


@pytest.fixture
def s3(bucket: Any, tmp_path: Path) -> TierCacheFileSystem:
    for name, body in BODIES.items():
        bucket.put(name, body)
    bucket.server.reset()
    return TierCacheFileSystem(
        "s3", bucket.options, cache_dir=str(tmp_path / "cache"), block_bytes=BLOCK, skip_instance_cache=True
    )


# Ranges


def test_many_ranges_equal_single_reads_of_the_origin(fs: TierCacheFileSystem, memory: Any) -> None:
    draw = random.Random(0)
    names = [f"{ROOT}/{name}" for name in BODIES]
    bounds = [None, 0, 1, 999, 1000, 1001, 2500, 10_500, 20_000, -1, -1000, -1001, -20_000]
    paths = [draw.choice(names) for _ in range(400)]
    starts, ends = ([draw.choice(bounds) for _ in paths] for _ in range(2))
    expected = [
        BODIES[path.removeprefix(f"{ROOT}/")][start:end] for path, start, end in zip(paths, starts, ends, strict=True)
    ]
    for _ in range(2):
        assert fs.cat_ranges(paths, starts, ends) == expected
    assert fs.cat_ranges([names[0], names[1]], 5, 7) == [BODIES["one.bin"][5:7], BODIES["two.bin"][5:7]]
    assert fs.cat_ranges([names[0]], None, -3) == [BODIES["one.bin"][:-3]]
    assert fs.cat_ranges([], [], []) == []


def test_ranges_share_blocks(fs: TierCacheFileSystem) -> None:
    path = f"{ROOT}/one.bin"
    starts = [5000, *range(0, 3000, 10)]
    ends = [5001, *(start + 1500 for start in range(0, 3000, 10))]
    body = BODIES["one.bin"]
    assert fs.cat_ranges([path] * len(starts), starts, ends) == [
        body[low:high] for low, high in zip(starts, ends, strict=True)
    ]
    stats = fs.stats()
    assert (stats["misses"], stats["hits"]) == (6, 0)


def test_failing_ranges_do_not_affect_the_others(fs: TierCacheFileSystem) -> None:
    paths = [f"{ROOT}/one.bin", f"{ROOT}/none.bin", ROOT, f"{ROOT}/two.bin"]
    found = fs.cat_ranges(paths, 0, 10)
    assert (found[0], found[3]) == (BODIES["one.bin"][:10], BODIES["two.bin"][:10])
    assert isinstance(found[1], FileNotFoundError)
    assert isinstance(found[2], IsADirectoryError)
    with pytest.raises(FileNotFoundError, match=r"none\.bin"):
        fs.cat_ranges(paths, 0, 10, on_error="raise")
    with pytest.raises(TypeError, match="list"):
        fs.cat_ranges(f"{ROOT}/one.bin", 0, 10)
    with pytest.raises(ValueError, match="2 paths"):
        fs.cat_ranges(paths[:2], [0], [1, 2])


def test_metadata_is_refreshed_after_ranges_of_a_changed_object_fail(s3: TierCacheFileSystem, bucket: Any) -> None:
    path = f"{bucket.name}/one.bin"
    s3.cat_ranges([path], 0, 10)
    bucket.put("one.bin", BODIES["one.bin"][::-1])
    assert isinstance(s3.cat_ranges([path], 2000, 2010)[0], ObjectChanged)
    assert s3.cat_ranges([path], 0, 10) == [BODIES["one.bin"][::-1][:10]]


def test_cat(fs: TierCacheFileSystem) -> None:
    one, two, none = (f"{ROOT}/{name}.bin" for name in ("one", "two", "none"))
    assert fs.cat(one) == BODIES["one.bin"]
    assert fs.cat(one, start=5, end=-5) == BODIES["one.bin"][5:-5]
    assert fs.cat([one]) == {one: BODIES["one.bin"]}
    assert fs.cat(f"{ROOT}/*.bin") == {f"{ROOT}/{name}.bin": BODIES[f"{name}.bin"] for name in ("empty", "one", "two")}
    assert fs.cat(ROOT, recursive=True) == {f"{ROOT}/{name}": body for name, body in BODIES.items()}
    with pytest.raises(FileNotFoundError):
        fs.cat([one, none])
    assert fs.cat([one, two, none], on_error="omit").keys() == {one, two}
    assert isinstance(fs.cat([one, none], on_error="return")[none], FileNotFoundError)
    mapper = fs.get_mapper(ROOT)
    assert mapper["deep/three.bin"] == BODIES["deep/three.bin"]
    assert set(mapper) == set(BODIES)
    with pytest.raises(KeyError):
        mapper["none"]


# Other ways to read


def test_parts_of_files(fs: TierCacheFileSystem) -> None:
    one, lines = f"{ROOT}/one.bin", f"{ROOT}/deep/deeper/lines.txt"
    assert fs.head(one, 10) == BODIES["one.bin"][:10]
    assert fs.tail(one, 10) == BODIES["one.bin"][-10:]
    assert fs.read_block(lines, 1500, 10, b"\n") == fsspec.filesystem("memory").read_block(lines, 1500, 10, b"\n")
    assert fs.read_text(lines).startswith("line 0\nline 1\n")
    assert fs.size(one) == 10_500
    assert fs.sizes([one, lines]) == [10_500, len(BODIES["deep/deeper/lines.txt"])]


def test_trees_are_the_origins(fs: TierCacheFileSystem, memory: Any) -> None:
    for query in (
        lambda fs: list(fs.walk(ROOT)),
        lambda fs: list(fs.walk(ROOT, maxdepth=1, detail=True)),
        lambda fs: fs.find(ROOT, withdirs=True),
        lambda fs: fs.find(ROOT, maxdepth=1, detail=True),
        lambda fs: fs.glob(f"{ROOT}/**/*.bin"),
        lambda fs: fs.glob(f"{ROOT}/*", detail=True),
        lambda fs: fs.glob(f"{ROOT}/none*"),
        lambda fs: fs.du(ROOT),
        lambda fs: fs.du(ROOT, total=False, withdirs=True),
        lambda fs: sorted(fs.ls(ROOT, detail=False)),
        lambda fs: fs.expand_path(f"{ROOT}/*", recursive=True),
        lambda fs: fs.isfile(ROOT),
        lambda fs: fs.isdir(ROOT),
        lambda fs: fs.isdir(f"{ROOT}/one.bin"),
        lambda fs: fs.lexists(f"{ROOT}/none"),
        lambda fs: fs.created(f"{ROOT}/one.bin"),
        lambda fs: fs.modified(f"{ROOT}/one.bin"),
        lambda fs: fs.tree(ROOT),
    ):
        assert query(fs) == query(memory)


def test_signed_addresses_are_the_origins(s3: TierCacheFileSystem, fs: TierCacheFileSystem, bucket: Any) -> None:
    address = s3.sign(bucket.url("one.bin"), expiration=60)
    assert fsspec.filesystem("http").cat(address) == BODIES["one.bin"]
    with pytest.raises(NotImplementedError):
        fs.sign(f"{ROOT}/one.bin")


class Steps(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self.steps.append(inc)


def test_get_file(fs: TierCacheFileSystem, tmp_path: Path) -> None:
    steps = Steps()
    fs.get_file(f"{ROOT}/one.bin", tmp_path / "new" / "one.bin", callback=steps)
    assert (tmp_path / "new" / "one.bin").read_bytes() == BODIES["one.bin"]
    assert (steps.size, sum(steps.steps)) == (10_500, 10_500)
    assert len(steps.steps) > 2
    into = io.BytesIO()
    fs.get_file(f"{ROOT}/one.bin", into)
    fs.get_file(f"{ROOT}/two.bin", outfile=into)
    assert into.getvalue() == BODIES["one.bin"] + BODIES["two.bin"]
    fs.get_file(f"{ROOT}/empty.bin", tmp_path / "empty.bin")
    assert (tmp_path / "empty.bin").read_bytes() == b""
    fs.get_file(f"{ROOT}/deep", tmp_path / "folder")
    assert (tmp_path / "folder").is_dir()
    fs.get(ROOT, str(tmp_path / "all"), recursive=True)
    assert {name: (tmp_path / "all" / name).read_bytes() for name in BODIES} == BODIES


def test_getting_a_file_needs_memory_for_a_few_blocks_only(memory: Any, tmp_path: Path) -> None:
    memory.pipe_file(f"{ROOT}/big.bin", bytes(32 << 20))
    fs = TierCacheFileSystem(fs=memory, cache_dir=str(tmp_path / "c"), block_bytes=256 << 10, skip_instance_cache=True)
    fs.prefetch(f"{ROOT}/big.bin", wait=True)
    gc.collect()
    tracemalloc.start()
    try:
        fs.get_file(f"{ROOT}/big.bin", tmp_path / "big.bin")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "big.bin").stat().st_size == 32 << 20


def test_a_partial_file_is_deleted(fs: TierCacheFileSystem, memory: Any, tmp_path: Path, monkeypatch: Any) -> None:
    fail_at_once(monkeypatch)
    read = type(memory).cat_file

    def failing(self: Any, path: str, start: int | None = None, end: int | None = None, **rest: Any) -> bytes:
        if start == 8000:
            raise OSError("the line is cut")
        return read(self, path, start=start, end=end, **rest)

    monkeypatch.setattr(type(memory), "cat_file", failing)
    with pytest.raises(OriginError, match=r"one\.bin bytes 8000-8999"):
        fs.get_file(f"{ROOT}/one.bin", tmp_path / "one.bin")
    assert not (tmp_path / "one.bin").exists()
    with pytest.raises(OriginError, match="8000"):
        fs.get_file(f"{ROOT}/one.bin", os.devnull)
    assert Path(os.devnull).is_char_device()


def test_nothing_is_written(fs: TierCacheFileSystem, tmp_path: Path) -> None:
    path = f"{ROOT}/one.bin"
    for write in (
        lambda: fs.open(path, "ab"),
        lambda: fs.open(path, "xb"),
        lambda: fs.open(path, "w"),
        lambda: fs.open(path, "r+b"),
        lambda: fs.transaction,
        lambda: fs.start_transaction(),
        lambda: fs.pipe({path: b""}),
        lambda: fs.put(str(tmp_path), path),
        lambda: fs.upload(str(tmp_path), path),
        lambda: fs.copy(path, path + "2"),
        lambda: fs.cp(path, path + "2"),
        lambda: fs.rename(path, path + "2"),
        lambda: fs.delete(path),
        lambda: fs.rm(path, recursive=True),
        lambda: fs.write_text(path, ""),
        lambda: fs.mkdirs(f"{ROOT}/new"),
    ):
        with pytest.raises(ConfigError, match="read-only"):
            write()
    assert fs.cat(ROOT, recursive=True) == {f"{ROOT}/{name}": body for name, body in BODIES.items()}


# Chained URLs


@pytest.mark.parametrize("protocol", ["s3", "memory", "file", "http"])
def test_chained_urls(protocol: str, bucket: Any, memory: Any, tmp_path: Path) -> None:
    body = BODIES["one.bin"]
    bucket.put("one.bin", body)
    (tmp_path / "one.bin").write_bytes(body)
    (tmp_path / "one.bin.gz").write_bytes(gzip.compress(body))
    options = {"tiercache": {"cache_dir": str(tmp_path / "cache"), "block_bytes": BLOCK}, "s3": bucket.options}
    with Served(tmp_path) as address:
        url = {
            "s3": bucket.url("one.bin"),
            "memory": f"memory:/{ROOT}/one.bin",
            "file": f"file://{tmp_path}/one.bin",
            "http": f"{address}/one.bin",
        }[protocol]
        for _ in range(2):
            with fsspec.open(f"tiercache::{url}", **options) as file:
                assert file.read() == body
            fs, path = fsspec.url_to_fs(f"tiercache::{url}", **options)
            assert fs.cat_file(path, start=-5) == body[-5:]
            assert fs.cat_ranges([path] * 2, [0, 5000], [10, 5010]) == [body[:10], body[5000:5010]]
            assert fs.isfile(path)
            assert not fs.exists(path + ".none")
            assert fs.find(path) == [path]
            assert fs.find(path, detail=True)[path]["size"] == len(body)
        if protocol in ("file", "http"):
            with fsspec.open(f"tiercache::{url}.gz", compression="infer", **options) as file:
                assert file.read() == body
    assert fs.stats()["bytes_origin"] > 0
    TierCacheFileSystem.clear_instance_cache()


def test_a_hub_of_datasets(tmp_path: Path) -> None:
    """hf:// reads from a fake Hub, and fetches each byte once."""
    body = BODIES["one.bin"]
    with Served(tmp_path, Hub) as address:
        url = "tiercache::hf://datasets/me/set/data/one.bin"
        options = {"cache_dir": str(tmp_path / "cache"), "block_bytes": BLOCK}
        fs, path = fsspec.url_to_fs(url, hf={"endpoint": address}, tiercache=options)
        for _ in range(2):
            assert fs.cat_file(path) == body
            with fs.open(path) as file:
                assert file.seek(5000) == 5000
                assert file.read(10) == body[5000:5010]
        assert list(fs.find("datasets/me/set")) == [path]
        assert fs.stats()["bytes_origin"] == len(body)
    assert sorted(Hub.sent) == [(first, min(first + BLOCK, len(body))) for first in range(0, len(body), BLOCK)]
    fs.clear_instance_cache()


def test_a_read_from_a_hub_looks_at_its_own_file_alone(tmp_path: Path) -> None:
    """The listing of its folder takes a request for each 1,000 files."""
    path = "datasets/me/set/data/one.bin"
    with Served(tmp_path, Hub) as address:
        fs = open_hub(address, tmp_path)
        assert fs.find("datasets/me/set") == [path]
        assert [*fs.blocks.origin.list("datasets/me/set")] == [path]
        listed = fs.ukey(path)
        Hub.listings.clear()
        assert fs.cat_file(path, 0, 5 * BLOCK) == BODIES["one.bin"][: 5 * BLOCK]
        assert Hub.listings == []
        fs.invalidate_cache()
        assert fs.ukey(path) == listed
        with pytest.MonkeyPatch.context() as replaced:
            replaced.setattr(Hub, "oid", "2f")
            with pytest.raises(ObjectChanged, match=r"one\.bin was replaced"):
                fs.cat_file(path)
            assert fs.info("datasets/me/set")["type"] == "directory"
            assert fs.cat_file(path) == BODIES["one.bin"]
    fs.clear_instance_cache()


def open_hub(address: str, tmp_path: Path) -> TierCacheFileSystem:
    given = {"cache_dir": str(tmp_path / "cache"), "block_bytes": BLOCK}
    return fsspec.filesystem("tiercache", target_protocol="hf", target_options={"endpoint": address}, **given)


@pytest.mark.parametrize(("version", "requested"), [("2.4.0", "data%2Fone.bin"), ("2.1.1", "data")])
def test_a_read_from_a_bucket_of_a_hub_looks_at_its_own_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, requested: str
) -> None:
    """Older clients would take the listing of the file for that of its folder."""
    monkeypatch.setattr("huggingface_hub.__version__", version)
    path = "buckets/me/box/data/one.bin"
    with Served(tmp_path, Hub) as address:
        fs = open_hub(address, tmp_path)
        assert fs.find("buckets/me/box") == [path]
        Hub.listings.clear()
        assert fs.cat_file(path, 0, 5 * BLOCK) == BODIES["one.bin"][: 5 * BLOCK]
        assert set(Hub.listings) == {f"/api/buckets/me/box/tree/{requested}"}
        monkeypatch.setattr(Hub, "oid", "2f")
        with pytest.raises(ObjectChanged, match=r"one\.bin was replaced"):
            fs.cat_file(path)
        assert fs.cat_file(path) == BODIES["one.bin"]
        assert fs.info("buckets/me/box/data")["type"] == "directory"
        assert not fs.exists("buckets/me/box/data/none.bin")
    fs.clear_instance_cache()


def test_a_longer_object_in_a_bucket_of_a_hub_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client keeps the size of the older one in the listing of its folder."""
    fail_at_once(monkeypatch)
    path, body = "buckets/me/box/data/one.bin", BODIES["one.bin"]
    with Served(tmp_path, Hub) as address:
        fs = open_hub(address, tmp_path)
        with monkeypatch.context() as older:
            older.setitem(BODIES, "one.bin", body[:BLOCK])
            assert fs.cat_file(path) == body[:BLOCK]
        monkeypatch.setattr(Hub, "oid", "2f")
        assert fs.info(path, refresh=True)["size"] == len(body)
        assert fs.cat_file(path) == body
    fs.clear_instance_cache()


class Hub(http.server.BaseHTTPRequestHandler):
    """A fake Hugging Face Hub with a dataset of one file."""

    protocol_version = "HTTP/1.1"
    oid = "1f"
    sent: ClassVar[list[tuple[int, int]]] = []
    listings: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        body, path = BODIES["one.bin"], self.path.partition("?")[0]
        if "/resolve/" in path:
            start, stop = (int(bound) for bound in self.headers["Range"].removeprefix("bytes=").split("-"))
            part = body[start : stop + 1]
            self.sent.append((start, start + len(part)))
            self.answer(206, part)
        elif path.startswith("/api/buckets/") and "/tree" in path:
            self.listings.append(path)
            folder, file = {"type": "directory", "path": "data"}, {**self.file(), "xetHash": self.oid}
            self.answer(200, [folder if self.path.endswith("/tree?recursive=false") else file])
        elif path.startswith("/api/buckets/"):
            made = {"private": False, "createdAt": "2026-01-01T00:00:00.000Z"}
            self.answer(200, {"id": "me/box", **made, "size": len(body), "totalFiles": 1})
        elif "/tree/" in path:
            self.listings.append(path)
            self.answer(200, [self.file()])
        else:
            self.answer(200, {"id": "me/set", "sha": "1f", "siblings": []})

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        commit = {"id": "c0", "title": "a commit", "date": "2026-01-01T00:00:00.000Z"}
        self.answer(200, [self.file() | {"lastCommit": commit} for path in asked["paths"] if path == "data/one.bin"])

    def file(self) -> dict[str, Any]:
        return {"type": "file", "oid": self.oid, "size": len(BODIES["one.bin"]), "path": "data/one.bin"}

    def answer(self, status: int, content: Any) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Served:
    """A web server with ranges and ETags: `with Served(folder) as address`."""

    def __init__(self, folder: Path, handler: Any = None) -> None:
        self.folder = folder
        self.handler = handler

    def __enter__(self) -> str:
        folder = self.folder

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = folder / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                body, requested = path.read_bytes(), self.headers.get("Range")
                self.send_response(206 if requested else 200)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", f'"{len(body)}"')
                if requested:
                    start, stop = (int(bound) for bound in requested.removeprefix("bytes=").split("-"))
                    self.send_header("Content-Range", f"bytes {start}-{min(stop, len(body) - 1)}/{len(body)}")
                    body = body[start : stop + 1]
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 (http.server looks up this name)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler or Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


# Metadata of objects


def metadata_requests(bucket: Any) -> int:
    stats = bucket.server.stats()
    return int(stats["head_requests"] + stats["list_requests"])


@pytest.mark.slow
def test_metadata_is_pickled_with_the_filesystem(s3: TierCacheFileSystem, bucket: Any) -> None:
    paths = s3.find(bucket.name)
    bucket.server.reset()
    with SPAWN.Pool(3) as pool:
        for found in pool.map(functools.partial(read_each, s3), [paths] * 3, chunksize=1):
            assert found == [BODIES[path.partition("/")[2]] for path in paths]
        pool.close()
        pool.join()
    assert metadata_requests(bucket) == 0


def test_a_forked_child_inherits_metadata(s3: TierCacheFileSystem, bucket: Any) -> None:
    path = s3.find(bucket.name)[0]
    bucket.server.reset()
    child = os.fork()
    if child == 0:
        os._exit(0 if s3.open(path).size == s3.info(path)["size"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert metadata_requests(bucket) == 0


def read_each(fs: TierCacheFileSystem, paths: list[str]) -> list[bytes]:
    return [fs.open(path).read() for path in paths if fs.isfile(path)]


def test_pickled_metadata_is_bounded(s3: TierCacheFileSystem, bucket: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("dataload.cache.filesystem.PICKLED_INFOS", 2)
    s3.find(bucket.name)
    assert len(s3._known) == len(BODIES)
    assert len(pickle.loads(pickle.dumps(s3))._known) == 2
    TierCacheFileSystem.clear_instance_cache()


def test_a_pickled_file_is_read_without_requests_for_metadata(s3: TierCacheFileSystem, bucket: Any) -> None:
    file = s3.open(bucket.url("one.bin"))
    file.seek(100)
    bucket.server.reset()
    with SPAWN.Pool(1) as pool:
        assert pool.apply(rest_of, (file,)) == BODIES["one.bin"][100:]
        pool.close()
        pool.join()
    assert metadata_requests(bucket) == 0


def rest_of(file: Any) -> bytes:
    return file.read()


def test_metadata_of_objects_is_requested_concurrently(s3: TierCacheFileSystem, bucket: Any, monkeypatch: Any) -> None:
    together = threading.Barrier(4)
    info = type(s3.blocks.origin).info

    def held(self: Any, path: str) -> Any:
        together.wait(200)
        return info(self, path)

    monkeypatch.setattr(type(s3.blocks.origin), "info", held)
    names = ("one.bin", "two.bin", "deep/three.bin", "empty.bin")
    found = s3.cat([bucket.url(name) for name in names])
    assert list(found.values()) == [BODIES[name] for name in sorted(names)]

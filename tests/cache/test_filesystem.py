"""`tiercache` as a filesystem: its results, its requests to the origin, and failures of the origin."""

from __future__ import annotations

import doctest
import gc
import logging
import math
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pytest
from attempts import fail_at_once
from http_servers import serving
from moto_server import S3Server
from threads import AskedFirst

from dataload.cache import config, filesystem, reports
from dataload.cache.blocks.reader import IN_FLIGHT, Object
from dataload.cache.config import CacheConfig
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin.origin import Origin
from dataload.errors import ConfigError, ObjectChanged, OriginError, OriginNotFound

SPAWN = multiprocessing.get_context("spawn")
BLOCK = 100_000
DATA = bytes(range(251)) * 2000  # 502,000 bytes: five blocks and a bit


@pytest.mark.parametrize("module", [config, filesystem], ids=["config", "filesystem"])
def test_examples_of_docstrings_run(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def open_fs(bucket: Any, path: Path, **options: Any) -> TierCacheFileSystem:
    settings = {"cache_dir": str(path / "cache"), "cache_bytes": "1GB", "block_bytes": BLOCK, **options}
    return fsspec.filesystem(
        "tiercache", target_protocol="s3", target_options=bucket.options, skip_instance_cache=True, **settings
    )


@pytest.fixture
def fs(bucket: Any, tmp_path: Path) -> TierCacheFileSystem:
    bucket.put("folder/data.bin", DATA)
    bucket.put("folder/deep/other.bin", b"other")
    bucket.put("folder/empty.bin", b"")
    bucket.server.reset()
    return open_fs(bucket, tmp_path)


def test_any_range_is_right(fs: TierCacheFileSystem, bucket: Any) -> None:
    path = f"{bucket.name}/folder/data.bin"
    for start, stop in [
        (0, 1),
        (0, BLOCK),
        (1, BLOCK + 1),
        (BLOCK - 1, 3 * BLOCK + 1),
        (0, len(DATA)),
        (500_000, 600_000),
    ]:
        assert fs.cat_file(path, start=start, end=stop) == DATA[start:stop]
    assert fs.cat_file(path, start=-7) == DATA[-7:]
    assert fs.cat_file(path, end=-7) == DATA[:-7]
    assert fs.cat_file(path) == DATA
    assert fs.cat_ranges([path, path], [5, 200_000], [9, 400_000]) == [DATA[5:9], DATA[200_000:400_000]]
    assert fs.cat_file(f"{bucket.name}/folder/empty.bin") == b""


def test_a_file_reads_seeks_and_ends(fs: TierCacheFileSystem, bucket: Any) -> None:
    with fs.open(bucket.url("folder/data.bin")) as file:
        assert file.read(3) == DATA[:3]
        assert file.seek(-5, os.SEEK_END) == len(DATA) - 5
        assert file.read(100) == DATA[-5:]
        assert file.read(100) == b""
        file.seek(BLOCK - 2)
        buffer = bytearray(4)
        assert file.readinto(buffer) == 4
        assert buffer == DATA[BLOCK - 2 : BLOCK + 2]
        assert file.tell() == BLOCK + 2
        assert file.read_buffer(10).to_pybytes() == DATA[BLOCK + 2 : BLOCK + 12]
        with pytest.raises(ValueError, match="seek"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_text_mode(fs: TierCacheFileSystem, bucket: Any) -> None:
    with fs.open(bucket.url("folder/deep/other.bin"), "rt") as file:
        assert file.read() == "other"


def test_listing(fs: TierCacheFileSystem, bucket: Any) -> None:
    name = bucket.name
    assert fs.ls(f"{name}/folder", detail=False) == [
        f"{name}/folder/data.bin",
        f"{name}/folder/deep",
        f"{name}/folder/empty.bin",
    ]
    assert fs.find(name) == [f"{name}/folder/data.bin", f"{name}/folder/deep/other.bin", f"{name}/folder/empty.bin"]
    assert fs.glob(f"{name}/folder/*.bin") == [f"{name}/folder/data.bin", f"{name}/folder/empty.bin"]
    assert fs.glob(f"{name}/folder/*/") == [f"{name}/folder/deep"]
    assert fs.glob(f"tiercache://{name}/fold*/") == [f"{name}/folder"]
    assert [folder for folder, _, _ in fs.walk(name)] == [name, f"{name}/folder", f"{name}/folder/deep"]
    assert fs.info(bucket.url("folder/data.bin"))["size"] == len(DATA)
    assert fs.isfile(f"{name}/folder/data.bin")
    assert fs.isdir(f"{name}/folder")
    assert fs.exists(f"{name}/folder/deep/other.bin")
    assert not fs.exists(f"{name}/nothing")
    assert fs.modified(f"{name}/folder/data.bin") is not None
    assert fs.unstrip_protocol(f"{name}/x") == f"tiercache://{name}/x"  # which this filesystem reads, not another
    assert fs.info(fs.unstrip_protocol(f"{name}/folder/data.bin"))["size"] == len(DATA)


def test_bytes_leave_the_origin_once(fs: TierCacheFileSystem, bucket: Any, tmp_path: Path) -> None:
    path = f"{bucket.name}/folder/data.bin"
    for _ in range(3):
        assert fs.cat_file(path) == DATA
    assert open_fs(bucket, tmp_path).cat_file(path, start=1000) == DATA[1000:]
    assert bucket.server.stats()["get_bytes"] == len(DATA)
    assert bucket.server.stats()["get_requests"] == 6
    stats = fs.stats()
    assert (stats["misses"], stats["hits"], stats["requests_origin"], stats["bytes_origin"]) == (6, 12, 6, len(DATA))


def test_prefetch(fs: TierCacheFileSystem, bucket: Any) -> None:
    fs.prefetch(f"{bucket.name}/folder", wait=True)
    sent = bucket.server.stats()["get_bytes"]
    assert sent == len(DATA) + 5
    assert fs.cat_file(f"{bucket.name}/folder/data.bin") == DATA
    assert bucket.server.stats()["get_bytes"] == sent


@pytest.mark.parametrize("name", ["a[1].bin", "a[1]/x.bin"])
def test_a_prefetch_of_a_name_that_looks_like_a_glob(bucket: Any, tmp_path: Path, name: str) -> None:
    bucket.put(name, DATA)
    fs = open_fs(bucket, tmp_path)
    fs.prefetch(f"{bucket.name}/{name}", wait=True)
    sent = bucket.server.stats()["get_bytes"]
    assert fs.cat_file(f"{bucket.name}/{name}") == DATA
    assert bucket.server.stats()["get_bytes"] == sent > 0
    fs.prefetch(f"{bucket.name}/typo[1].bin", wait=True)


def test_a_prefetch_of_nothing(fs: TierCacheFileSystem, bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(OriginNotFound, match="typo"):
        fs.prefetch([f"{bucket.name}/folder", f"{bucket.name}/typo"], wait=True)
    fs.prefetch(f"{bucket.name}/typo*", wait=True)
    (tmp_path / "empty").mkdir()
    local = TierCacheFileSystem("file", cache_dir=str(tmp_path / "other"), skip_instance_cache=True)
    local.prefetch(str(tmp_path / "empty"), wait=True)


@pytest.mark.parametrize("path", ["typo?id=7", "typo"])
def test_a_prefetch_of_a_url_that_is_missing(tmp_path: Path, path: str) -> None:
    """In a URL, "?" is no character of a glob."""
    fs = TierCacheFileSystem("http", cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    with serving(SimpleHTTPRequestHandler) as url, pytest.raises(OriginNotFound, match="typo"):
        fs.prefetch(f"{url}/{path}", wait=True)


def test_a_prefetch_fetches_only_what_there_is_room_for(bucket: Any, tmp_path: Path) -> None:
    bucket.put("x", DATA)
    fs = open_fs(bucket, tmp_path, cache_bytes=len(DATA) // 2, block_bytes=8000)
    sent = bucket.server.stats()["get_bytes"]
    fs.prefetch(bucket.url("x"), wait=True)
    fetched = bucket.server.stats()["get_bytes"] - sent
    assert 0.8 * len(DATA) // 2 < fetched < len(DATA) // 2
    assert fs.cat_file(bucket.url("x")) == DATA
    assert bucket.server.stats()["get_bytes"] - sent == len(DATA), "all that was fetched before is kept"


def test_a_prefetch_onto_a_disk_that_is_full_fetches_no_more(bucket: Any, small_disk: Path) -> None:
    """The limit holds whatever the configured capacity."""
    data = DATA * (-(-(4 << 20) // len(DATA)))
    bucket.put("large", data)
    fs = open_fs(bucket, small_disk / "cache", cache_bytes="1GB", block_bytes="64KiB")
    sent = bucket.server.stats()["get_bytes"]
    fs.prefetch(bucket.url("large"), wait=True)
    assert bucket.server.stats()["get_bytes"] - sent < 2 << 20
    assert fs.stats()["errors"]["local"]
    assert fs.cat_file(bucket.url("large")) == data


def test_pandas_reads_a_chained_url(bucket: Any, tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": range(1000), "b": [str(i) for i in range(1000)]})
    frame.to_parquet(tmp_path / "x.parquet")
    bucket.put("x.parquet", (tmp_path / "x.parquet").read_bytes())
    options = {"s3": bucket.options, "tiercache": {"cache_dir": str(tmp_path / "cache")}}
    for _ in range(2):
        found = pd.read_parquet(f"tiercache::{bucket.url('x.parquet')}", storage_options=options)
        pd.testing.assert_frame_equal(found, frame)


def test_archives_of_the_same_names_are_told_apart(tmp_path: Path) -> None:
    cache = {"cache_dir": str(tmp_path / "cache")}
    for name in "ab":
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr(zipfile.ZipInfo("x.bin"), name)
    one, other = (Origin(fsspec.filesystem("zip", fo=str(tmp_path / f"{name}.zip"))) for name in "ab")
    assert one.identity != other.identity
    for name in "ab":
        with fsspec.open(f"tiercache::zip://x.bin::file://{tmp_path}/{name}.zip", tiercache=cache) as file:
            assert file.read() == name.encode()


def test_a_file_replaced_mid_read_on_an_origin_without_etags(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1" * 2 * BLOCK)
    fs = TierCacheFileSystem(
        fs=fsspec.filesystem("file"), cache_dir=str(tmp_path / "cache"), block_bytes=BLOCK, skip_instance_cache=True
    )
    with fs.open(str(tmp_path / "x.bin")) as file:
        assert file.read(BLOCK) == b"1" * BLOCK
        (tmp_path / "new.bin").write_bytes(b"2" * 2 * BLOCK)
        (tmp_path / "new.bin").rename(tmp_path / "x.bin")
        with pytest.raises(ObjectChanged, match=r"x\.bin"):
            file.read(BLOCK)
    assert fs.cat_file(str(tmp_path / "x.bin")) == b"2" * 2 * BLOCK  # it checks the version again


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_other_origins(protocol: str, tmp_path: Path) -> None:
    target = fsspec.filesystem(protocol)
    root = f"/{tmp_path.name}" if protocol == "memory" else str(tmp_path)
    target.pipe_file(f"{root}/x.bin", DATA)
    fs = TierCacheFileSystem(fs=target, cache_dir=str(tmp_path / "cache"), block_bytes=BLOCK, skip_instance_cache=True)
    assert fs.cat_file(f"{root}/x.bin", start=BLOCK - 1, end=BLOCK + 1) == DATA[BLOCK - 1 : BLOCK + 1]
    assert fs.cat_file(f"{root}/x.bin") == DATA
    assert fs.stats()["bytes_origin"] == len(DATA)


# Processes


def test_it_pickles_and_works_in_a_spawned_child(fs: TierCacheFileSystem, bucket: Any) -> None:
    path = f"{bucket.name}/folder/data.bin"
    assert pickle.loads(pickle.dumps(fs)).cat_file(path) == DATA
    sent = bucket.server.stats()["get_requests"]
    with SPAWN.Pool(1) as pool:
        assert pool.apply(read_all, (fs, path)) == DATA
        pool.close()
        pool.join()
    assert bucket.server.stats()["get_requests"] == sent


def read_all(fs: TierCacheFileSystem, path: str) -> bytes:
    return fs.cat_file(path)


@pytest.fixture
def cached_fs(fs: TierCacheFileSystem) -> Iterator[TierCacheFileSystem]:
    """A filesystem that fsspec returns again for the same arguments, so also to a copy of its pickle."""
    yield type(fs)(*fs.storage_args, **fs.storage_options)
    TierCacheFileSystem.clear_instance_cache()


def test_an_older_pickle_brings_back_no_older_version(cached_fs: TierCacheFileSystem, bucket: Any) -> None:
    path = f"{bucket.name}/folder/data.bin"
    assert cached_fs.cat_file(path) == DATA
    older = pickle.dumps(cached_fs)
    bucket.put("folder/data.bin", DATA[::-1])
    cached_fs.info(path, refresh=True)
    assert pickle.loads(older) is cached_fs
    assert cached_fs.cat_file(path) == DATA[::-1]


@pytest.mark.parametrize("forget", ["invalidate_cache", "cat_file"])
def test_an_older_pickle_brings_back_no_forgotten_version(
    cached_fs: TierCacheFileSystem, bucket: Any, forget: str
) -> None:
    path = f"{bucket.name}/folder/data.bin"
    cached_fs.info(path)
    older = pickle.dumps(cached_fs)
    bucket.put("folder/data.bin", DATA[::-1])
    with suppress(ObjectChanged):
        getattr(cached_fs, forget)(path)
    assert pickle.loads(older) is cached_fs
    assert cached_fs.cat_file(path) == DATA[::-1]


def test_a_pickle_still_brings_infos_of_objects_that_were_not_replaced(
    cached_fs: TierCacheFileSystem, bucket: Any
) -> None:
    cached_fs.find(bucket.name)
    older = pickle.dumps(cached_fs)
    path = f"{bucket.name}/folder/data.bin"
    bucket.put("folder/data.bin", DATA[::-1])
    with pytest.raises(ObjectChanged):
        cached_fs.cat_file(path)
    cached_fs._known.clear()
    pickle.loads(older)
    assert path not in cached_fs._known
    assert len(cached_fs._known) > 0


def test_a_pickled_file_has_no_infos_of_other_objects(cached_fs: TierCacheFileSystem, bucket: Any) -> None:
    path = f"{bucket.name}/folder/data.bin"
    cached_fs.find(bucket.name)
    content = pickle.dumps(cached_fs.open(path))
    assert b"other.bin" not in content
    bucket.put("folder/data.bin", DATA[::-1])
    with pytest.raises(ObjectChanged):
        pickle.loads(content).read()
    assert cached_fs.cat_file(path) == DATA[::-1]


def test_it_works_in_a_forked_child(fs: TierCacheFileSystem, bucket: Any) -> None:
    path = f"{bucket.name}/folder/data.bin"
    assert fs.cat_file(path, end=10) == DATA[:10]
    child = os.fork()
    if child == 0:
        os._exit(0 if fs.cat_file(path) == DATA else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert fs.cat_file(path) == DATA
    assert bucket.server.stats()["get_bytes"] == len(DATA)


# Failures


def test_a_missing_object_and_a_missing_bucket(fs: TierCacheFileSystem, bucket: Any) -> None:
    for url in (bucket.url("nothing"), "s3://no-such-bucket/x"):
        with pytest.raises(OriginNotFound, match="does not exist"):
            fs.open(url)
        with pytest.raises(FileNotFoundError):
            fs.info(url)


def test_a_path_below_a_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(DATA)
    fs = TierCacheFileSystem("file", cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    path = str(tmp_path / "x.bin" / "below")
    assert not fs.exists(path)
    with pytest.raises(OriginNotFound, match="does not exist"):
        fs.cat_file(path)


@pytest.mark.parametrize(("name", "says"), [("x" * 300, "File name too long"), ("loop/x", "symbolic links")])
def test_a_name_that_cannot_exist_is_requested_once(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    fs = TierCacheFileSystem("file", cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    with pytest.raises(OriginError, match=says):
        fs.exists(str(tmp_path / name))
    assert fs.stats()["retries_origin"] == 0


def test_a_folder_is_not_opened(fs: TierCacheFileSystem, bucket: Any) -> None:
    with pytest.raises(IsADirectoryError):
        fs.open(bucket.url("folder"))


def test_an_object_replaced_mid_read(fs: TierCacheFileSystem, bucket: Any) -> None:
    file = fs.open(bucket.url("folder/data.bin"))
    first = file.read(BLOCK)
    bucket.put("folder/data.bin", DATA[::-1])
    assert first == DATA[:BLOCK]
    with pytest.raises(ObjectChanged, match=r"folder/data\.bin bytes 100000-199999"):
        file.read(BLOCK)
    fs.invalidate_cache()
    assert fs.cat_file(bucket.url("folder/data.bin")) == DATA[::-1]


def test_after_a_change_the_next_open_reads_the_new_version(fs: TierCacheFileSystem, bucket: Any) -> None:
    fs.info(bucket.url("folder/data.bin"))
    bucket.put("folder/data.bin", DATA[::-1])
    with pytest.raises(ObjectChanged):
        fs.cat_file(bucket.url("folder/data.bin"))
    assert fs.cat_file(bucket.url("folder/data.bin")) == DATA[::-1]


def test_after_a_change_a_listing_has_the_new_version(fs: TierCacheFileSystem, bucket: Any) -> None:
    folder, path = f"{bucket.name}/folder", f"{bucket.name}/folder/data.bin"
    fs.ls(folder)
    bucket.put("folder/data.bin", DATA[::-1])
    with pytest.raises(ObjectChanged):
        fs.cat_file(path)
    fs.ls(folder)
    assert fs.cat_file(path) == DATA[::-1]


def test_a_folder_is_listed_again_after_its_url_was_invalidated(fs: TierCacheFileSystem, bucket: Any) -> None:
    folder = f"{bucket.name}/folder"
    fs.ls(folder)
    bucket.put("folder/new.bin", b"new")
    fs.invalidate_cache(f"tiercache://{folder}")
    assert f"{folder}/new.bin" in fs.ls(folder, detail=False)


def test_infos_are_the_callers(fs: TierCacheFileSystem, bucket: Any) -> None:
    path = f"{bucket.name}/folder/data.bin"
    for infos in (
        [fs.info(path)],
        fs.ls(f"{bucket.name}/folder"),
        fs.find(bucket.name, detail=True).values(),
        fs.glob(f"{bucket.name}/folder/*", detail=True).values(),
    ):
        for info in infos:
            info["size"] = 1
        assert fs.size(path) == len(DATA)
    assert fs.cat_file(bucket.url("folder/data.bin")) == DATA


def test_a_listing_saves_a_request_for_each_object(fs: TierCacheFileSystem, bucket: Any) -> None:
    for path in fs.find(bucket.name):
        fs.open(path).close()
    assert bucket.server.stats()["head_requests"] == 0


def test_trouble_is_not_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_once(monkeypatch)
    nobody = {
        "key": "x",
        "secret": "x",
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
    }
    fs = fsspec.filesystem(
        "tiercache",
        target_protocol="s3",
        target_options=nobody,
        cache_dir=str(tmp_path / "c"),
        skip_instance_cache=True,
    )
    fs.fs.retries = 1
    for ask in (fs.exists, fs.isfile, fs.isdir, fs.ls, fs.find, fs.info, fs.modified):
        with pytest.raises(OriginError, match=r"127\.0\.0\.1:9"):
            ask("bucket/x")


def test_reads_do_not_wait_behind_a_prefetch(fs: TierCacheFileSystem, bucket: Any, monkeypatch: Any) -> None:
    release = threading.Event()
    engine = fs.blocks.origin.engine
    parts = engine.parts

    def held(path: str, *rest: Any) -> Any:
        assert "data.bin" in path or release.wait(200)
        return parts(path, *rest)

    monkeypatch.setattr(engine, "parts", held)
    for number in range(40):
        bucket.put(f"many/{number}", b"x")
    fs.prefetch(f"{bucket.name}/many")
    assert fs.cat_file(bucket.url("folder/data.bin")) == DATA
    release.set()
    fs.prefetch(f"{bucket.name}/many", wait=True)


def test_ctrl_c_interrupts_the_wait_for_a_prefetch(fs: TierCacheFileSystem, bucket: Any, monkeypatch: Any) -> None:
    fetched = AskedFirst([])
    monkeypatch.setattr(fs.blocks, "prefetch", lambda _: [fetched])
    fs.prefetch(bucket.url("folder/data.bin"), wait=True)
    assert fetched.done()


def test_many_blocks_need_few_descriptors(bucket: Any, tmp_path: Path) -> None:
    bucket.put("x", DATA)
    fs = open_fs(bucket, tmp_path, block_bytes=1000)
    fs.cat_file(bucket.url("x"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 100, hard))
    try:
        assert fs.cat_file(bucket.url("x")) == DATA
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert fs.stats()["errors"]["local"] == 0


def test_what_is_immutable_is_asked_about_once(bucket: Any, tmp_path: Path) -> None:
    """This holds for later readers, and without an ETag."""
    bucket.put("x.bin", DATA)
    (tmp_path / "x.bin").write_bytes(DATA)
    etag = bucket.client.head_object(Bucket=bucket.name, Key="x.bin")["ETag"]
    path, elsewhere = f"{bucket.name}/x.bin", {"cache_dir": str(tmp_path / "other"), "skip_instance_cache": True}
    for _ in range(2):
        bucket.server.reset()
        fs = open_fs(bucket, tmp_path, consistency="immutable")
        assert (fs.cat_file(path), fs.size(path), fs.ukey(path)) == (DATA, len(DATA), etag)
        local = TierCacheFileSystem("file", **elsewhere, consistency="immutable")
        assert local.cat_file(str(tmp_path / "x.bin"), end=10) == DATA[:10]
        assert local.isdir(str(tmp_path))
    asked = bucket.server.stats()
    assert (asked["head_requests"], asked["list_requests"], asked["get_requests"]) == (0, 0, 0)
    assert local.stats()["requests_origin"] == 0


def test_consistency_open_asks_at_every_open(bucket: Any, tmp_path: Path) -> None:
    bucket.put("x", b"old")
    settled, fresh = (open_fs(bucket, tmp_path, consistency=rule) for rule in ("generation", "open"))
    for fs in (settled, fresh):
        assert fs.cat_file(bucket.url("x")) == b"old"
    bucket.put("x", b"new")
    assert settled.cat_file(bucket.url("x")) == b"old"
    assert fresh.cat_file(bucket.url("x")) == b"new"


class Faults:
    """Corrupt the bodies of the first `count` object GETs."""

    def __init__(self) -> None:
        self.count = 0
        self.kind = ""

    def wrap(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        def spoiled(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] != "GET" or not environ.get("HTTP_RANGE") or self.count == 0:
                return app(environ, start_response)
            self.count -= 1
            if self.kind == "503":
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"]
            body = b"".join(app(environ, start_response))
            return [body[: len(body) // 2]]

        return spoiled


@pytest.fixture
def faults(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    faults = Faults()
    monkeypatch.setattr(server._http, "app", faults.wrap(server._http.app))
    yield faults


@pytest.mark.parametrize("kind", ["503", "short"])
def test_a_passing_fault_is_retried(fs: TierCacheFileSystem, bucket: Any, faults: Faults, kind: str) -> None:
    faults.kind, faults.count = kind, 2
    assert fs.cat_file(bucket.url("folder/data.bin")) == DATA
    assert faults.count == 0


def test_a_lasting_fault_is_raised_and_nothing_is_kept(
    fs: TierCacheFileSystem, bucket: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_once(monkeypatch)
    faults.kind, faults.count = "short", 10**9
    with pytest.raises(OriginError, match=r"folder/data\.bin bytes 0-99999"):
        fs.cat_file(bucket.url("folder/data.bin"), end=BLOCK)
    faults.count = 0
    assert fs.cat_file(bucket.url("folder/data.bin")) == DATA


@pytest.mark.parametrize("came", [7, BLOCK - 1, BLOCK + 1, 3 * BLOCK])
def test_other_bytes_than_asked_for_are_noticed(
    fs: TierCacheFileSystem, bucket: Any, monkeypatch: Any, came: int
) -> None:
    fail_at_once(monkeypatch)
    monkeypatch.setattr(fs.blocks.origin.engine, "parts", lambda *_: iter([b"x" * (came - 3), b"", b"xxx"]))
    with pytest.raises(OriginError, match=f"{came} bytes came instead of {BLOCK}"):
        fs.cat_file(bucket.url("folder/data.bin"), end=1)
    assert fs.blocks.tier.stats()["misses"] == 1
    monkeypatch.undo()
    assert fs.cat_file(bucket.url("folder/data.bin")) == DATA


def test_a_mistake_of_ours_is_not_the_origins(fs: TierCacheFileSystem, bucket: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> bytes:
        raise TypeError("a bug")

    monkeypatch.setattr(fs.blocks.origin.engine, "parts", broken)
    with pytest.raises(TypeError, match="a bug"):
        fs.cat_file(bucket.url("folder/data.bin"))


class Held:
    """An engine that begins requests, and goes on with them when they are released.

    Attributes:
        starts: Where the requests begin. A released one that fails in passing is repeated, and is no other one.
    """

    def __init__(
        self, fs: TierCacheFileSystem, monkeypatch: pytest.MonkeyPatch, begins: Callable[[int], object]
    ) -> None:
        self.starts: set[int] = set()
        self._release = threading.Event()
        self._fs = fs
        engine = fs.blocks.origin.engine
        parts = engine.parts

        def held(path: str, start: int, *rest: Any) -> Any:
            self.starts.add(start)
            begins(start)
            self._release.wait(200)
            return parts(path, start, *rest)

        monkeypatch.setattr(engine, "parts", held)

    def release(self) -> None:
        """Release the requests, and wait until all that were queued have begun or are cancelled."""
        self._release.set()
        self._fs.blocks.submit(int).result(200)


@pytest.mark.parametrize("read", [
    lambda fs, path: fs.cat_file(path),
    lambda fs, path: fs.cat_ranges([path], 0, None),
])  # fmt: skip
def test_ctrl_c_ends_a_large_read(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any, str], Any]
) -> None:
    bucket.put("x", DATA)
    fs = open_fs(bucket, tmp_path, block_bytes=5000)
    fs.info(bucket.url("x"))
    main = threading.main_thread()
    # Python swallows the exception in a finalizer, which may run while the requests are submitted: so the last of those
    # that are held sends it. A signal of 0 does nothing.
    numbers = iter([*[0] * (IN_FLIGHT - 1), signal.SIGINT, *[0] * 200])
    held = Held(fs, monkeypatch, lambda _: signal.pthread_kill(int(main.ident or 0), next(numbers)))
    with pytest.raises(KeyboardInterrupt):
        read(fs, bucket.url("x"))
    held.release()
    assert len(held.starts) < 2 * IN_FLIGHT  # of 101 blocks; threads that are free may begin a few more


def test_a_range_that_fails_ends_the_read_of_the_others(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("x", DATA)
    fs = open_fs(bucket, tmp_path, block_bytes=5000)

    def fail(start: int) -> None:
        if start == 0:
            raise OriginError("the store is on fire")

    held = Held(fs, monkeypatch, fail)
    with pytest.raises(OriginError, match="on fire"):
        fs.cat_ranges([bucket.url("x")], 0, None, on_error="raise")
    held.release()
    assert len(held.starts) < 2 * IN_FLIGHT  # of 101 blocks; threads that are free may begin a few more


# Settings


def test_writing_is_refused(fs: TierCacheFileSystem, bucket: Any) -> None:
    path = bucket.url("new")
    for write in (
        lambda: fs.open(path, "wb"),
        lambda: fs.pipe_file(path, b""),
        lambda: fs.rm(path),
        lambda: fs.mkdir(path),
        lambda: fs.touch(path),
        lambda: fs.mv(path, path),
    ):
        with pytest.raises(ConfigError, match="read-only"):
            write()


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "fifo"},
        {"consistency": "eventual"},
        {"engine": "warp"},
        {"cluster": "host:6379"},
        {"cache_bytes": "many"},
        {"cache_bytes": 0},
        {"cache_bytes": math.inf},
        {"block_bytes": "-1MB"},
        {"cache_size": "1GB"},
        {"cachedir": "/nvme/cache"},
        {"page_checksums": "false"},
        {"allow_network_filesystem": "no"},
        {"in_flight": True},
        {"cluster": 5},
    ],
)
def test_settings_that_cannot_work(bucket: Any, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        open_fs(bucket, tmp_path, **wrong)


def test_a_setting_that_is_none_has_its_default(bucket: Any, tmp_path: Path) -> None:
    names = {each.name for each in fields(CacheConfig)} - {"cache_dir", "block_bytes", "cache_bytes"}
    given, plain = (open_fs(bucket, tmp_path, **each).blocks.config for each in (dict.fromkeys(names), {}))
    assert given == plain


def test_names_that_libraries_pass_are_allowed(bucket: Any, tmp_path: Path) -> None:
    names = ("block_size", "cache_type", "cache_options", "use_listings_cache", "listings_expiry_time", "asynchronous")
    assert (
        open_fs(
            bucket, tmp_path, **dict.fromkeys((*names, "loop", "anon", "user", "region", "cache_check"))
        ).blocks.block_bytes
        == BLOCK
    )


def test_an_origin_is_needed() -> None:
    with pytest.raises(ConfigError, match="needs an origin"):
        fsspec.filesystem("tiercache")
    with pytest.raises(ConfigError, match="no filesystem for warp"):
        fsspec.filesystem("tiercache", target_protocol="warp")


def test_credentials_stay_out_of_sight(bucket: Any, tmp_path: Path) -> None:
    bucket.put("x", b"body")
    secret = "pa55word-in-the-clear"
    fs = fsspec.filesystem(
        "tiercache",
        target_protocol="s3",
        target_options={**bucket.options, "key": secret, "secret": secret},
        cache_dir=str(tmp_path / "cache"),
        skip_instance_cache=True,
    )
    assert fs.cat_file(bucket.url("x")) == b"body"
    assert secret not in repr(fs) + repr(fs.blocks.origin) + repr(fs.blocks.tier) + str(fs.stats())
    for file in (tmp_path / "cache").rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_credentials_in_urls_stay_out_of_sight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0.1)
    monkeypatch.setattr(reports, "_reported", set())
    secret = "hunter2"
    url = f"http://user:{secret}@127.0.0.1:9/x.bin?X-Amz-Signature={secret}&y=1"
    fs = fsspec.filesystem("tiercache", target_protocol="http", cache_dir=str(tmp_path / "c"), skip_instance_cache=True)
    with caplog.at_level(logging.DEBUG, "dataload"), pytest.raises(OriginError) as failed:
        fs.cat_file(url)
    name = fs.blocks.key(Object(url, 1, "v"), "all").name
    assert secret not in str(failed.value) + caplog.text + name
    assert "retrying" in caplog.text
    assert "127.0.0.1:9/x.bin" in name


def test_one_name_for_two_addresses(bucket: Any, tmp_path: Path) -> None:
    bucket.put("x", DATA)
    bucket.server.reset()
    for host in ("127.0.0.1", "localhost"):
        address = bucket.options["endpoint_url"].replace("127.0.0.1", host)
        fs = fsspec.filesystem(
            "tiercache",
            target_protocol="s3",
            target_options={**bucket.options, "endpoint_url": address},
            cache_dir=str(tmp_path / "cache"),
            origin_id="the store",
            skip_instance_cache=True,
        )
        assert fs.cat_file(bucket.url("x")) == DATA
    assert bucket.server.stats()["get_bytes"] == len(DATA)


def test_threads_share_one_fetch(fs: TierCacheFileSystem, bucket: Any) -> None:
    start = threading.Barrier(8)
    found = []

    def read() -> None:
        start.wait(200)
        found.append(fs.cat_file(bucket.url("folder/data.bin")))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DATA] * 8
    assert bucket.server.stats()["get_bytes"] == len(DATA)


def test_what_was_immutable_and_is_replaced_is_read_again(bucket: Any, tmp_path: Path) -> None:
    """The error says: start the program again."""
    bucket.put("x.bin", DATA)
    path, fs = f"{bucket.name}/x.bin", open_fs(bucket, tmp_path, consistency="immutable")
    assert fs.cat_file(path, end=10) == DATA[:10]
    bucket.put("x.bin", DATA[::-1])
    with pytest.raises(ObjectChanged):
        fs.cat_file(path)
    assert open_fs(bucket, tmp_path, consistency="immutable").cat_file(path) == DATA[::-1]
    bucket.put("x.bin", DATA)
    fs = open_fs(bucket, tmp_path, consistency="immutable", cache_dir=str(tmp_path / "other"))
    assert fs.cat_file(path, end=10) == DATA[:10]
    bucket.put("x.bin", DATA[::-1])
    with pytest.raises(ObjectChanged):
        fs.cat_ranges([path], [2 * BLOCK], [3 * BLOCK], on_error="raise")
    fs = open_fs(bucket, tmp_path, consistency="immutable", cache_dir=str(tmp_path / "other"))
    assert fs.cat_file(path) == DATA[::-1]


def test_a_filesystem_that_is_dropped_closes_its_cache(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"some bytes")
    gc.disable()
    try:
        fs = fsspec.filesystem(
            "tiercache", target_protocol="file", skip_instance_cache=True, cache_dir=str(tmp_path / "c")
        )
        assert fs.cat_file(str(tmp_path / "x.bin")) == b"some bytes"
        assert [*(tmp_path / "c" / "tmp").iterdir()]
        del fs
        assert not [*(tmp_path / "c" / "tmp").iterdir()]
    finally:
        gc.enable()

"""Engines: they fetch the same bytes, report why they were chosen, and survive faults."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ALL_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attempts import fail_at_once
from botocore.exceptions import CredentialRetrievalError
from fsspec.implementations.memory import MemoryFileSystem
from http_servers import serving

from dataload import make_dataset
from dataload.benchmarks.origin import Origin as Server
from dataload.benchmarks.origin import s3
from dataload.benchmarks.origin.s3 import resolve_range
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache import reports
from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin import obstore, translation
from dataload.cache.origin import s3 as s3_store
from dataload.cache.origin.credentials import Credentials
from dataload.cache.origin.errors import UnsuitableError, is_transient
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import version_of
from dataload.errors import ConfigError, ObjectChanged, OriginError, OriginNotFound

ENGINES = ("obstore", "fsspec")
BLOCK = 64 << 10
DATA = np.random.default_rng(5).bytes(3 * BLOCK + 17)


def open_fs(cache_dir: Path, options: dict[str, Any], **arguments: Any) -> TierCacheFileSystem:
    given = {"cache_dir": str(cache_dir), "block_bytes": BLOCK, "skip_instance_cache": True} | arguments
    return fsspec.filesystem("tiercache", target_protocol="s3", target_options=options, **given)


@pytest.fixture(autouse=True)
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log each warning of `reports` again."""
    monkeypatch.setattr(reports, "_reported", set())


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_move_the_same_bytes_and_are_named(bucket: Any, tmp_path: Path, engine: str) -> None:
    bucket.put("a b/ü+x.bin", DATA)
    fs = open_fs(tmp_path, bucket.options, engine=engine)
    assert fs.cat_file(bucket.url("a b/ü+x.bin")) == DATA
    stats = fs.stats()
    assert (stats["engine"], stats["engine_reason"]) == (engine, "requested")
    assert stats["bytes_origin"] == len(DATA)


def test_auto_takes_obstore(bucket: Any, tmp_path: Path) -> None:
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options)
    assert fs.cat_file(bucket.url("x")) == DATA
    assert fs.stats()["engine"] == "obstore"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"profile": "work"}, "s3fs was given profile"),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, "s3fs was given s3 in config_kwargs"),
        ({"client_kwargs": {"verify": False, "region_name": "us-east-1"}}, "s3fs was given verify in client_kwargs"),
        ({"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}}, "s3fs was given s3_additional_kwargs"),
    ],
)
def test_what_obstore_cannot_be_told_is_left_to_s3fs(
    options: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        fs = open_fs(tmp_path, options)
        assert (fs.stats()["engine"], fs.stats()["engine_reason"]) == ("fsspec", reason)
    open_fs(tmp_path, options, engine="fsspec").stats()
    [warning] = [record.getMessage() for record in caplog.records if record.name == reports.__name__]
    assert f"{reason}; omit those options, or " in warning
    with pytest.raises(ConfigError, match=f"engine='obstore' cannot be used: {reason}"):
        open_fs(tmp_path, options, engine="obstore").stats()


def test_other_stores_are_read_by_their_filesystem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fs = fsspec.filesystem("tiercache", target_protocol="memory", cache_dir=str(tmp_path))
    assert fs.stats()["engine"] == "fsspec"
    assert fs.stats()["engine_reason"] == "obstore reads no memory://"
    assert not caplog.records


def in_a_child(work: Callable[[], bytes]) -> bytes:
    """Return the result of `work` in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_does_without_obstore(bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The child lacks the threads: a request would hang."""
    bucket.put("x", DATA)
    bucket.put("y", DATA[::-1])
    fs = open_fs(tmp_path, bucket.options)
    assert fs.cat_file(bucket.url("x")) == DATA

    def work() -> bytes:
        right = fs.cat_file(bucket.url("y")) == DATA[::-1]
        said = [record.getMessage() for record in caplog.records]
        return f"{right} {fs.stats()['engine']} {'forkserver' in str(said)}".encode()

    assert in_a_child(work) == b"True fsspec True"
    assert fs.stats()["engine"] == "obstore"


def test_a_forked_child_never_lets_go_of_a_store(bucket: Any, tmp_path: Path) -> None:
    """The destructor would wait for the parent's threads."""
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options)
    assert fs.cat_file(bucket.url("x")) == DATA
    engine = fs.blocks.origin.engine
    [store] = engine._stores.values()
    held = sys.getrefcount(store)
    assert in_a_child(lambda: str(sys.getrefcount(store) - held).encode()) == b"1"


def open_with_session(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, key: bool = True) -> Any:
    """Return a filesystem without an explicit key, whose session finds credentials, in the environment if `key`."""
    for name, value in {"AWS_ACCESS_KEY_ID": "from-the-environment", "AWS_SECRET_ACCESS_KEY": "a-secret"}.items():
        if key:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    options = {name: value for name, value in bucket.options.items() if name not in ("key", "secret")}
    return open_fs(tmp_path, options, engine="obstore")


def test_static_credentials_of_the_session_are_used(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("x", DATA)
    asked = record_credentials(monkeypatch)
    fs = open_with_session(bucket, tmp_path, monkeypatch)
    assert fs.cat_file(bucket.url("x")) == DATA
    assert [(each["access_key_id"], each["expires_at"]) for each in asked] == [("from-the-environment", None)]


@pytest.mark.parametrize("minutes", [2, 60])
def test_credentials_of_a_role_are_fetched_once_and_not_for_each_request(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """Also if they expire soon because the service that renews them is down."""
    bucket.put("x", DATA)
    monkeypatch.setattr(_Role, "requests", 0)
    with serving(_Role) as url:
        _Role.lifetime = timedelta(minutes=minutes)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        fs = open_with_session(bucket, tmp_path, monkeypatch, key=False)
        path = fs.blocks.origin.path_of(bucket.url("x"))
        version = version_of(fs.blocks.origin.info(path))
        began = time.monotonic()
        before = _Role.requests
        while time.monotonic() < began + 0.5:  # obstore asks at most ten times a second.
            assert fs.blocks.origin.read(path, 0, 10, version) == DATA[:10]
    assert _Role.requests <= before + 2


def test_a_failed_request_for_credentials_is_retried(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("x", DATA)
    ask, failures = Credentials.__call__, [CredentialRetrievalError(provider="iam-role", error_msg="busy")]

    def fail_once(self: Credentials) -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return ask(self)

    monkeypatch.setattr(Credentials, "__call__", fail_once)
    fs = open_with_session(bucket, tmp_path, monkeypatch)
    assert fs.cat_file(bucket.url("x")) == DATA
    assert not failures


def record_credentials(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that receives what obstore is given whenever it asks for credentials."""
    asked: list[dict[str, Any]] = []
    ask = Credentials.__call__
    monkeypatch.setattr(Credentials, "__call__", lambda self: asked.append(ask(self)) or asked[-1])
    return asked


def test_credentials_of_the_session_are_not_pickled(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("x", DATA)
    fs = open_with_session(bucket, tmp_path, monkeypatch)
    assert fs.cat_file(bucket.url("x")) == DATA
    assert b"a-secret" not in pickle.dumps(fs.blocks.origin)


def test_received_credentials_are_used_until_they_are_renewed() -> None:
    told = SimpleNamespace(key="new", secret="s", token=None)
    lifetimes = (timedelta(minutes=1), timedelta(0))
    received = [{"access_key_id": "old", "expires_at": datetime.now(UTC) + lifetime} for lifetime in lifetimes]
    found = [Credentials(lambda: told, each)()["access_key_id"] for each in received]
    assert found == ["old", "new"]


def test_a_filesystem_that_was_received_renews_credentials(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no session before its first request."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=bucket.options["endpoint_url"])
    monkeypatch.setattr(_Role, "lifetime", timedelta(hours=1))
    expired = {"access_key_id": "old", "expires_at": datetime.now(UTC)}
    with serving(_Role) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        assert Credentials(lambda: filesystem, expired)()["access_key_id"] == "of-the-role"


def test_anonymous_requests_are_not_signed(bucket: Any, tmp_path: Path) -> None:
    bucket.put("x", DATA)
    bucket.client.put_object_acl(Bucket=bucket.name, Key="x", ACL="public-read")
    options = {name: value for name, value in bucket.options.items() if name not in ("key", "secret")}
    fs = open_fs(tmp_path, options | {"anon": True}, engine="obstore")
    assert fs.cat_file(bucket.url("x")) == DATA


def put_versions(bucket: Any, key: str, *contents: bytes) -> list[str]:
    """Store versions of an object. Return their names."""
    bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    return [bucket.client.put_object(Bucket=bucket.name, Key=key, Body=data)["VersionId"] for data in contents]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_version_that_is_named_is_read(bucket: Any, tmp_path: Path, engine: str) -> None:
    old, _ = put_versions(bucket, "x", DATA, DATA[::-1])
    fs = open_fs(tmp_path, bucket.options | {"version_aware": True}, engine=engine)
    assert fs.cat_file(f"{bucket.url('x')}?versionId={old}") == DATA
    assert fs.cat_file(bucket.url("x"), version_id=old) == DATA
    with fs.open(bucket.url("x"), version_id=old) as file:
        assert file.read() == DATA
    assert fs.cat_file(bucket.url("x")) == DATA[::-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_each_call_takes_a_version(bucket: Any, tmp_path: Path, engine: str) -> None:
    old, _ = put_versions(bucket, "x", DATA, DATA[::-1] + b"longer")
    fs, path = open_fs(tmp_path, bucket.options | {"version_aware": True}, engine=engine), f"{bucket.name}/x"
    assert fs.cat(path, version_id=old) == DATA
    assert fs.cat([path], version_id=old) == {path: DATA}
    assert fs.cat_ranges([path], 5, 9, version_id=old) == [DATA[5:9]]
    fs.get(path, str(tmp_path / "got"), version_id=old)
    fs.get_file(path, str(tmp_path / "got_file"), version_id=old)
    assert (tmp_path / "got").read_bytes() == (tmp_path / "got_file").read_bytes() == DATA
    assert fs.info(path, version_id=old)["size"] == len(DATA)
    bucket.client.delete_object(Bucket=bucket.name, Key="x")
    fs.invalidate_cache()
    assert (fs.exists(path), fs.exists(path, version_id=old)) == (False, True)


@pytest.mark.parametrize("engine", ENGINES)
def test_listings_of_a_version_name_it(bucket: Any, tmp_path: Path, engine: str) -> None:
    """Under the name of the object alone, its newest version would be read."""
    old, _ = put_versions(bucket, "x", DATA, DATA[::-1])
    fs = open_fs(tmp_path, bucket.options | {"version_aware": True}, engine=engine)
    path = f"{bucket.name}/x?versionId={old}"
    assert [fs.find(path), fs.glob(path), fs.info(path)["name"]] == [[path], [path], path]
    fs.prefetch(path, wait=True)
    assert fs.stats()["bytes_origin"] == len(DATA)
    assert fs.cat_file(path) == DATA
    assert fs.stats()["bytes_origin"] == len(DATA)
    assert fs.cat_file(bucket.url("x")) == DATA[::-1]


def test_a_version_is_not_replaced_by_the_newest_one(bucket: Any, tmp_path: Path) -> None:
    old, _ = put_versions(bucket, "x", DATA, DATA[::-1])
    fs = open_fs(tmp_path, bucket.options)
    path = bucket.url(f"x?versionId={old}")
    requests: list[Callable[[], Any]] = [
        *(lambda call=call: call(path) for call in (fs.open, fs.cat_file, fs.info, fs.find, fs.ls, fs.prefetch)),
        *(lambda call=call: call(bucket.url("x"), version_id=old) for call in (fs.open, fs.info, fs.exists, fs.cat)),
        lambda: fs.cat([bucket.url("x")], version_id=old),
        lambda: fs.cat_ranges([bucket.url("x")], 0, 9, on_error="raise", version_id=old),
        lambda: fs.get(bucket.url("x"), str(tmp_path / "got"), version_id=old),
    ]
    for request in requests:
        with pytest.raises(ConfigError, match=rf"x\?versionId={old} names a version.*: pass version_aware=True"):
            request()


@pytest.mark.parametrize("options", [{}, {"version_aware": True}])
def test_a_dataset_of_versions(bucket: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Beside objects without a version, also as the second URL."""
    tables = [io.BytesIO() for _ in range(3)]
    for number, table in enumerate(tables):
        pq.write_table(pa.table({"n": [number]}), table)
    first, second, other = (table.getvalue() for table in tables)
    old, _ = put_versions(bucket, "x.parquet", first, second)
    bucket.put("y.parquet", other)
    version = bucket.url(f"x.parquet?versionId={old}")
    for source, expected in {
        version: [0],
        (bucket.url("y.parquet"), version): [0, 2],
        (bucket.url("x.parquet"), version): [1, 0],
    }.items():
        source = source if isinstance(source, str) else list(source)
        given = {"storage_options": bucket.options | options, "cache_dir": str(tmp_path), "cache_bytes": "100MB"}
        dataset = make_dataset(source, **given)
        assert [dataset[number]["n"] for number in range(dataset.num_rows)] == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_an_object_that_was_replaced_is_named(bucket: Any, tmp_path: Path, engine: str) -> None:
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options, engine=engine)
    assert fs.cat_file(bucket.url("x"), end=10) == DATA[:10]
    bucket.put("x", DATA[::-1])
    with pytest.raises(ObjectChanged, match=f"{bucket.name}/x"):
        fs.cat_file(bucket.url("x"))


@pytest.mark.parametrize("key", ["a//b", "a/./b", "/x", "tab\there"])
def test_a_name_that_obstore_would_change_is_read_by_s3fs(bucket: Any, tmp_path: Path, key: str) -> None:
    bucket.put(key, DATA)
    bucket.put("x", DATA[::-1])
    fs = open_fs(tmp_path, bucket.options)
    assert fs.cat_file(f"{bucket.name}/{key}") == DATA
    assert fs.stats()["engine"] == "obstore", "others are still read by it"


def test_the_environment_changes_nothing_that_s3fs_was_told(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Obstore reads the environment, too, with a higher precedence."""
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options, engine="obstore")
    fs.info(bucket.url("x"))
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_SESSION_TOKEN": "another's",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_SKIP_SIGNATURE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    assert fs.cat_file(bucket.url("x")) == DATA
    assert fs.stats()["engine"] == "obstore"


class _Told:
    """A stand-in for s3fs: the settings that botocore resolved, and a response to HeadBucket."""

    def __init__(self, endpoint_url: str, answer: Any) -> None:
        self.answer = answer
        self.s3 = SimpleNamespace(meta=SimpleNamespace(endpoint_url=endpoint_url, region_name=None, config=None))
        self.s3.meta.config = SimpleNamespace(s3=None, proxies=None)
        self.session = SimpleNamespace(get_config_variable=lambda _: None)
        self.req_kw: dict[str, str] = {}
        self.anon, self.key, self.secret, self.token = False, "key", "secret", None

    def connect(self) -> None:
        pass

    def call_s3(self, _: str, **__: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def refusal(headers: dict[str, str]) -> PermissionError:
    error = PermissionError("Forbidden")
    error.__cause__ = Exception()
    error.__cause__.response = {"ResponseMetadata": {"HTTPHeaders": headers}}  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("endpoint_url", "answer", "host"),
    [
        (
            "https://s3.amazonaws.com",
            {"ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": "eu-west-1"}}},
            "eu-west-1",
        ),
        ("https://s3.us-east-2.amazonaws.com", refusal({"x-amz-bucket-region": "ap-south-1"}), "ap-south-1"),
        ("https://s3.amazonaws.com", refusal({}), "us-east-1"),
        ("https://bucket.vpce-1a.s3.us-east-1.vpce.amazonaws.com", None, None),
        ("http://minio:9000", None, None),
    ],
)
def test_a_bucket_is_asked_for_where_it_lies(endpoint_url: str, answer: Any, host: str | None) -> None:
    """On AWS the store uses the bucket's region, even if access is denied; elsewhere the configured endpoint."""
    settings = s3_store.settings(_Told(endpoint_url, answer), "b")
    expected = f"https://s3.{host}.amazonaws.com" if host else endpoint_url
    assert settings["endpoint"] == expected


class _Regional(http.server.BaseHTTPRequestHandler):
    """A store that is overloaded once, and then names the region of its bucket."""

    requests = 0

    def do_HEAD(self) -> None:
        type(self).requests += 1
        self.send_response(503 if self.requests == 1 else 200)
        if self.requests > 1:
            self.send_header("x-amz-bucket-region", "eu-west-1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_an_overloaded_store_decides_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong region would fail all later requests of the process."""
    monkeypatch.setattr(s3_store, "AMAZON", re.compile(".*"))
    monkeypatch.setattr(_Regional, "requests", 0)
    with serving(_Regional) as url:
        options = s3.storage_options(url) | {"config_kwargs": {"retries": {"max_attempts": 0}}}
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        engine = obstore.Obstore(lambda: filesystem, "")
        with pytest.raises(OSError, match="Service Unavailable") as raised:
            engine._store("bucket")
        assert is_transient(raised.value), "the request is repeated"
        engine._store("bucket")
    assert engine._settings["bucket"]["endpoint"] == "https://s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize("setting", ["addressing_style", "use_accelerate_endpoint", "proxies"])
def test_what_only_botocore_was_told_is_left_to_it(setting: str) -> None:
    told = _Told("http://minio:9000", None)
    if setting == "proxies":
        told.s3.meta.config.proxies = {"http": "http://proxy"}
    else:
        told.s3.meta.config.s3 = {setting: "virtual" if setting == "addressing_style" else True}
    with pytest.raises(UnsuitableError, match=setting):
        s3_store.settings(told, "b")
    with pytest.raises(UnsuitableError, match="arn:aws"):
        s3_store.settings(_Told("http://minio:9000", None), "arn:aws:s3:::x")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_object_that_is_gone_and_a_bucket_that_is_none(bucket: Any, tmp_path: Path, engine: str) -> None:
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options, engine=engine)
    fs.info(bucket.url("x"))
    bucket.client.delete_object(Bucket=bucket.name, Key="x")
    with pytest.raises(FileNotFoundError, match=r"is gone from http.*restore it, or start the program again"):
        fs.cat_file(bucket.url("x"))


# Ahead


def test_only_what_is_not_kept_is_fetched_ahead(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options)
    fs.cat_file(bucket.url("x"), start=BLOCK, end=BLOCK + 1)
    asked: list[tuple[int, int]] = []
    read_into = fs.blocks.origin.read_into

    def noting(room: memoryview, path: str, start: int, version: str) -> None:
        asked.append((start, start + len(room)))
        read_into(room, path, start, version)

    monkeypatch.setattr(fs.blocks.origin, "read_into", noting)
    fs.prefetch(bucket.url("x"), wait=True)
    assert sorted(asked) == [(0, BLOCK), (2 * BLOCK, 3 * BLOCK), (3 * BLOCK, len(DATA))]
    assert fs.cat_file(bucket.url("x")) == DATA


def test_two_that_fetch_ahead_fetch_once(bucket: Any, tmp_path: Path) -> None:
    for number in range(6):
        bucket.put(f"many/{number}", DATA[number:])
    bucket.server.reset()
    one, other = (open_fs(tmp_path, bucket.options) for _ in range(2))
    one.prefetch(bucket.url("many"))
    other.prefetch(bucket.url("many"), wait=True)
    one.prefetch(bucket.url("many"), wait=True)
    assert bucket.server.stats()["get_bytes"] == sum(len(DATA[number:]) for number in range(6))


def test_a_block_that_fails_keeps_nothing_and_is_asked_for_again(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise OriginError("down")

        patch.setattr(fs.blocks.origin, "read_into", fails)
        with pytest.raises(OriginError, match="down"):
            fs.prefetch(bucket.url("x"), wait=True)
    assert list(tmp_path.glob("blobs/*/*")) == []
    fs.prefetch(bucket.url("x"), wait=True)
    assert fs.cat_file(bucket.url("x")) == DATA


def test_one_block_that_fails_ends_the_read_of_many(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the others may take a minute to fail."""
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options, block_bytes=4096)
    started, are_cancelled = list[int](), threading.Event()

    def fails(_memory: memoryview, _path: str, start: int, _version: str) -> None:
        started.append(start)
        if start:
            are_cancelled.wait(200)
        raise OriginError("down")

    def waiting(futures: Any, timeout: float, return_when: str = ALL_COMPLETED) -> Any:
        if return_when == ALL_COMPLETED:
            are_cancelled.set()
        return wait(futures, timeout, return_when)

    monkeypatch.setattr(fs.blocks.origin, "read_into", fails)
    monkeypatch.setattr("dataload.cache.blocks.reader.wait", waiting)
    with pytest.raises(OriginError, match="down"):
        fs.cat_file(bucket.url("x"))
    assert len(started) <= IN_FLIGHT + 1 < len(DATA) // 4096


def test_no_more_requests_are_under_way_than_agreed(slow_store: Server, tmp_path: Path) -> None:
    fs = open_fs(tmp_path / "c", s3.storage_options(slow_store.endpoint_url), block_bytes=4096, engine="fsspec")
    origin, busy, most = fs.blocks.origin, [], []
    parts = origin.engine.parts

    def counting(*asked: Any) -> Any:
        busy.append(asked)
        most.append(len(busy))
        try:
            yield from parts(*asked)
        finally:
            busy.pop()

    origin.engine.parts = counting
    fs.prefetch([f"{BUCKET}/{number}.bin" for number in range(8)], wait=True)
    assert 2 <= max(most) <= IN_FLIGHT


def test_who_waits_for_the_origin_hears_a_signal(slow_store: Server, tmp_path: Path) -> None:
    fs = open_fs(tmp_path / "c", s3.storage_options(slow_store.endpoint_url), engine="obstore")
    fs.ls(BUCKET)
    slow_store.behave(stalled=1.0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            fs.cat_file(f"{BUCKET}/0.bin", end=10)
    finally:
        signal.signal(signal.SIGALRM, before)
        slow_store.behave(stalled=0.0)


# On a bad day


@pytest.fixture
def slow_store(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "objects" / BUCKET
    folder.mkdir(parents=True)
    for number in range(8):
        (folder / f"{number}.bin").write_bytes(DATA[number:])
    with Server(tmp_path / "objects") as server:
        yield server


@pytest.mark.variants
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", ["slow_down", "reset", "short", "all"])
def test_faults_in_passing_change_no_byte(
    slow_store: Server, tmp_path: Path, engine: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.cache.origin.retries.FIRST_PAUSE", 0.001)
    odds = dict.fromkeys(("slow_down", "reset", "short"), 0.1) if fault == "all" else {fault: 0.3}
    fs = open_fs(tmp_path / "c", s3.storage_options(slow_store.endpoint_url), engine=engine)
    fs.ls(BUCKET)
    slow_store.behave(**odds, seed=3)
    names = [f"{BUCKET}/{number}.bin" for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fs.cat_file, names)) == [DATA[number:] for number in range(8)]
    blocks = sum(-(-len(DATA[number:]) // BLOCK) for number in range(8))
    assert blocks <= fs.stats()["requests_origin"] < 3 * blocks  # botocore answers a SlowDown itself


@pytest.mark.variants
@pytest.mark.parametrize("engine", ENGINES)
def test_an_origin_that_stays_down_is_one_error(
    slow_store: Server, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.cache.origin.origin.RETRY_SECONDS", 2)
    monkeypatch.setattr("dataload.cache.origin.retries.FIRST_PAUSE", 0.001)
    fs = open_fs(tmp_path / "c", s3.storage_options(slow_store.endpoint_url), engine=engine)
    fs.ls(BUCKET)
    slow_store.behave(reset=1.0)
    with pytest.raises(OriginError, match=rf"{BUCKET}/0\.bin bytes 0-9: ") as raised:
        fs.blocks.origin.read(f"{BUCKET}/0.bin", 0, 10, fs.ukey(f"{BUCKET}/0.bin"))
    assert "\n" not in str(raised.value)
    stats = fs.stats()
    assert stats["retries_origin"] == stats["requests_origin"] - 1 > 0


def test_a_body_that_stalls_is_asked_for_again(
    slow_store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation, "STALL_SECONDS", 1)
    fs = open_fs(tmp_path / "c", s3.storage_options(slow_store.endpoint_url), engine="obstore")
    fs.ls(BUCKET)
    slow_store.behave(stalled=0.5, seed=1)
    assert fs.cat_file(f"{BUCKET}/0.bin") == DATA
    assert fs.stats()["requests_origin"] > 4


class _Whole(http.server.BaseHTTPRequestHandler):
    """A store that ignores Range."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(DATA)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class _Refusing(_Whole):
    """A store that answers metadata requests and fails all reads."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(400)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Denying(_Whole):
    """A server that denies all requests."""

    def do_HEAD(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()


class _Role(http.server.BaseHTTPRequestHandler):
    """The service that gives a container its credentials."""

    lifetime = timedelta()
    requests = 0

    def do_GET(self) -> None:
        _Role.requests += 1
        until = (datetime.now(UTC) + self.lifetime).isoformat()
        answer = {"AccessKeyId": "of-the-role", "SecretAccessKey": "s", "Token": "t", "Expiration": until}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_store_has_decided_is_not_asked_for_again(tmp_path: Path, engine: str) -> None:
    refusing = type("Refusing", (_Refusing,), {})
    with serving(refusing) as url:
        fs = open_fs(tmp_path, s3.storage_options(url), engine=engine)
        with pytest.raises(OriginError, match=r"bucket/x bytes [0-9-]+: .*Bad Request"):
            fs.cat_file("bucket/x")
    assert 1 <= refusing.asked <= 8  # for each block at most once with If-Match, and once without


def test_who_is_not_let_in_is_told_so_and_not_that_nothing_is_there() -> None:
    with serving(_Denying) as url, pytest.raises(OriginError, match="denied access, check the credentials") as raised:
        Origin(fsspec.filesystem("http", skip_instance_cache=True)).info(f"{url}/x")
    assert not isinstance(raised.value, OriginNotFound)


@pytest.mark.parametrize("cause", [OSError("it does not exist"), None])
def test_what_other_clients_do_not_find_is_not_there(cause: OSError | None) -> None:
    """HTTP raises it for every error; other filesystems raise it, with a cause, only for missing objects."""
    error = FileNotFoundError("bucket/x")
    error.__cause__ = cause
    with pytest.raises(OriginNotFound), Origin(fsspec.filesystem("memory")).map_errors("bucket/x"):
        raise error


@pytest.mark.variants
@pytest.mark.parametrize(
    "error", [UnicodeDecodeError("utf-8", b"", 0, 1, "no text"), json.JSONDecodeError("no", "", 0)]
)
def test_a_strange_answer_is_no_wrong_option(monkeypatch: pytest.MonkeyPatch, error: ValueError) -> None:
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0)

    def answer(_: Any) -> Any:
        raise error

    with pytest.raises(OriginError):
        Origin(fsspec.filesystem("memory")).metadata("bucket/x", answer)


@pytest.mark.parametrize("size", [777, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_parts_of_any_size_come_to_lie_where_they_belong(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    bucket.put("x", DATA)
    fs = open_fs(tmp_path, bucket.options)

    def parts(path: str, start: int, stop: int, version: str, seconds: float) -> Iterator[bytes]:
        return (DATA[at : min(at + size, stop)] for at in range(start, stop, size))

    monkeypatch.setattr(fs.blocks.origin.engine, "parts", parts)
    fs.prefetch(bucket.url("x"), wait=True)
    assert fs.cat_file(bucket.url("x")) == DATA


@pytest.mark.parametrize("came", [9, 11])
def test_a_range_that_is_read_alone_is_as_long_as_asked_for(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: int
) -> None:
    fail_at_once(monkeypatch)
    bucket.put("x", DATA)
    origin = open_fs(tmp_path, bucket.options).blocks.origin
    monkeypatch.setattr(origin.engine, "parts", lambda *_: [b"x" * came])
    with pytest.raises(OriginError, match=f"{came} bytes came instead of 10"):
        origin.read(bucket.url("x"), 0, 10, "any")


class _Endless(_Whole):
    """A server that sends a whole large object for each range, as fast as the client reads."""

    size = 64 << 20
    status = 200
    asked = sent = 0

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        super().setup()

    def do_GET(self) -> None:
        type(self).asked += 1
        self.do_HEAD()
        with suppress(ConnectionError):
            for first in range(0, self.size, BLOCK):
                self.wfile.write(self.block(first // BLOCK))
                type(self).sent += BLOCK

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        self.send_header("Content-Length", str(self.size))
        self.end_headers()

    @staticmethod
    def block(number: int) -> bytes:
        return number.to_bytes(8) * (BLOCK // 8)


@contextmanager
def without_ranges(kind: str, cache_dir: Path, block_bytes: int) -> Iterator[tuple[TierCacheFileSystem, str]]:
    """Yield an "s3" or "http" filesystem of a store that ignores Range, and the path of its object."""
    _Endless.asked = _Endless.sent = 0
    with serving(_Endless) as url:
        if kind == "s3":
            fs = open_fs(cache_dir, s3.storage_options(url), block_bytes=block_bytes)
            yield fs, "bucket/x"
            fs.fs.close_session(fs.fs.loop, fs.fs.s3)
        else:
            target = fsspec.filesystem("http", skip_instance_cache=True)
            given = {"cache_dir": str(cache_dir), "block_bytes": block_bytes, "skip_instance_cache": True}
            yield TierCacheFileSystem(fs=target, **given), f"{url}/x"
            target.close_session(target.loop, target._session)


SLACK = 8 << 20  # what lies in the buffers of connections when they are closed


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_a_store_that_ignores_ranges_is_read_to_the_end_of_the_range(tmp_path: Path, kind: str) -> None:
    size = 2 * BLOCK
    with without_ranges(kind, tmp_path, size) as (fs, path):
        for first in (0, size):
            blocks = _Endless.block(first // BLOCK) + _Endless.block(first // BLOCK + 1)
            assert fs.cat_file(path, first, first + size) == blocks
        assert _Endless.asked <= 3, "each block once, and once by an engine that cannot read it"
        assert fs.stats()["bytes_origin"] == 2 * size
        with pytest.raises(OriginError, match=rf"x bytes {2 * size}-{3 * size - 1}: the store ignores Range"):
            fs.cat_file(path, 2 * size, 3 * size)
        assert _Endless.asked <= 4, "the store will not change its mind"
    assert _Endless.sent < 3 * size + SLACK < _Endless.size // 4
    if kind == "s3":
        why = "the store answers a range with the whole object, which obstore rejects"
        assert fs.stats()["engine_reason"] == why


class _Compressing(_Whole):
    """A server that compresses answers for clients that accept it, as nginx does. Such answers have no ranges."""

    methods: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.methods.append(self.command)
        compressed = "gzip" in self.headers.get("Accept-Encoding", "")
        span = None if compressed else resolve_range(self.headers.get("Range", ""), len(DATA))
        body = gzip.compress(DATA) if compressed else DATA
        self.send_response(206 if span else 200)
        self.send_header("ETag", 'W/"one"' if compressed else '"one"')
        if compressed:
            self.send_header("Content-Encoding", "gzip")
        if span:
            body = DATA[span.start : span.stop]
            self.send_header("Content-Range", f"bytes {span.start}-{span.stop - 1}/{len(DATA)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 (http.server finds the method by this name)


def test_a_server_that_compresses_answers_is_read_by_ranges(tmp_path: Path) -> None:
    _Compressing.methods.clear()
    target = fsspec.filesystem("http", skip_instance_cache=True)
    given = {"cache_dir": str(tmp_path), "block_bytes": BLOCK, "skip_instance_cache": True}
    fs = TierCacheFileSystem(fs=target, **given)
    with serving(_Compressing) as url:
        assert fs.cat_file(f"{url}/x") == DATA
        target.close_session(target.loop, target._session)
    assert _Compressing.methods == ["HEAD", "GET", "GET", "GET", "GET"]


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_reading_many_blocks_does_not_read_as_many_objects(tmp_path: Path, kind: str) -> None:
    size = 4 << 20
    with without_ranges(kind, tmp_path, size) as (fs, path):
        with pytest.raises(OriginError, match="ignores Range"):
            fs.cat_file(path)
        asked = _Endless.asked
        assert asked <= 2 * _Endless.size // size
    assert _Endless.sent < 2 * _Endless.size, "a block read costs no object"


def test_a_client_that_returns_more_than_a_range_is_asked_once(tmp_path: Path) -> None:
    class Generous(MemoryFileSystem):
        protocol = "generous"
        cachable = False
        asked = 0

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
            type(self).asked += 1
            return super().cat_file(path)

    generous = Generous()
    generous.pipe_file("/generous/x", DATA)
    with pytest.raises(OriginError, match="/generous/x bytes 0-9: the store ignores Range"):
        Origin(generous).read("/generous/x", 0, 10, version_of(generous.info("/generous/x")))
    assert Generous.asked == 1

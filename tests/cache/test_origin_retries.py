"""Failed requests of all stores: which are repeated, for how long, and what the log and the errors say."""

from __future__ import annotations

import ftplib
import http.client
import http.server
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

import fsspec
import pytest
from aiohttp import ClientTimeout
from attempts import fail_at_once
from azure.core.exceptions import HttpResponseError, IncompleteReadError, ServiceRequestError
from fsspec.implementations.memory import MemoryFileSystem
from http_servers import serving

from dataload.benchmarks.origin import Origin as Server
from dataload.benchmarks.origin import listing, s3
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache import reports
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin.deferred_s3 import DeferredS3
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import version_of
from dataload.errors import OriginError

PATH = "/retries/x"
DATA = bytes(range(100))


class Failing(MemoryFileSystem):
    """A store whose next `failures` requests for bytes raise `error`."""

    error: Exception = OSError()
    failures = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if Failing.failures:
            Failing.failures -= 1
            raise Failing.error
        return super().cat_file(path, start=start, end=end)


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> Origin:
    monkeypatch.setattr("dataload.cache.origin.retries.FIRST_PAUSE", 0.0001)
    monkeypatch.setattr(reports, "_reported", set())
    store = Failing(skip_instance_cache=True)
    store.pipe_file(PATH, DATA)
    return Origin(store)


def read(origin: Origin) -> bytes:
    info = MemoryFileSystem().info(PATH)
    return bytes(origin.read(PATH, 10, 20, version_of(info)))


def fail(error: Exception, failures: int) -> None:
    Failing.error, Failing.failures = error, failures


def azure_error(status: int) -> HttpResponseError:
    error = HttpResponseError("the answer")
    error.status_code = status
    return error


class OfAPlugin(Exception):
    """An error of an unknown client."""


@pytest.mark.parametrize(
    "error",
    [
        ServiceRequestError("no connection"),
        IncompleteReadError("a part of the body"),
        azure_error(503),
        ftplib.error_temp("421 too many connections"),
        http.client.IncompleteRead(b""),
        EOFError("the server closed the connection"),
        OfAPlugin("429 in its own words"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_any_client_is_retried_and_names_the_range(
    origin: Origin, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail(error, 2)
    assert read(origin) == DATA[10:20]
    assert origin.stats()["retries"] == 2
    fail_at_once(monkeypatch)
    fail(error, 1)
    with pytest.raises(OriginError, match=rf"{PATH} bytes 10-19: memory:// failed: {type(error).__name__}: ") as raised:
        read(origin)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("protocol", ["memory", "s3"])
def test_an_error_that_is_its_own_cause_is_raised(protocol: str) -> None:
    """Some libraries raise an error from itself."""
    error = OSError("the answer")
    with pytest.raises(OriginError, match="the answer") as raised, Origin(fsspec.filesystem(protocol)).map_errors(PATH):
        raise error from error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [azure_error(400), ftplib.error_perm("550 no such file"), IsADirectoryError("x")])
def test_an_error_that_lasts_is_raised_at_once(origin: Origin, error: Exception) -> None:
    fail(error, 2)
    with pytest.raises(OriginError, match=rf"{PATH} bytes 10-19: "):
        read(origin)
    assert Failing.failures == 1


@pytest.mark.parametrize("kind", [TypeError, AttributeError, KeyError, AssertionError, NotImplementedError])
def test_a_bug_is_not_an_error_of_the_store(origin: Origin, kind: type[Exception]) -> None:
    fail(kind("a bug"), 1)
    with pytest.raises(kind, match="a bug"):
        read(origin)


def test_a_store_that_has_never_answered_is_given_up_early(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address may be wrong. An outage of a store that has answered is outlasted, also by copies of the origin."""
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0)
    fail(ConnectionRefusedError("down"), 8)
    with pytest.raises(OriginError, match="down"):
        read(origin)
    assert Failing.failures == 7
    fail(azure_error(503), 8)
    assert read(origin) == DATA[10:20]
    for known in (origin, pickle.loads(pickle.dumps(origin))):
        fail(ConnectionRefusedError("down"), 8)
        assert read(known) == DATA[10:20]


def test_each_kind_of_error_is_logged_once(origin: Origin, caplog: pytest.LogCaptureFixture) -> None:
    for status in (503, 503, 429):
        fail(azure_error(status), 2)
        read(origin)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["memory:// failed: HttpResponseError: the answer; retrying for up to 60 s"] * 2


def test_throttling_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_once(monkeypatch)
    (tmp_path / BUCKET).mkdir()
    (tmp_path / BUCKET / "x").write_bytes(DATA)
    with Server(tmp_path) as server:
        store = Origin(fsspec.filesystem("s3", skip_instance_cache=True, **s3.storage_options(server.endpoint_url)))
        version = version_of(store.info(f"{BUCKET}/x"))
        server.behave(slow_down=1.0)
        with pytest.raises(OriginError, match=r"SlowDown.*: lower in_flight of CacheConfig"):
            store.read(f"{BUCKET}/x", 0, 10, version)


class _FlakyHead(http.server.BaseHTTPRequestHandler):
    """A server whose first answer says that it is overloaded."""

    requests = 0

    def do_HEAD(self) -> None:
        type(self).requests += 1
        self.send_response(503 if self.requests == 1 else 200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(DATA)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def flaky_url() -> Iterator[str]:
    _FlakyHead.requests = 0
    with serving(_FlakyHead) as url:
        yield f"{url}/x"


@pytest.mark.parametrize("call", ["info", "list"])
def test_requests_for_metadata_are_retried(flaky_url: str, call: str) -> None:
    store = Origin(fsspec.filesystem("http", skip_instance_cache=True))
    found = getattr(store, call)(flaky_url)
    info = found if call == "info" else found[flaky_url]
    assert info["size"] == len(DATA)


class _Hanging(_FlakyHead):
    """A server that does not answer the first requests before `released` is set."""

    hanging = 2
    released = threading.Event()

    def do_HEAD(self) -> None:
        if self.hanging:
            type(self).hanging -= 1
            self.released.wait(200)
            self.close_connection = True
            return
        _FlakyHead.requests = 1
        super().do_HEAD()


def test_a_request_for_a_size_that_times_out_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem reports it as a missing object."""
    monkeypatch.setattr(_Hanging, "hanging", 2)
    filesystem = fsspec.filesystem(
        "http", client_kwargs={"timeout": ClientTimeout(total=0.5)}, skip_instance_cache=True
    )
    with serving(_Hanging) as url:
        try:
            assert Origin(filesystem).info(f"{url}/x")["size"] == len(DATA)
        finally:
            _Hanging.released.set()
    assert _Hanging.hanging == 0


class _Overloaded(http.server.BaseHTTPRequestHandler):
    """S3 that is overloaded when it receives a request for the first time."""

    folder = Path()
    received: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = url.path.strip("/").partition("/")
        file = self.folder / bucket / key
        if f"{self.command} {self.path}" not in self.received:
            self.received.add(f"{self.command} {self.path}")
            self.answer(503, "<Error><Code>ServiceUnavailable</Code></Error>")
        elif key:
            self.answer(200 if file.is_file() else 404, file.read_text() if file.is_file() else "")
        else:
            requested = listing.Listing.parse(dict(parse_qsl(url.query)))
            self.answer(200, listing.list_objects(self.folder, bucket, requested, s3.etag_of_file))

    do_HEAD = do_GET  # noqa: N815 (a name of http.server)

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        headers = {"ETag": '"one"', "Last-Modified": formatdate(0, usegmt=True), "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def overloaded_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    for name in ("a/1", "b/2"):
        file = tmp_path / "bucket" / "set" / name
        file.parent.mkdir(parents=True)
        file.write_text("abc")
    monkeypatch.setattr("dataload.cache.origin.retries.FIRST_PAUSE", 0.0001)
    monkeypatch.setattr(_Overloaded, "folder", tmp_path)
    monkeypatch.setattr(_Overloaded, "received", set())
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore, which would pause for seconds
    with serving(_Overloaded) as url:
        yield url


FILES = ["bucket/set/a/1", "bucket/set/b/2"]
LISTINGS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "ls": (lambda fs: fs.ls("bucket/set", detail=False), ["bucket/set/a", "bucket/set/b"]),
    "find": (lambda fs: fs.find("bucket/set"), FILES),
    "find to a depth": (lambda fs: fs.find("bucket/set", maxdepth=2), FILES),
    "glob": (lambda fs: fs.glob("bucket/set/*/*"), FILES),
    "info": (lambda fs: fs.info("bucket/set/a/1")["size"], 3),
    "exists": (lambda fs: fs.exists("bucket/set/a/1"), True),
    "walk": (lambda fs: [files for _, _, files in fs.walk("bucket/set")], [[], ["1"], ["2"]]),
}


@pytest.mark.variants
@pytest.mark.parametrize("call", LISTINGS)
def test_listings_of_an_overloaded_store_are_whole(overloaded_url: str, tmp_path: Path, call: str) -> None:
    """s3fs leaves out a folder that it cannot list."""
    request, expected = LISTINGS[call]
    fs = TierCacheFileSystem("s3", s3.storage_options(overloaded_url), cache_dir=str(tmp_path / "cache"))
    assert request(fs) == expected
    assert fs.stats()["retries_origin"] > 0


@pytest.mark.parametrize("deferred", [True, False])
def test_a_glob_of_an_overloaded_store_names_all_objects(overloaded_url: str, deferred: bool) -> None:
    options = s3.storage_options(overloaded_url)
    filesystem = DeferredS3(**options) if deferred else fsspec.filesystem("s3", skip_instance_cache=True, **options)
    assert list(Origin(filesystem).list("bucket/set/*/*")) == FILES

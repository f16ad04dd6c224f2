"""Failed requests of all stores: which are repeated, for how long, and what the log and the errors say."""

from __future__ import annotations

import ftplib
import http.client
import http.server
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from attempts import fail_at_once
from azure.core.exceptions import HttpResponseError, IncompleteReadError, ServiceRequestError
from fsspec.implementations.memory import MemoryFileSystem
from http_servers import serving

from dataload.benchmarks.origin import Origin as Server
from dataload.benchmarks.origin import s3
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache.origin import reports
from dataload.cache.origin.origin import Origin, dump_resolved
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
    for known in (origin, pickle.loads(pickle.dumps(origin)), pickle.loads(dump_resolved(origin))):
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

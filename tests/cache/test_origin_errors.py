"""Errors of S3 name the endpoint, S3's code and the fix, and hold no credentials."""

from __future__ import annotations

import gc
import http.server
import os
import ssl
import weakref
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import fsspec
import pytest
from attempts import fail_at_once
from botocore.exceptions import EndpointConnectionError
from certificates import Authority
from http_servers import serving
from s3fs import S3FileSystem

from dataload.cache.origin.deferred_s3 import DeferredS3
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import OF_TABLE
from dataload.errors import ConfigError, OriginError, OriginNotFound

SECRET = "s3cret-0f-mine"
RANGE = (0, 10, '"x"')


class _Failing(http.server.BaseHTTPRequestHandler):
    """A store that answers each request with an error: `code`, with an HTTP status."""

    code, status = "AccessDenied", 403

    def do_GET(self) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>Because</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("x-amz-bucket-region", "eu-west-1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 (a name of http.server)

    def log_message(self, *_: object) -> None:
        pass


class _Tenth(http.server.BaseHTTPRequestHandler):
    """A store that answers each request with the first ten bytes of an object."""

    data = bytes(range(10))

    def do_GET(self) -> None:
        self.send_response(206)
        headers = {"ETag": '"x"', "Content-Length": "10", "Content-Range": "bytes 0-9/100"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        self.end_headers()
        self.wfile.write(self.data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with serving(_Failing) as url:
        yield url


def origin(url: str, engine: str) -> Origin:
    options = {"endpoint_url": url, "key": "testing", "secret": SECRET}
    if engine == "obstore":
        return Origin(DeferredS3(**options))
    return Origin(fsspec.filesystem("s3", skip_instance_cache=True, **options), engine="fsspec")


@pytest.mark.variants
@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("code", "status", "fix"),
    [
        ("AccessDenied", 403, "allow these keys"),
        ("AccessDenied", 403, "check the spelling of the URL"),
        ("SignatureDoesNotMatch", 403, "AWS_SECRET_ACCESS_KEY"),
        ("InvalidAccessKeyId", 403, "AWS_PROFILE"),
        ("ExpiredToken", 400, "renew the token"),
        ("RequestTimeTooSkewed", 403, "set the clock"),
    ],
)
def test_a_denial_names_the_endpoint_the_code_and_the_fix(
    url: str, monkeypatch: pytest.MonkeyPatch, engine: str, code: str, status: int, fix: str
) -> None:
    monkeypatch.setattr(_Failing, "code", code)
    monkeypatch.setattr(_Failing, "status", status)
    store = origin(url, engine)
    for call in (lambda: store.list("bucket/train"), lambda: store.read("bucket/train", *RANGE)):
        with pytest.raises(OriginError) as raised:
            call()
        message = str(raised.value)
        assert message.startswith("s3://bucket/train")
        assert f"{url} denied access ({code}: Because): " in message
        assert fix in message
        assert SECRET not in message


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_expired_credentials_for_a_table_may_be_of_its_catalog(
    url: str, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(_Failing, "code", "ExpiredToken")
    monkeypatch.setattr(_Failing, "status", 400)
    for version, is_told in ((f"{OF_TABLE}7", True), ("7", False)):
        with pytest.raises(OriginError, match="renew the token") as raised:
            origin(url, engine).read("bucket/train", *RANGE[:2], version)
        assert ("if the table's catalog gave the credentials, load the table again" in str(raised.value)) == is_told


def test_an_error_keeps_nothing_alive_once_it_is_handled(url: str) -> None:
    """Its traceback holds the pools of threads of a dataset that could not be opened."""
    kept = []
    gc.disable()
    try:
        try:
            origin(url, "obstore").read("bucket/x.parquet", *RANGE)
        except OriginError as error:
            kept.append(weakref.ref(error))
        assert kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_archived_object_is_named_as_such(url: str, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(_Failing, "code", "InvalidObjectState")
    store = origin(url, engine)
    with pytest.raises(
        OriginError, match=r"failed \(InvalidObjectState: Because\): restore the object from the archive"
    ):
        store.read("bucket/train", *RANGE)
    assert store.stats().get("retries", 0) == 0


@pytest.mark.parametrize("kind", ["deferred", "session"])
def test_certificates_of_the_variable_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The client of s3fs reads it, too."""
    fail_at_once(monkeypatch)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.certify())
    with serving(_Tenth, context) as url:
        options = {"endpoint_url": url, "key": "testing", "secret": SECRET}

        def store() -> Origin:
            deferred = kind == "deferred"
            return Origin(DeferredS3(**options) if deferred else S3FileSystem(**options, skip_instance_cache=True))

        fix = "set AWS_CA_BUNDLE to the file of the store's certificates"
        with pytest.raises(OriginError, match=fix):
            store().read("bucket/x", *RANGE)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.path))
        trusting = store()
        assert trusting.read("bucket/x", *RANGE) == _Tenth.data
        assert trusting.engine.name == "obstore"


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("status", "fixes"),
    [
        (400, ["renew the token", "AWS_DEFAULT_REGION"]),
        (403, ["allow these keys", "spelling of the URL", "renew the token", "set the clock"]),
    ],
)
def test_an_answer_without_a_code_names_the_likely_causes(
    url: str, monkeypatch: pytest.MonkeyPatch, engine: str, status: int, fixes: list[str]
) -> None:
    """S3 answers HEAD without a body."""
    monkeypatch.setattr(_Failing, "status", status)
    with pytest.raises(OriginError) as raised:
        origin(url, engine).info("bucket/train/x")
    message = str(raised.value)
    assert f"{url} " in message
    assert f"({status}: " in message
    assert [fix for fix in (*fixes, "dataload doctor") if fix not in message] == []


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize(("code", "status"), [("PermanentRedirect", 301), ("AuthorizationHeaderMalformed", 400)])
def test_a_wrong_region_is_named_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch, engine: str, code: str, status: int
) -> None:
    """Obstore's error of a redirect has no status."""
    monkeypatch.setattr(_Failing, "code", code)
    monkeypatch.setattr(_Failing, "status", status)
    store = origin(url, engine)
    for call in (lambda: store.list("bucket/train"), lambda: store.read("bucket/train", *RANGE)):
        with pytest.raises(OriginError, match=r"set AWS_DEFAULT_REGION .* to the region of the bucket"):
            call()
    assert store.stats().get("retries", 0) == 0


def test_a_missing_bucket_names_the_endpoint_and_its_variable(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Failing, "code", "NoSuchBucket")
    monkeypatch.setattr(_Failing, "status", 404)
    with pytest.raises(OriginNotFound, match=f"s3://bucket/x does not exist at {url}: .*bucket.*AWS_ENDPOINT_URL"):
        origin(url, "obstore").list("bucket/x")
    with pytest.raises(OriginNotFound, match=f"s3://bucket/x bytes 0-9 is gone from {url}: restore it, or start"):
        origin(url, "obstore").read("bucket/x", *RANGE)


def test_an_endpoint_that_cannot_be_reached_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a listing, for whose retries botocore takes 10 s, and in a read by obstore."""
    fail_at_once(monkeypatch)
    port_of_nobody = "http://127.0.0.1:9"

    def refused(*_: object, **__: object) -> None:
        raise EndpointConnectionError(endpoint_url=port_of_nobody)

    monkeypatch.setattr("s3fs.S3FileSystem.find", refused)
    says = f"{port_of_nobody} cannot be reached .*: set AWS_ENDPOINT_URL"
    with pytest.raises(OriginError, match=says):
        origin(port_of_nobody, "fsspec").list("bucket/x")
    with pytest.raises(OriginError, match=says):
        origin(port_of_nobody, "obstore").read("bucket/x", *RANGE)


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_endpoint_without_a_scheme(url: str, engine: str) -> None:
    store = origin("127.0.0.1:9", engine)
    for call in (
        lambda: store.list("bucket/x"),
        lambda: store.read("bucket/x", *RANGE),
        lambda: store.read_into(memoryview(bytearray(10)), "bucket/x", 0, '"x"'),
    ):
        with pytest.raises(ConfigError, match=r"Invalid endpoint: 127.0.0.1:9; begin AWS_ENDPOINT_URL .* with http://"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anon": False}, r"NoCredentialsError.*set AWS_ACCESS_KEY_ID .*AWS_PROFILE, or anon=True"),
        ({"key": "testing", "anon": False}, r"Partial.*set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"profile": "nobody"}, r"ProfileNotFound.*set AWS_PROFILE"),
    ],
)
def test_missing_credentials(
    url: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], message: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if "key" in options:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(options.pop("key")))
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=url, **options)
    with pytest.raises(OriginError, match=message):
        Origin(filesystem).list("bucket/x")

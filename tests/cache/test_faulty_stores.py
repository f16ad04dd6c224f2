"""Stores that answer otherwise than Amazon: the rows are right, or one error says what to do."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from botocore.httpsession import get_cert_path
from credential_services import PROVIDERS, issuing
from faulty_store import THEN, Answer, Asked, Store, faulty_store
from yarl import URL

import dataload
from dataload.cache.blocks.reader import Blocks
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin import guarded_http
from dataload.cache.origin.deferred_s3 import DeferredS3
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.patience import LEAST_SECONDS, MOST_SECONDS, STEP, Patience
from dataload.doctor import object_store as doctor
from dataload.errors import ConfigError, DataError, ObjectChanged, OriginError

BLOCK = 1 << 12
OLD, NEW = b"old." * BLOCK, b"new!" * BLOCK
QUICK_PROVIDERS = ["environment", "file", "container"]
CLIENTS = ["obstore", "fsspec"]

pytestmark = pytest.mark.usefixtures("no_aws_settings")


def origin_of(client: str, **options: Any) -> Origin:
    """Return an origin for these options of s3fs, which a client of `CLIENTS` reads; "deferred": without s3fs."""
    if client == "deferred":
        return Origin(DeferredS3(**options))
    return Origin(fsspec.filesystem("s3", skip_instance_cache=True, **options), engine=client)


@contextmanager
def opened(store: Store, cache_dir: Path, client: str, **options: Any) -> Iterator[TierCacheFileSystem]:
    origin = s3fs.S3FileSystem(skip_instance_cache=True, **(options or store.options))
    given = {"cache_dir": str(cache_dir), "block_bytes": BLOCK, "skip_instance_cache": True}
    yield TierCacheFileSystem(fs=origin, engine=client, **given)
    origin.close_session(origin.loop, origin.s3)


@pytest.mark.variants
@pytest.mark.parametrize("client", ["deferred", "fsspec"])
@pytest.mark.parametrize("path", ["bucket/d", "bucket/d/*", "bucket", "bucket/*/*"])
@pytest.mark.parametrize("listing", ["tokenless", "v1"])
def test_a_listing_without_tokens_loses_no_object(client: str, path: str, listing: str) -> None:
    with faulty_store(listing=listing, page=10) as store:
        for number in range(25):
            store.put(f"d/{number:02d}", b"x")
        assert len(origin_of(client, **store.options).list(path)) == 25


@pytest.mark.variants
@pytest.mark.parametrize("client", ["deferred", "fsspec"])
def test_folders_of_a_listing_without_tokens_are_all_listed(client: str) -> None:
    with faulty_store(listing="tokenless", page=10) as store:
        for number in range(40):
            store.put(f"d/{number:02d}/x", b"x")
        assert len(origin_of(client, **store.options).list("bucket/d/*/x")) == 40


@pytest.mark.variants
@pytest.mark.parametrize("client", ["deferred", "fsspec"])
@pytest.mark.parametrize("path", ["bucket/d", "bucket/d/*", "bucket"])
def test_a_listing_whose_token_repeats_is_an_error(client: str, path: str) -> None:
    with faulty_store(listing="repeating", page=10) as store:
        for number in range(35):
            store.put(f"d/{number:02d}", b"x")
        with pytest.raises(
            OriginError, match=r"s3://bucket/.*: the store answers .* with an earlier one: name its files"
        ):
            origin_of(client, **store.options).list(path)


@pytest.mark.parametrize("client", ["deferred", "fsspec"])
def test_a_listing_in_another_order_is_complete(client: str) -> None:
    """As gateways over file systems list."""
    with faulty_store(listing="folders", page=1) as store:
        keys = ["d/a/1", "d/a/2", "d/a-1", "d/b"]
        for key in keys:
            store.put(key, b"x")
        assert {*origin_of(client, **store.options).list("bucket/d")} == {f"bucket/{key}" for key in keys}


@pytest.mark.parametrize("client", CLIENTS)
def test_tags_without_quotes_are_compared_and_times_are_not(tmp_path: Path, client: str) -> None:
    def spoil(asked: Asked, answer: Answer) -> Answer:
        if "ETag" in answer.headers:
            modified = formatdate(int(THEN) + 60 * asked.number, usegmt=True)
            answer.headers |= {"ETag": answer.headers["ETag"].strip('"'), "Last-Modified": modified}
        return answer

    with faulty_store(spoil=spoil) as store, opened(store, tmp_path, client) as fs:
        store.put("x", OLD)
        assert fs.cat_file("bucket/x") == OLD


@pytest.mark.variants
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("what", ["time", "time, listed tags"])
def test_a_replaced_object_without_etags_is_noticed_at_equal_size(tmp_path: Path, client: str, what: str) -> None:
    with faulty_store(tags="listed" if "listed" in what else False, conditions=False) as store:
        store.put("x", OLD)
        with opened(store, tmp_path, client) as fs:
            [name] = fs.find("bucket")
            obj = fs.object(name)
            assert fs.blocks.read(obj, 0, BLOCK) == OLD[:BLOCK]
            store.put("x", NEW, THEN + 60)
            with pytest.raises(ObjectChanged, match="x was replaced after it was listed"):
                fs.blocks.read(obj, BLOCK, 2 * BLOCK)
            fs.invalidate_cache()
            assert fs.cat_file(name) == NEW


@pytest.mark.parametrize("client", CLIENTS)
def test_an_object_whose_store_has_no_etags_is_read_whatever_it_does_with_conditions(
    tmp_path: Path, client: str
) -> None:
    with faulty_store(tags=False, conditions=True) as store:
        store.put("x", OLD)
        with opened(store, tmp_path, client) as fs:
            assert fs.cat_file("bucket/x") == OLD


@pytest.mark.parametrize(("listing", "status"), [("v2", "ok"), ("tokenless", "warning")])
def test_doctor_names_a_store_that_cuts_listings(listing: str, status: str) -> None:
    with faulty_store(listing=listing) as store:
        for name in ("d/x", "d/y"):
            store.put(name, b"x")
        case = doctor.Store("s3://bucket/d", Blocks.uncached(origin_of("fsspec", **store.options)))
        found = doctor.listing(case)
    assert (found.status, "no token" in found.what) == (status, status == "warning")


def test_doctor_lists_no_folder_of_a_longer_name() -> None:
    with faulty_store() as store:
        for name in ("d/x", "d-2/x"):
            store.put(name, b"x")
        case = doctor.Store("s3://bucket/d", Blocks.uncached(origin_of("fsspec", **store.options)))
        assert doctor.listing(case).what == "a listing has one page"


def test_doctor_names_a_store_that_tells_versions_apart_by_time() -> None:
    with faulty_store(tags=False) as store:
        store.put("x", b"x")
        case = doctor.Store("s3://bucket/x", Blocks.uncached(origin_of("fsspec", **store.options)))
        assert "time and size tell versions apart" in doctor.etag(case).what


@pytest.mark.variants
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("provider", [
    *QUICK_PROVIDERS,
    *(pytest.param(each, marks=pytest.mark.slow) for each in PROVIDERS if each not in QUICK_PROVIDERS),
])  # fmt: skip
def test_a_rejected_token_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, client: str
) -> None:
    with (
        issuing(provider, tmp_path, monkeypatch, timedelta(minutes=4)) as issuer,
        faulty_store(fault=issuer.fault) as store,
        opened(store, tmp_path / "cache", client, endpoint_url=store.url) as fs,
    ):
        store.put("x", OLD)
        obj = fs.object("bucket/x")
        assert fs.blocks.read(obj, 0, BLOCK) == OLD[:BLOCK]
        issuer.rotate()
        assert fs.blocks.read(obj, BLOCK, 2 * BLOCK) == OLD[BLOCK : 2 * BLOCK]
        issuer.rotate()
        assert [*fs.find("bucket")] == ["bucket/x"]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_token_that_stays_rejected_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    with (
        issuing("container", tmp_path, monkeypatch, timedelta(hours=1)) as issuer,
        faulty_store(fault=issuer.fault) as store,
        opened(store, tmp_path / "cache", client, endpoint_url=store.url) as fs,
    ):
        store.put("x", OLD)
        obj = fs.object("bucket/x")
        issuer.accepts_none = True
        for _ in range(2):
            with pytest.raises(OriginError, match=r"denied access .ExpiredToken.*renew the token"):
                fs.blocks.read(obj, 0, BLOCK)
        assert issuer.issued <= 3


@pytest.fixture
def reconnects(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that gets an entry whenever s3fs replaces its session."""
    own, found = s3fs.S3FileSystem.set_session, []

    async def set_session(self: Any, refresh: bool = False, **options: Any) -> Any:
        found.extend([True] if refresh else [])
        return await own(self, refresh=refresh, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "set_session", set_session)
    monkeypatch.setattr(s3fs.S3FileSystem, "connect", fsspec.asyn.sync_wrapper(set_session))
    return found


def forbidden(asked: Asked) -> Answer | None:
    return Answer.error(403, "AccessDenied") if asked.kind == "get" else None


@pytest.mark.variants
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("given", ["options", "environment", "anon"])
def test_a_store_that_denies_access_keeps_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reconnects: list[bool], client: str, given: str
) -> None:
    with faulty_store(fault=forbidden) as store:
        options = {**store.options, "anon": True} if given == "anon" else store.options
        if given == "environment":
            options = {"endpoint_url": store.url}
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        store.put("x", OLD)
        with opened(store, tmp_path, client, **options) as fs:
            obj = fs.object("bucket/x")
            for _ in range(2):
                with pytest.raises(OriginError, match=r"denied access .AccessDenied: As the test wants it"):
                    fs.blocks.read(obj, 0, BLOCK)
        assert store.count("get") == 2
    assert not reconnects


@pytest.mark.parametrize("client", CLIENTS)
def test_a_store_that_denies_access_is_named_while_the_source_of_credentials_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reconnects: list[bool], client: str
) -> None:
    with (
        issuing("container", tmp_path, monkeypatch, timedelta(hours=1)),
        faulty_store() as store,
        opened(store, tmp_path / "cache", client, endpoint_url=store.url) as fs,
    ):
        store.put("x", OLD)
        store.put("y", NEW)
        obj = fs.object("bucket/x")
        assert fs.blocks.read(obj, 0, BLOCK) == OLD[:BLOCK]
        monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
        store.fault = forbidden
        with pytest.raises(OriginError, match=r"denied access .AccessDenied: As the test wants it"):
            fs.blocks.read(obj, BLOCK, 2 * BLOCK)
        store.fault = None
        assert fs.blocks.read(obj, BLOCK, 2 * BLOCK) == OLD[BLOCK : 2 * BLOCK]
        assert fs.cat_file("bucket/y") == NEW
    assert not reconnects


@pytest.mark.parametrize("client", CLIENTS)
def test_a_role_whose_new_credentials_are_refused_is_not_asked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reconnects: list[bool], client: str
) -> None:
    with (
        issuing("role", tmp_path, monkeypatch, timedelta(hours=1)) as issuer,
        faulty_store() as store,
        opened(store, tmp_path / "cache", client, endpoint_url=store.url) as fs,
    ):
        store.put("x", OLD)
        obj = fs.object("bucket/x")

        def refuse(asked: Asked) -> Answer:
            issuer.rotate()  # The service issues other ones to each request.
            return Answer.error(403, "AccessDenied")

        store.fault = refuse
        for _ in range(3):
            with pytest.raises(OriginError, match="denied access"):
                fs.blocks.read(obj, 0, BLOCK)
        assert store.count("get") == 4
    assert len(reconnects) <= 1


def test_a_token_is_fetched_again_before_it_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a rejection: once half of its time has passed. obstore asks for one that ends within 5 minutes again."""
    passed = timedelta()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + passed

    monkeypatch.setattr("dataload.cache.origin.credentials.datetime", Clock)
    with (
        issuing("process", tmp_path, monkeypatch, timedelta(minutes=4)) as issuer,
        faulty_store() as store,
        opened(store, tmp_path / "cache", "obstore", endpoint_url=store.url) as fs,
    ):
        store.put("x", OLD)
        obj = fs.object("bucket/x")
        assert fs.blocks.read(obj, 0, BLOCK) == OLD[:BLOCK]
        issuer.rotate()
        passed = timedelta(minutes=3)
        until = time.monotonic() + 200
        while store.asked[-1].access_key != issuer.key and time.monotonic() < until:
            fs.blocks.origin.read(obj.path, 0, 10, obj.version)
        assert store.asked[-1].access_key == issuer.key


@contextmanager
def elsewhere(target: Store) -> Iterator[Callable[[Asked], Answer | None]]:
    """Yield a fault that redirects requests for objects to another host."""
    url = target.url.replace("127.0.0.1", "localhost")

    def redirect(asked: Asked) -> Answer | None:
        return Answer.error(307, Location=f"{url}/bucket/{asked.key}") if asked.kind == "get" else None

    yield redirect


@pytest.mark.parametrize("client", CLIENTS)
def test_a_store_that_redirects_to_another_host_is_not_followed(tmp_path: Path, client: str) -> None:
    with faulty_store() as target, elsewhere(target) as redirect, faulty_store(fault=redirect) as store:
        store.put("x", OLD)
        target.put("x", OLD)
        options = {**store.options, "token": "a-token"}
        with (
            opened(store, tmp_path, client, **options) as fs,
            pytest.raises(OriginError, match=r"x bytes .*if you trust http://localhost:\d+, to which it redirects"),
        ):
            fs.cat_file("bucket/x")
        assert not target.asked


@pytest.mark.parametrize("given", [
    {"headers": {"X-Api-Key": "a-secret", "Authorization": "a-secret", "Cookie": "a=a-secret"}},
    {"client_kwargs": {"headers": {"X-Api-Key": "a-secret"}, "cookies": {"a": "a-secret"}}},
], ids=["of requests", "of the session"])  # fmt: skip
def test_a_redirect_over_http_is_followed_without_credentials(tmp_path: Path, given: dict[str, Any]) -> None:
    with faulty_store() as target:
        target.put("x", OLD)

        def redirect(asked: Asked) -> Answer:
            return Answer.error(302, Location=f"{target.url.replace('127.0.0.1', 'localhost')}/bucket/x")

        with faulty_store(fault=redirect) as store:
            origin = fsspec.filesystem("http", skip_instance_cache=True, **given)
            options = {"cache_dir": str(tmp_path), "block_bytes": BLOCK, "skip_instance_cache": True}
            fs = TierCacheFileSystem(fs=origin, **options)
            assert fs.cat_file(f"{store.url}/bucket/x") == OLD
            assert target.asked
            kept = {"accept", "accept-encoding", "host", "if-match", "range", "user-agent"}
            assert {name.lower() for asked in target.asked for name in asked.headers} <= kept
            assert any("a-secret" in str(asked.headers) or "Basic" in str(asked.headers) for asked in store.asked)
            origin.close_session(origin.loop, origin._session)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [400, 501])
def test_a_store_that_rejects_conditions_is_read_and_its_answers_are_compared(
    tmp_path: Path, client: str, status: int
) -> None:
    def reject(asked: Asked) -> Answer | None:
        return Answer.error(status, "NotImplemented") if "If-Match" in asked.headers else None

    with faulty_store(fault=reject) as store, opened(store, tmp_path, client) as fs:
        store.put("x", OLD)
        obj = fs.object("bucket/x")
        assert fs.blocks.read(obj, 0, BLOCK) == OLD[:BLOCK]
        store.put("x", NEW)
        with pytest.raises(ObjectChanged):
            fs.blocks.read(obj, BLOCK, 2 * BLOCK)
        assert sum("If-Match" in asked.headers for asked in store.asked) == 1


@pytest.mark.parametrize("client", CLIENTS)
def test_a_store_that_rejects_conditions_and_ignores_ranges_is_read(tmp_path: Path, client: str) -> None:
    def reject(asked: Asked) -> Answer | None:
        if "If-Match" in asked.headers:
            return Answer.error(400, "NotImplemented")
        return Answer(200, OLD, {"ETag": store.objects["x"].tag}) if asked.kind == "get" else None

    with faulty_store(fault=reject) as store, opened(store, tmp_path, client) as fs:
        store.put("x", OLD)
        assert fs.blocks.read(fs.object("bucket/x"), 0, BLOCK) == OLD[:BLOCK]


@pytest.mark.parametrize("client", CLIENTS)
def test_conditions_are_sent_after_a_fault_in_passing(tmp_path: Path, client: str) -> None:
    def reject(asked: Asked) -> Answer | None:
        return Answer.error(400, "ExpiredToken") if (asked.kind, asked.number) == ("get", 0) else None

    with faulty_store(fault=reject) as store, opened(store, tmp_path, client) as fs:
        store.put("x", OLD)
        obj = fs.object("bucket/x")
        for start in (0, BLOCK):
            assert fs.blocks.read(obj, start, start + BLOCK) == OLD[start : start + BLOCK]
        assert "If-Match" in store.asked[-1].headers


@pytest.mark.parametrize("status", [400, 501])
def test_a_store_that_cannot_list_is_named_at_once(status: int) -> None:
    def reject(asked: Asked) -> Answer | None:
        return Answer.error(status, "NotImplemented") if asked.kind == "list" else None

    with faulty_store(fault=reject) as store, pytest.raises(OriginError, match="name its files in a list"):
        origin_of("deferred", **store.options).list("bucket/d")
    assert len(store.asked) < 8


@pytest.mark.parametrize("client", ["deferred", "fsspec"])
@pytest.mark.parametrize("bundle", ["missing", "folder"])
def test_certificates_that_cannot_be_read_are_named_with_their_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str, bundle: str
) -> None:
    path = tmp_path / "certificates"
    if bundle == "folder":
        path.mkdir()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(path))
    with pytest.raises(ConfigError, match=r"certificates, which holds .* set AWS_CA_BUNDLE"):
        origin_of(client, key="k", secret="s", endpoint_url="https://127.0.0.1:9").list("bucket/d")


@pytest.mark.parametrize("options", [{}, {"key": "k", "secret": "s"}], ids=["environment", "options"])
def test_an_access_point_of_several_regions_names_the_package_it_needs(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "awscrt", None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    url = "s3://arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap/d"
    with pytest.raises(OriginError, match="pip install awscrt"):
        dataload.make_dataset(url, storage_options=options, cache=False)


def test_a_store_that_takes_requests_and_never_answers_is_given_up_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Botocore and s3fs would ask it 25 times, for six minutes."""
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}"}
        options["config_kwargs"] = {"read_timeout": 1}
        with pytest.raises(OriginError, match=r"cannot be reached \(ConnectionError: Read timeout on .*: set AWS_ENDP"):
            origin_of("fsspec", **options).list("bucket/d")
        server.setblocking(False)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_store_that_cannot_be_reached_is_tried_no_oftener_than_the_message_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Botocore would try it four times more, for ten seconds and more, before each of our own attempts."""
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0)
    with faulty_store() as store:
        options = {**store.options, "endpoint_url": store.url.replace("http:", "https:")}
        with pytest.raises(OriginError, match="SSLError"):
            origin_of("fsspec", **options).list("bucket/d")
        assert store.connections == 1


@pytest.mark.parametrize(
    "call", [("put_object", b""), ("get_object", None), ("head_object", None)], ids=lambda call: call[0]
)
def test_requests_of_the_program_keep_their_retries(call: tuple[str, bytes | None]) -> None:
    """The library fsspec gives the program and the loader one filesystem."""
    operation, body = call
    with faulty_store() as store:
        options = {**store.options, "endpoint_url": store.url.replace("http:", "https:")}
        filesystem = s3fs.S3FileSystem(**options, config_kwargs={"retries": {"total_max_attempts": 2}})
        filesystem.retries = 1  # of s3fs itself
        Origin(filesystem)
        with pytest.raises(Exception, match="SSL"):
            filesystem.call_s3(operation, Bucket="bucket", Key="x", **({} if body is None else {"Body": body}))
        assert store.connections == 2


def test_certificates_are_read_once_for_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = get_cert_path(True), list[str]()
    monkeypatch.setattr("dataload.cache.origin.guarded_s3.read_bundle", read.append)
    monkeypatch.setenv("AWS_CA_BUNDLE", path)
    with faulty_store() as store, opened(store, tmp_path, "fsspec") as fs:
        store.put("x", OLD)
        assert fs.cat_file("bucket/x") == OLD
    assert read == [path]


def test_certificates_are_not_read_if_none_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/missing")
    with faulty_store() as store:
        store.put("d/x", b"x")
        origin = origin_of("fsspec", **store.options, client_kwargs={"verify": False})
        assert [*origin.list("bucket/d")] == ["bucket/d/x"]


def test_a_proxy_is_used_and_named_with_what_lets_obstore_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dataload.cache.reports._reported", set())
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with faulty_store() as store:
        store.put("x", OLD)
        monkeypatch.setenv("http_proxy", store.url)
        with opened(store, tmp_path, "auto") as fs:
            assert fs.cat_file("bucket/x") == OLD
    fix = "if 127.0.0.1 can be reached without the proxy, add it to NO_PROXY, or silence this by CacheConfig"
    assert f"through a proxy, obstore would follow redirects to any host; {fix}" in caplog.text


@pytest.mark.parametrize(("first", "then", "is_own"), [
    ("http://h/x", "https://h/x", True),
    ("http://h:8080/x", "https://h/x", False),
    ("http://h/x", "https://h:8443/x", False),
    ("http://h/x", "https://other/x", False),
])  # fmt: skip
def test_a_redirect_to_encryption_keeps_headers(first: str, then: str, is_own: bool) -> None:
    sent: list[dict[str, str]] = []

    class Session:
        async def request(self, _: str, url: Any, headers: dict[str, str], **__: Any) -> Any:
            sent.append(headers)
            location = {"Location": then} if len(sent) == 1 else {}
            status = 302 if location else 200
            return SimpleNamespace(status=status, headers=location, url=URL(str(url)), release=lambda: None)

    session = guarded_http._Redirecting(Session())
    session._request_elsewhere = Session().request
    asyncio.run(session._follow("GET", first, headers={"X-Api-Key": "a-secret"}))
    assert sent == [{"X-Api-Key": "a-secret"}, {"X-Api-Key": "a-secret"} if is_own else {}]


def table(first: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": range(first, first + 10)}), sink)
    return sink.getvalue()


@pytest.mark.parametrize("client", ["deferred", "fsspec"])
def test_keys_with_dots_for_segments_lose_no_rows(client: str) -> None:
    keys = ["d/x.parquet", "d/./x.parquet", "d/../y.parquet", "d/e/./z.parquet"]
    with faulty_store() as store:
        for number, key in enumerate(keys):
            store.put(key, table(10 * number))
        options = store.options if client == "deferred" else {**store.options, "version_aware": False}
        dataset = dataload.make_dataset("s3://bucket/d", storage_options=options, cache=False)
        assert sorted(int(dataset[row]["x"]) for row in range(dataset.num_rows)) == [*range(40)]


@pytest.mark.parametrize(("url", "told"), [
    ("s3://bucket/nothing ", r"^no objects at 's3://bucket/nothing ' .* begins or ends with whitespace"),
    ("s3://bucket/{a,b}", r"braces are not expanded: name each path in a list"),
    (" s3://bucket/x", r"^' s3://bucket/x' begins with whitespace: remove it"),
    ("s3://bucket /x", r"Parameter validation failed: Invalid bucket name \"bucket \""),
])  # fmt: skip
def test_a_url_that_is_probably_misspelt_is_doubted(url: str, told: str) -> None:
    with faulty_store() as store, pytest.raises((OriginError, ConfigError), match=told):
        dataload.make_dataset(url, storage_options=store.options, cache=False)


@pytest.mark.parametrize("url", [
    "https://my-bucket.s3.amazonaws.com/d/x",
    "https://my-bucket.s3.amazonaws.com",
    "https://my-bucket.s3.eu-central-1.amazonaws.com/d",
    "https://s3.eu-central-1.amazonaws.com/my-bucket/d",
    "https://s3-eu-west-1.amazonaws.com/my-bucket/d",
])  # fmt: skip
def test_an_address_of_amazon_names_that_of_s3(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong there: the bucket is private, does not exist, or there is no network."""
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0)
    with pytest.raises(OriginError, match="; for S3 itself, name s3://my-bucket/…"):
        dataload.make_dataset(url, cache=False)


@pytest.mark.parametrize(("name", "own"), [
    ("aws_access_key_id", "'key'"),
    ("AWS_SECRET_ACCESS_KEY", "'secret'"),
    ("region", "region_name"),
    ("aws_endpoint", "'endpoint_url'"),
    ("skip_signature", "'anon'"),
])  # fmt: skip
def test_options_of_other_libraries_are_named_as_s3fs_calls_them(name: str, own: str) -> None:
    with pytest.raises(ConfigError, match=f"storage_options names '{name}', which s3fs calls .*{own}"):
        dataload.make_dataset("s3://bucket/x", storage_options={name: "a-value"}, cache=False)


@pytest.mark.parametrize(("data", "told"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS.*git lfs pull"),
    (b"<!DOCTYPE html><html><body>Sign in</body></html>", "is a web page"),
    (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is a web page or an answer in XML"),
])  # fmt: skip
def test_a_file_that_stands_for_another_is_recognised(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(DataError, match=rf"x\.parquet {told}"):
        dataload.make_dataset(str(tmp_path), cache=False)


def test_a_file_is_read_until_a_delimiter_and_a_checksum_is_refreshed(tmp_path: Path) -> None:
    with faulty_store() as store, opened(store, tmp_path, "obstore") as fs:
        store.put("x", b"one--two--three")
        with fs.open("bucket/x") as file:
            parts = [file.readuntil(b"--", blocks=4) for _ in range(4)]
        assert parts == [b"one--", b"two--", b"three", b""]
        before = fs.checksum("bucket/x")
        store.put("x", NEW)
        assert fs.checksum("bucket/x") == before
        assert fs.checksum("bucket/x", refresh=True) != before


def numbers(groups: int, rows: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": np.random.default_rng(0).permutation(groups * rows)}), sink, rows)
    return sink.getvalue()


# A row group that is made with others, row groups that share a cached block, and one that a thread decodes.
SHAPES = {"alone": (8, 1, 3000), "in a block": (1, 4, 1000), "large": (1, 1, 300_000)}


@contextmanager
def damaged(shape: str, body: bytes, times: int, cache_dir: Path) -> Iterator[tuple[dataload.Dataset, list[Asked]]]:
    """Yield a dataset, of whose files the first `times` bodies are these bytes, and the requests for its rows."""
    files, groups, rows = SHAPES[shape]
    asked: list[Asked] = []

    def spoil(request: Asked, answer: Answer) -> Answer:
        seen = sum(request.key == each.key for each in asked)
        asked.append(request)
        size = len(answer.body)
        return replace(answer, body=body.ljust(size, b"\0")[:size]) if seen < times else answer

    with faulty_store() as store:
        for number in range(files):
            store.put(f"d/{number}.parquet", numbers(groups, rows))
        dataset = dataload.make_dataset("s3://bucket/d", storage_options=store.options, cache_dir=str(cache_dir))
        store.spoil = spoil
        yield dataset, asked


@pytest.mark.parametrize("body", [b"", b"<!DOCTYPE html><html><body>Sign in</body></html>"], ids=["zeros", "html"])
@pytest.mark.parametrize("shape", SHAPES)
def test_wrong_bytes_of_the_right_length_are_fetched_again(tmp_path: Path, shape: str, body: bytes) -> None:
    with damaged(shape, body, 1, tmp_path) as (dataset, _):
        files, groups, rows = SHAPES[shape]
        found = [batch["x"] for batch in dataload.make_loader(dataset, 1000, num_threads=1)]
        assert sorted(int(x) for part in found for x in part) == sorted([*range(groups * rows)] * files)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_that_stay_wrong_are_an_error_that_names_the_row_group(tmp_path: Path, shape: str) -> None:
    with damaged(shape, b"", 1000, tmp_path) as (dataset, asked):
        with pytest.raises(DataError, match=r"\.parquet row group \d cannot be decoded"):
            list(dataload.make_loader(dataset, 1000, shuffle=False, num_threads=1))
        assert (
            sum(each.key == "d/0.parquet" for each in asked) <= 4 * SHAPES[shape][1]
        )  # a large one takes two requests


def trickling(times: int, seconds: float) -> Callable[[Asked, Answer], Answer]:
    """Return a fault: the first `times` bodies take so long, byte by byte."""
    parts = 10

    def spoil(asked: Asked, answer: Answer) -> Answer:
        slow = asked.kind == "get" and asked.number < times
        return replace(answer, pause=seconds / parts, parts=parts) if slow else answer

    return spoil


@pytest.mark.parametrize("client", CLIENTS)
def test_a_body_that_trickles_is_asked_for_again(tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataload.cache.origin.patience.LEAST_SECONDS", 0.2)
    with faulty_store(spoil=trickling(1, 5.0)) as store, opened(store, tmp_path, client) as fs:
        store.put("x", OLD)
        assert fs.blocks.read(fs.object("bucket/x"), 0, BLOCK) == OLD[:BLOCK]
        assert store.count("get") > 1


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_a_network_on_which_all_bodies_are_slow_is_read_and_its_pace_is_learnt(
    tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt may take 0.5 s, the next one 32 s, and the first one of another block 8 s."""
    monkeypatch.setattr("dataload.cache.origin.patience.LEAST_SECONDS", 0.5)
    with faulty_store(spoil=trickling(1000, 1.0)) as store, opened(store, tmp_path, client) as fs:
        store.put("x", OLD)
        blocks = [fs.blocks.read(fs.object("bucket/x"), start, start + BLOCK) for start in (0, BLOCK)]
        assert blocks == [OLD[:BLOCK], OLD[BLOCK : 2 * BLOCK]]
        assert store.count("get") == 2 + 1  # Only the first attempt is given up.


def test_one_slow_request_makes_no_other_one_patient_and_the_third_attempt_waits() -> None:
    patience = Patience()
    for _ in range(8):
        patience.note(20.0, 1 << 16)  # of small requests, which do not tell how long large ones take
        patience.note(0.1, 8 << 20)
    patience.note(LEAST_SECONDS, 8 << 20)
    attempts = [patience.seconds(8 << 20, attempt) for attempt in range(3)]
    assert attempts == [LEAST_SECONDS, STEP * LEAST_SECONDS, MOST_SECONDS]

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import itertools
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Self
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen
from xml.etree import ElementTree as ET

import boto3
import obstore
import psutil
import pyarrow.fs
import pytest
import s3fs
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

from dataload.benchmarks.origin import Origin, s3
from dataload.benchmarks.origin.behaviour import FAULTS, Behaviour, Faults
from dataload.benchmarks.origin.listing import Page, keys_below, page_of
from dataload.benchmarks.origin.server import Server
from dataload.errors import ConfigError

XMLNS = f"{{{s3.NAMESPACE}}}"
ODD_KEYS = [
    "plain",
    "a b.txt",
    "a+b",
    "year=2024/month=1/part 0.parquet",
    "ünï/日本/😀.bin",
    "deep/er/and/deeper",
    "deep-er",
    "100%/50%25",
    "%2F",
    'it\'s & <that> "quoted"',
]
BIG = 3 * (1 << 20) + 17


@cache
def body_of(key: str, size: int = 5000) -> bytes:
    return random.Random(key).randbytes(size)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    with Origin(tmp_path_factory.mktemp("origin")) as running:
        yield running


@pytest.fixture
def folder(server: Origin) -> Path:
    """The folder of the server, with bucket "b", which has unusual keys, "empty" and "big", and an empty "other"."""
    root = server.folder
    for left in root.iterdir():
        left.unlink() if left.is_symlink() or left.is_file() else shutil.rmtree(left)
    (root / "other").mkdir()
    for key in [*ODD_KEYS, "empty", "big"]:
        path = root / "b" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body_of(key, {"empty": 0, "big": BIG}.get(key, 5000)))
    return root


@pytest.fixture
def origin(server: Origin, folder: Path) -> Origin:
    """The server as it starts: without latency, faults and counts."""
    server.behave(**asdict(Behaviour()))
    server.reset()
    return server


class Raw:
    """An HTTP client that sends paths unchanged and accepts every answer."""

    def __init__(self, origin: Origin) -> None:
        host, port = origin.endpoint_url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def __call__(self, method: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        self.connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        response = self.connection.getresponse()
        try:
            return response, response.read()
        except http.client.IncompleteRead as cut:
            self.connection.close()
            return response, cut.partial


@pytest.fixture
def raw(origin: Origin) -> Iterator[Raw]:
    with Raw(origin) as client:
        yield client


def code_of(body: bytes) -> str:
    return ET.fromstring(body).findtext("Code") or ""


# Common clients.


class Boto:
    def __init__(self, origin: Origin) -> None:
        self.client = boto3.client(
            "s3",
            endpoint_url=origin.endpoint_url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )

    def close(self) -> None:
        self.client.close()

    def _pages(self, **asked: str) -> Iterator[dict]:
        return self.client.get_paginator("list_objects_v2").paginate(Bucket="b", **asked)

    def keys(self) -> list[str]:
        return [each["Key"] for page in self._pages() for each in page.get("Contents", [])]

    def level(self, prefix: str) -> set[str]:
        pages = list(self._pages(Prefix=prefix, Delimiter="/"))
        files = {each["Key"] for page in pages for each in page.get("Contents", [])}
        return files | {each["Prefix"] for page in pages for each in page.get("CommonPrefixes", [])}

    def size(self, key: str) -> int:
        return self.client.head_object(Bucket="b", Key=key)["ContentLength"]

    def read(self, key: str) -> bytes:
        return self.client.get_object(Bucket="b", Key=key)["Body"].read()

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        return self.client.get_object(Bucket="b", Key=key, Range=f"bytes={start}-{stop - 1}")["Body"].read()


class S3FS:
    def __init__(self, origin: Origin) -> None:
        self.fs = s3fs.S3FileSystem(**origin.storage_options, skip_instance_cache=True, use_listings_cache=False)

    def close(self) -> None:
        pass

    def keys(self) -> list[str]:
        return [path.removeprefix("b/") for path in self.fs.find("b")]

    def level(self, prefix: str) -> set[str]:
        found = self.fs.ls(f"b/{prefix}", detail=True)
        return {each["name"].removeprefix("b/") + "/" * (each["type"] == "directory") for each in found}

    def size(self, key: str) -> int:
        return self.fs.info(f"b/{key}")["size"]

    def read(self, key: str) -> bytes:
        return self.fs.cat_file(f"b/{key}")

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        return self.fs.cat_file(f"b/{key}", start=start, end=stop)


class Obstore:
    def __init__(self, origin: Origin) -> None:
        self.store = S3Store(
            "b",
            endpoint=origin.endpoint_url,
            access_key_id="testing",
            secret_access_key="testing",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def close(self) -> None:
        pass

    def keys(self) -> list[str]:
        return [each["path"] for page in obstore.list(self.store) for each in page]

    def level(self, prefix: str) -> set[str]:
        found = obstore.list_with_delimiter(self.store, prefix)
        return {each["path"] for each in found["objects"]} | {f"{each}/" for each in found["common_prefixes"]}

    def size(self, key: str) -> int:
        return obstore.head(self.store, key)["size"]

    def read(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        return bytes(obstore.get_range(self.store, key, start=start, end=stop))


class Arrow:
    def __init__(self, origin: Origin) -> None:
        self.fs = pyarrow.fs.S3FileSystem(
            access_key="testing",
            secret_key="testing",
            region="us-east-1",
            scheme="http",
            endpoint_override=origin.endpoint_url.removeprefix("http://"),
        )

    def close(self) -> None:
        pass

    def _list(self, path: str, *, recursive: bool) -> list[pyarrow.fs.FileInfo]:
        return self.fs.get_file_info(pyarrow.fs.FileSelector(path, recursive=recursive))

    def keys(self) -> list[str]:
        return [each.path.removeprefix("b/") for each in self._list("b", recursive=True) if each.is_file]

    def level(self, prefix: str) -> set[str]:
        found = self._list(f"b/{prefix}", recursive=False)
        return {each.path.removeprefix("b/") + "/" * (not each.is_file) for each in found}

    def size(self, key: str) -> int:
        return self.fs.get_file_info(f"b/{key}").size

    def read(self, key: str) -> bytes:
        with self.fs.open_input_stream(f"b/{key}") as file:
            return file.read()

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        with self.fs.open_input_file(f"b/{key}") as file:
            return file.read_at(stop - start, start)


@pytest.fixture(params=[Boto, S3FS, Obstore, Arrow])
def client(request: pytest.FixtureRequest, origin: Origin) -> Iterator[Boto | S3FS | Obstore | Arrow]:
    made = request.param(origin)
    yield made
    made.close()


@pytest.mark.variants
def test_a_client_lists_and_reads_what_is_in_the_folder(folder: Path, client):
    files = {str(path.relative_to(folder / "b")): path.read_bytes() for path in (folder / "b").rglob("*")
             if path.is_file()}  # fmt: skip
    assert sorted(client.keys()) == sorted(files)
    top = {key if "/" not in key else key.split("/")[0] + "/" for key in files}
    assert {name.lstrip("/") for name in client.level("")} == top
    assert client.level("deep/er/") == {"deep/er/and/"}
    for key, body in files.items():
        assert client.size(key) == len(body)
        assert client.read(key) == body
        for start, stop in [(0, 1), (17, 4000), (len(body) - 1, len(body))] if body else []:
            assert client.read_range(key, start, stop) == body[start:stop]


@pytest.mark.variants
def test_a_client_follows_the_pages_of_a_listing(folder: Path, client):
    keys = [f"many/{i:04d}/x {i}" for i in range(1100)]
    for key in keys:
        path = folder / "b" / key
        path.parent.mkdir(parents=True)
        path.touch()
    assert sorted(key for key in client.keys() if key.startswith("many/")) == keys  # noqa: SIM118
    assert client.level("many/") == {f"many/{i:04d}/" for i in range(1100)}


def test_a_bucket_is_there_or_not(origin: Origin, raw: Raw):
    boto = Boto(origin)
    assert {each["Name"] for each in boto.client.list_buckets()["Buckets"]} == {"b", "other"}
    assert boto.client.get_bucket_location(Bucket="b")["LocationConstraint"] is None
    assert boto.client.head_bucket(Bucket="b")["ResponseMetadata"]["HTTPStatusCode"] == 200
    boto.close()
    assert raw("HEAD", "/nowhere")[0].status == 404
    for path in ("/nowhere/key", "/nowhere?list-type=2", "/nowhere?location"):
        response, body = raw("GET", path)
        assert (response.status, code_of(body)) == (404, "NoSuchBucket")


# Conditions, ranges and missing objects.


def test_the_headers_of_an_object(folder: Path, raw: Raw):
    head, nothing = raw("HEAD", "/b/plain")
    response, body = raw("GET", "/b/plain")
    assert (nothing, body) == (b"", body_of("plain"))
    for name in ("ETag", "Last-Modified", "Accept-Ranges", "Content-Length", "Content-Type"):
        assert head.headers[name] == response.headers[name]
        assert response.headers[name]
    assert response.headers["ETag"][0] == response.headers["ETag"][-1] == '"'
    assert parsedate_to_datetime(response.headers["Last-Modified"]).timestamp() == int(
        (folder / "b/plain").stat().st_mtime
    )


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_conditions_on_the_etag(folder: Path, raw: Raw, method: str):
    etag = raw("HEAD", "/b/plain")[0].headers["ETag"]
    for named in (etag, etag.strip('"'), f'"else", {etag}', "*"):
        assert raw(method, "/b/plain", If_Match=named)[0].status == 200
        response, body = raw(method, "/b/plain", If_None_Match=named)
        assert (response.status, body, response.headers["ETag"]) == (304, b"", etag)
    assert raw(method, "/b/plain", If_None_Match='"else"')[0].status == 200
    response, body = raw(method, "/b/plain", If_Match='"else"')
    assert response.status == 412
    assert method == "HEAD" or code_of(body) == "PreconditionFailed"


def test_the_etag_changes_with_the_object(folder: Path, raw: Raw):
    path = folder / "b/plain"
    seen = {raw("HEAD", "/b/plain")[0].headers["ETag"]}
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.add(raw("HEAD", "/b/plain")[0].headers["ETag"])
    path.with_name("new").write_bytes(body_of("plain"))
    os.utime(path.with_name("new"), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    path.with_name("new").rename(path)
    seen.add(raw("HEAD", "/b/plain")[0].headers["ETag"])
    assert len(seen) == 3


def test_content_etags_change_with_the_content_only(folder: Path):
    path, seen = folder / "b/plain", []
    with Origin(folder, content_etags=True) as running, Raw(running) as raw:
        for body in (body_of("plain"), body_of("plain"), b"another"):
            path.with_name("new").write_bytes(body)
            path.with_name("new").rename(path)
            seen.append(raw("HEAD", "/b/plain")[0].headers["ETag"])
            assert raw("GET", "/b/plain", If_Match=seen[-1])[1] == body
            boto = Boto(running)
            assert seen[-1] in {entry["ETag"] for page in boto._pages() for entry in page["Contents"]}
            boto.close()
    assert seen[0] == seen[1] != seen[2]


RANGES = {
    "bytes=0-0": (0, 1),
    "bytes=10-19": (10, 20),
    "bytes=4990-99999": (4990, 5000),
    "bytes=7-": (7, 5000),
    "bytes=-3": (4997, 5000),
    "bytes=-99999": (0, 5000),
}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_range(raw: Raw, method: str):
    for asked, (start, stop) in RANGES.items():
        response, body = raw(method, "/b/plain", Range=asked)
        assert response.status == 206
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/5000"
        assert response.headers["Content-Length"] == str(stop - start)
        assert body == (body_of("plain")[start:stop] if method == "GET" else b"")


def test_several_or_malformed_ranges_get_the_whole_object(raw: Raw):
    for asked in ("0-1,4-5", "5-4", "-", "a-b", "9" * 5000 + "-"):
        response, body = raw("GET", "/b/plain", Range=f"bytes={asked}")
        assert (response.status, body) == (200, body_of("plain")), asked
        assert response.headers["Content-Range"] is None
    assert raw("GET", "/b/plain", Range="lines=0-1")[0].status == 200


def test_a_range_outside_the_object(raw: Raw):
    for key, size, asked in [("plain", 5000, "5000-"), ("plain", 5000, "6000-7000"), ("plain", 5000, "-0"),
                             ("empty", 0, "0-0"), ("empty", 0, "-1")]:  # fmt: skip
        response, body = raw("GET", f"/b/{key}", Range=f"bytes={asked}")
        assert (response.status, code_of(body)) == (416, "InvalidRange"), asked
        assert response.headers["Content-Range"] == f"bytes */{size}"


def test_what_is_not_there(raw: Raw):
    codes = dict.fromkeys(["/b/missing", "/b/plain/", "/b/deep", "/b/deep/er/", "/b/" + "x" * 300], "NoSuchKey")
    for path, code in (codes | {"/nowhere/plain": "NoSuchBucket"}).items():
        response, body = raw("GET", path)
        assert (response.status, code_of(body)) == (404, code), path
        assert raw("HEAD", path)[0].status == 404


def test_what_the_server_does_not_do(raw: Raw):
    asked = [
        ("PUT", "/b/new"),
        ("DELETE", "/b/plain"),
        ("POST", "/b?delete"),
        ("GET", "/b"),
        ("GET", "/b?versions"),
        ("GET", "/b/plain?tagging"),
        ("GET", "/b/plain?partNumber=1"),
    ]
    for method, path in asked:
        response, body = raw(method, path)
        assert (response.status, code_of(body)) == (501, "NotImplemented"), path
    assert raw("GET", "/b/plain", If_Modified_Since="Thu, 01 Jan 2026 00:00:00 GMT")[0].status == 501
    assert raw("GET", "/b/plain?x-id=GetObject&X-Amz-Signature=0")[1] == body_of("plain")


def test_no_key_leads_out_of_the_folder(tmp_path: Path, folder: Path, raw: Raw):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    (folder / "loose").write_bytes(b"secret")
    (folder / "b/link").symlink_to(secret / "key")
    (folder / "b/linked").symlink_to(secret)
    (folder / "bucket").symlink_to(secret)
    os.mkfifo(folder / "b/pipe")
    paths = [
        "/b/../../secret/key",
        "/b/%2e%2e/%2e%2e/secret/key",
        "/b/..%2f..%2fsecret/key",
        "/../secret/key",
        "/%2e%2e/secret/key",
        "/..%2fsecret/key",
        f"/b/{secret}/key",
        f"/b/%2f{secret}/key",
        f"/{secret}/key",
        "/b/./plain",
        "/b/deep/../plain",
        "/b//plain",
        "/b/link",
        "/b/linked/key",
        "/bucket/key",
        "/b/../loose",
        "/./loose",
        "/b/pipe",
        "/b/plain%00",
        "/b%00/plain",
        "/b/%ff",
    ]
    for path in paths:
        for method in ("GET", "HEAD"):
            response, body = raw(method, path)
            assert response.status in (400, 404), path
            assert body != b"secret"
    for path in ("/?list-type=2", "/b?list-type=2", "/bucket?list-type=2", "/..?list-type=2", "/%2e%2e/?list-type=2"):
        listed = raw("GET", path)[1]
        for found in (b"<Key>link", b"<Key>pipe", b"<Key>key", b"<Name>bucket"):
            assert found not in listed, path


# Listings.

TREE = [
    "a",
    "a b",
    "a!/x",
    "a-b",
    "a.b",
    "a/b",
    "a/b.c",
    "a/c/d",
    "a/c/é",
    "a0",
    "b/a/a/a",
    "b/a/a-a",
    "b/a/a0",
    "é",
    "é/é",
]


def test_keys_come_in_utf8_order_whatever_the_folders(tmp_path: Path):
    keys = [key for key in TREE if f"{key}/" not in {f"{other[: len(key)]}/" for other in TREE if other != key
                                                     and other.startswith(f"{key}/")}]  # fmt: skip
    for key in keys:
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    in_order = sorted(keys, key=str.encode)
    cuts = {key[:end] for key in keys for end in range(len(key) + 1)} | {"zz", "a/zz"}
    for prefix, after in itertools.product(cuts, cuts | {cut + "~" for cut in cuts}):
        expected = [key for key in in_order if key.startswith(prefix) and key > after]
        assert list(keys_below(tmp_path, prefix, after)) == expected


names = st.text("ab/é ", min_size=1, max_size=6)


@given(st.sets(names, max_size=30), st.text("ab/", max_size=2), st.sampled_from(["", "/", "a", "b/", "é"]),
       st.integers(1, 5))  # fmt: skip
def test_pages_are_the_whole_listing_in_parts(keys: set[str], prefix: str, delimiter: str, max_keys: int):
    in_order = sorted((key for key in keys if key.startswith(prefix)), key=str.encode)
    expected: dict[str, bool] = {}
    for key in in_order:
        head, found, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
        expected[prefix + head + found if found else key] = bool(found)
    pages, token = list[Page](), ""
    while not pages or token:
        pages.append(page_of(in_order, prefix, delimiter, token, max_keys))
        token = pages[-1].token
        assert len(pages) <= max(1, len(expected)), "a page that leads nowhere"
    for number, page in enumerate(pages):
        part = list(expected)[number * max_keys : (number + 1) * max_keys]
        assert page.keys == [entry for entry in part if not expected[entry]]
        assert page.prefixes == [entry for entry in part if expected[entry]]
    assert len(pages) == max(1, -(-len(expected) // max_keys))


def listing(raw: Raw, **asked: str) -> ET.Element:
    response, body = raw(
        "GET", "/b?" + urlencode({"list-type": "2"} | {k.replace("_", "-"): v for k, v in asked.items()})
    )
    assert response.status == 200, body
    return ET.fromstring(body)


def texts(found: ET.Element, path: str) -> list[str]:
    return [each.text or "" for each in found.findall("/".join(XMLNS + part for part in path.split("/")))]


def test_the_fields_of_a_listing(raw: Raw):
    found = listing(raw, prefix="deep", delimiter="/", start_after="deep", max_keys="1")
    told = {name: texts(found, name) for name in ("Name", "Prefix", "Delimiter", "StartAfter", "KeyCount", "MaxKeys")}
    assert told == {"Name": ["b"], "Prefix": ["deep"], "Delimiter": ["/"], "StartAfter": ["deep"], "KeyCount": ["1"],
                    "MaxKeys": ["1"]}  # fmt: skip
    assert texts(found, "Contents/Key") == ["deep-er"]
    assert texts(found, "Contents/Size") == ["5000"]
    head = raw("HEAD", "/b/deep-er")[0]
    assert texts(found, "Contents/ETag") == [head.headers["ETag"]]
    modified = parsedate_to_datetime(head.headers["Last-Modified"])
    assert texts(found, "Contents/LastModified") == [f"{modified:%Y-%m-%dT%H:%M:%S}.000Z"]
    assert texts(found, "IsTruncated") == ["true"]
    token = texts(found, "NextContinuationToken")[0]
    rest = listing(raw, prefix="deep", delimiter="/", continuation_token=token)
    assert texts(rest, "CommonPrefixes/Prefix") == ["deep/"]
    assert texts(rest, "Contents/Key") == []
    assert texts(rest, "IsTruncated") == ["false"]
    assert texts(rest, "ContinuationToken") == [token]


def test_names_are_encoded_when_asked(raw: Raw):
    plain = texts(listing(raw), "Contents/Key")
    assert plain == sorted([*ODD_KEYS, "empty", "big"], key=str.encode)
    assert texts(listing(raw, encoding_type="url"), "Contents/Key") == [quote(key) for key in plain]
    assert texts(listing(raw, encoding_type="url", prefix="a "), "Prefix") == ["a%20"]


def test_arguments_of_a_listing(raw: Raw):
    assert texts(listing(raw, max_keys="0"), "KeyCount") == ["0"]
    assert texts(listing(raw, max_keys="0"), "IsTruncated") == ["false"]
    assert texts(listing(raw, max_keys="5000"), "MaxKeys") == ["1000"]
    for wrong in ("max-keys=-1", "max-keys=x", "continuation-token=*", "encoding-type=xml"):
        response, body = raw("GET", f"/b?list-type=2&{wrong}")
        assert (response.status, code_of(body)) == (400, "InvalidArgument")


# Faults.

NO_FAULT = dict.fromkeys(FAULTS, 0)


def test_without_odds_there_is_no_fault(origin: Origin, raw: Raw):
    for _ in range(20):
        assert raw("GET", "/b/plain")[1] == body_of("plain")
    assert origin.stats()["errors"] == NO_FAULT


def test_slow_down(origin: Origin, raw: Raw):
    origin.behave(slow_down=1)
    for _ in range(3):
        response, body = raw("GET", "/b/plain")
        assert (response.status, code_of(body)) == (503, "SlowDown")
    assert raw("HEAD", "/b/plain")[0].status == 200
    assert raw("GET", "/b?list-type=2")[0].status == 200
    assert origin.stats()["errors"] == NO_FAULT | {"slow_down": 3}


def test_reset(origin: Origin):
    origin.behave(reset=1)
    host, port = origin.endpoint_url.removeprefix("http://").split(":")
    for _ in range(5):
        origin.reset()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /b/big HTTP/1.1\r\nHost: x\r\n\r\n")
            received = 0
            with pytest.raises(ConnectionResetError):
                while piece := connection.recv(1 << 20):
                    received += len(piece)
        assert origin.stats()["get_bytes"] < BIG
        assert received < BIG
        assert origin.stats()["errors"] == NO_FAULT | {"reset": 1}


def test_short(origin: Origin, raw: Raw):
    origin.behave(short=1)
    lengths = set()
    for _ in range(5):
        response, body = raw("GET", "/b/big")
        assert (response.status, response.headers["Content-Length"], response.headers["Connection"]) == (
            200,
            str(BIG),
            None,
        )
        assert len(body) < BIG
        assert body == body_of("big", BIG)[: len(body)]
        lengths.add(len(body))
    assert len(lengths) == 5
    assert origin.stats()["get_bytes"] == sum(lengths)
    assert origin.stats()["errors"] == NO_FAULT | {"short": 5}
    origin.behave(short=0)
    assert raw("GET", "/b/big")[1] == body_of("big", BIG)


def test_an_empty_body_cannot_be_cut(origin: Origin, raw: Raw):
    origin.behave(short=1)
    for _ in range(2):
        assert raw("GET", "/b/empty")[1] == b""
    stats = origin.stats()
    assert (stats["get_requests"], stats["duplicate_gets"], stats["errors"]) == (2, 1, NO_FAULT)


def test_a_stalled_body_goes_on_after_the_stall(origin: Origin, raw: Raw):
    origin.behave(stalled=1, stall=0.2)
    started = time.monotonic()
    assert raw("GET", "/b/big")[1] == body_of("big", BIG)
    assert time.monotonic() - started >= 0.2
    assert origin.stats()["errors"] == NO_FAULT | {"stalled": 1}


def test_a_stalled_answer_ends_when_the_client_hangs_up(folder: Path, origin: Origin):
    origin.behave(stalled=1)
    process = psutil.Process(origin.pid)

    def sends_big() -> bool:
        return str(folder / "b/big") in {each.path for each in process.open_files()}

    sent = int(Faults(origin.behaviour).draw()[1] * BIG)
    with Raw(origin) as client:
        client.connection.request("GET", "/b/big")
        response = client.connection.getresponse()
        assert response.read(sent) == body_of("big", BIG)[:sent]
        assert sends_big()
        response.close()
    while sends_big():
        pass
    stats = origin.stats()
    assert stats["errors"] == NO_FAULT | {"stalled": 1}
    assert stats["get_bytes"] == sent


def test_leaving_does_not_wait_for_stalled_answers(folder: Path):
    behaviour = Behaviour(stalled=1)
    with Origin(folder, behaviour=behaviour) as origin:
        client = Raw(origin)
        client.connection.request("GET", "/b/big")
        response = client.connection.getresponse()
        response.read(int(Faults(behaviour).draw()[1] * BIG))
    assert origin._process.returncode == 0
    response.close()
    client.connection.close()


def test_replaced(folder: Path, origin: Origin, raw: Raw):
    old_body, path = body_of("big", BIG), folder / "b/big"
    modified = path.stat().st_mtime_ns
    origin.behave(replaced=1)
    before, body = raw("GET", "/b/big")
    assert (before.status, body) == (200, old_body)
    origin.behave(replaced=0)
    after, body = raw("GET", "/b/big")
    assert body == bytes(255 - byte for byte in old_body)
    assert after.headers["ETag"] != before.headers["ETag"]
    assert path.stat().st_mtime_ns > modified
    assert raw("GET", "/b/big", If_Match=before.headers["ETag"])[0].status == 412
    assert origin.stats()["errors"] == NO_FAULT | {"replaced": 1}
    assert [each.name for each in folder.iterdir() if each.is_file()] == []


def test_a_replaced_object_is_later_even_when_it_came_from_the_future(folder: Path, origin: Origin, raw: Raw):
    later = time.time_ns() + 10**15
    os.utime(folder / "b/plain", ns=(later, later))
    origin.behave(replaced=1)
    raw("GET", "/b/plain")
    assert (folder / "b/plain").stat().st_mtime_ns > later


MIXED = {"slow_down": 0.3, "short": 0.3, "replaced": 0.1}


def sequence(raw: Raw) -> list[tuple[int, int]]:
    answers = (raw("GET", "/b/plain") for _ in range(30))
    return [(response.status, len(body)) for response, body in answers]


def test_one_seed_gives_one_sequence_of_faults(folder: Path, origin: Origin, raw: Raw):
    origin.behave(**MIXED, seed=5)
    first = sequence(raw)
    with Origin(folder, behaviour=Behaviour(**MIXED, seed=5)) as other, Raw(other) as client:
        assert sequence(client) == first
    origin.behave(seed=5)
    assert sequence(raw) == first
    origin.behave(seed=6)
    assert sequence(raw) != first
    assert {status for status, _ in first} == {200, 503}
    assert len({length for _, length in first}) > 3


def test_odds_are_odds():
    faults = Faults(Behaviour(slow_down=0.2, stalled=0.5))
    drawn = Counter(faults.draw()[0] for _ in range(10_000))
    assert drawn.keys() == {"slow_down", "stalled", None}
    assert abs(drawn["slow_down"] - 2000) < 200
    assert abs(drawn["stalled"] - 5000) < 250


# Behaviour.


IMPOSSIBLE = [
    {"latency": -1},
    {"latency": float("nan")},
    {"latency": "1"},
    {"latency": None},
    {"stall": float("inf")},
    {"bytes_per_second": 0},
    {"host_bytes_per_second": -1},
    {"delay": -1},
    {"delayed": 1.1},
    {"short": 1.1},
    {"short": -0.1},
    {"short": 0.6, "reset": 0.6},
    {"slow_down": True},
    {"seed": 0.5},
]


def test_a_behaviour_that_cannot_be(origin: Origin):
    for wrong in IMPOSSIBLE:
        with pytest.raises(ConfigError):
            Behaviour(**wrong)
        with pytest.raises(ConfigError):
            origin.behave(**wrong)
        request = Request(f"{origin.endpoint_url}/__behaviour", json.dumps(wrong).encode(), method="PUT")
        with pytest.raises(HTTPError) as refused:
            urlopen(request)
        refused.value.close()
        assert refused.value.code == 400
    assert origin.behaviour == Behaviour()


def test_the_behaviour_is_shown_and_not_counted(origin: Origin, raw: Raw):
    origin.behave(latency=0.25, seed=3)
    origin.behave(latency=0)
    assert Behaviour(**json.loads(raw("GET", "/__behaviour")[1])) == Behaviour(seed=3)
    assert raw("GET", "/__other")[0].status == 404
    assert raw("PUT", "/__behaviour")[0].status == 400
    stats = origin.stats()
    assert not any(stats[name] for name in stats if name != "errors")


def test_latency_comes_before_every_answer(origin: Origin, raw: Raw):
    origin.behave(latency=0.1)
    for method, path in [("GET", "/b/plain"), ("HEAD", "/b/plain"), ("GET", "/b?list-type=2"), ("GET", "/b/missing")]:
        started = time.monotonic()
        raw(method, path)
        assert time.monotonic() - started >= 0.1


def test_a_delayed_answer_begins_later(origin: Origin, raw: Raw):
    origin.behave(delayed=1, delay=0.2)
    started = time.monotonic()
    assert raw("GET", "/b/plain")[0].status == 200
    assert time.monotonic() - started >= 0.2
    assert origin.stats()["errors"] == NO_FAULT | {"delayed": 1}


def test_all_connections_together_carry_no_more_than_the_rate_of_the_host(folder: Path, origin: Origin):
    rate, size, connections = 1_000_000, 50_000, 4
    (folder / "b/sized").write_bytes(bytes(size))
    origin.behave(bytes_per_second=100 * rate, host_bytes_per_second=rate)
    started = time.monotonic()
    with ThreadPoolExecutor(connections) as pool:
        answers = list(pool.map(lambda _: urlopen(origin.url("b", "sized")).read(), range(connections)))
    assert [len(answer) for answer in answers] == [size] * connections
    assert time.monotonic() - started >= (connections - 1) * size / rate


@pytest.mark.parametrize(("size", "times"), [(200_000, 1), (5000, 40)])
def test_a_connection_carries_no_more_than_its_rate(folder: Path, origin: Origin, raw: Raw, size: int, times: int):
    (folder / "b/sized").write_bytes(bytes(size))
    rate = 1_000_000
    origin.behave(bytes_per_second=rate)
    started = time.monotonic()
    for _ in range(times):
        assert len(raw("GET", "/b/sized")[1]) == size
    piece = rate / 100
    assert time.monotonic() - started >= (size * times - piece) / rate


# Counters.


class CountingClient(threading.Thread):
    """Send random requests for the thread's own objects. Count requests and received bytes."""

    def __init__(self, origin: Origin, number: int, sizes: dict[str, int]) -> None:
        super().__init__()
        self.origin, self.random, self.sizes = origin, random.Random(number), sizes
        self.counted: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        whole: set[tuple[str, int, int]] = set()
        try:
            with Raw(self.origin) as raw:
                for _ in range(120):
                    self.ask(raw, whole)
        except BaseException as failure:
            self.failure = failure

    def ask(self, raw: Raw, whole: set[tuple[str, int, int]]) -> None:
        match self.random.randrange(8):
            case 0:
                raw(*self.random.choice([("HEAD", "/b/plain"), ("HEAD", "/b"), ("HEAD", "/b/missing")]))
                self.counted["head_requests"] += 1
            case 1:
                raw("GET", self.random.choice(["/b?list-type=2", "/nowhere?list-type=2"]))
                self.counted["list_requests"] += 1
            case 2:
                raw("GET", self.random.choice(["/", "/b?location", "/b/plain?acl"]))
                self.counted["other_requests"] += 1
            case 3:
                asked = {"Range": "bytes=99999999-"} if self.random.random() < 0.5 else {"If_Match": '"else"'}
                raw("GET", "/b/" + self.random.choice(["missing", "plain"]), **asked)
                self.counted["get_requests"] += 1
            case _:
                self.get(raw, whole)

    def get(self, raw: Raw, whole: set[tuple[str, int, int]]) -> None:
        key, size = self.random.choice(list(self.sizes.items()))
        start, stop, asked = self.random.choice([(0, size, {}), (0, size // 2, {}), (size // 3, size, {})])
        if (start, stop) != (0, size):
            form = self.random.choice(["{0}-{1}"] if stop < size else ["{0}-{1}", "{0}-", "-{2}"])
            asked = {"Range": "bytes=" + form.format(start, stop - 1, size - start)}
        self.counted["get_requests"] += 1
        self.counted["duplicate_gets"] += (key, start, stop) in whole
        _, body = raw("GET", f"/b/{key}", **asked)
        self.counted["get_bytes"] += len(body)
        if len(body) == stop - start:
            whole.add((key, start, stop))
        else:
            self.counted["short"] += 1


def test_the_counters_are_what_the_clients_counted(folder: Path, origin: Origin):
    clients = []
    for number in range(4):
        sizes = {f"{number}-{size}": size for size in (3, 70_000, BIG)}
        for key, size in sizes.items():
            (folder / "b" / key).write_bytes(bytes(size))
        clients.append(CountingClient(origin, number, sizes))
    origin.behave(short=0.2)
    for client in clients:
        client.start()
    for client in clients:
        client.join()
        assert client.failure is None
    expected = sum((client.counted for client in clients), Counter[str]())
    stats = origin.stats()
    assert stats.pop("errors") == NO_FAULT | {"short": expected.pop("short")}
    assert 2 <= stats.pop("most_gets_at_once") <= 4
    assert stats == expected
    assert all(expected.values())
    origin.reset()
    stats = origin.stats()
    assert stats.pop("errors") == NO_FAULT
    assert not any(stats.values())


def test_who_has_an_answer_finds_it_counted(origin: Origin, raw: Raw):
    for number in range(1, 200):
        raw("GET", "/b/plain")
        stats = origin.stats()
        assert (stats["get_requests"], stats["get_bytes"], stats["duplicate_gets"]) == (
            number,
            5000 * number,
            number - 1,
        )


def test_another_version_is_no_duplicate(folder: Path, origin: Origin, raw: Raw):
    origin.behave(replaced=1)
    for _ in range(3):
        raw("GET", "/b/plain")
    assert origin.stats()["duplicate_gets"] == 0


def test_what_did_not_leave_is_not_counted(folder: Path, monkeypatch: pytest.MonkeyPatch):
    async def breaks(loop, transport, file, offset, count):
        file.seek(offset + 1000)
        raise ConnectionResetError

    async def get() -> int:
        server = Server(folder, Behaviour())
        await server.answer(make_mocked_request("GET", "/b/big", transport=Transport()))
        return server.tally.get_bytes

    class Transport(asyncio.Transport):
        def get_extra_info(self, name, default=None):
            return default

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sendfile", breaks)
    assert asyncio.run(get()) == 1000


# The server process.


def test_s3fs_writes_whole_objects_and_parts(tmp_path: Path):
    """Before it sends a body, it waits until the server wants it. Its parts may come in any order."""
    (tmp_path / "bucket").mkdir()
    content = random.Random(0).randbytes(11 << 20)
    with Origin(tmp_path, writable=True) as origin:
        fs = s3fs.S3FileSystem(**origin.storage_options, skip_instance_cache=True)
        fs.pipe_file("bucket/small", b"abc")
        fs.pipe_file("bucket/large", content, chunksize=5 << 20)
        assert (fs.cat_file("bucket/small"), fs.cat_file("bucket/large")) == (b"abc", content)
        fs.rm("bucket/small")
        assert fs.ls("bucket", refresh=True) == ["bucket/large"]


def test_a_part_waits_for_the_first_one_whose_size_tells_its_place(tmp_path: Path):
    (tmp_path / "bucket").mkdir()
    with Origin(tmp_path, writable=True) as origin, ThreadPoolExecutor() as threads:
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=origin.endpoint_url, **keys)
        upload = client.create_multipart_upload(Bucket="bucket", Key="x")["UploadId"]

        def part(number: int, body: bytes) -> dict[str, object]:
            sent = client.upload_part(Bucket="bucket", Key="x", UploadId=upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        last = threads.submit(part, 2, b"yy")
        while origin.stats()["other_requests"] < 2:  # The server has its headers.
            pass
        parts = [part(1, b"xxxx"), last.result(60)]
        client.complete_multipart_upload(Bucket="bucket", Key="x", UploadId=upload, MultipartUpload={"Parts": parts})
    assert (tmp_path / "bucket/x").read_bytes() == b"xxxxyy"


def test_the_script_says_what_its_options_are():
    script = Path(__file__).parent.parent.parent / "benchmarks/origin/__main__.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.split())
    for option in ("host", "port", "latency", "bytes-per-second", "slow-down", "reset", "short", "stalled", "replaced"):
        assert f"--{option}" in text
    assert "seconds" in text and "probability (0 to 1)" in text and "bytes per second" in text


def test_the_script_serves_with_its_options_until_a_signal(folder: Path):
    script = Path(__file__).parent.parent.parent / "benchmarks/origin/__main__.py"
    command = [sys.executable, str(script), str(folder), "--slow-down=1", "--seed=4"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        with urlopen(f"{url}/__behaviour") as answer:
            assert Behaviour(**json.load(answer)) == Behaviour(slow_down=1, seed=4)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_what_cannot_be_served(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="did not start"), Origin(tmp_path / "missing"):
        pass
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"dataload\[bench\]"), Origin(folder):
        pass


def test_the_server_ends_with_its_parent(folder: Path):
    program = (
        "import sys\nfrom dataload.benchmarks.origin import Origin\n"
        f"with Origin({str(folder)!r}) as origin:\n"
        "    print(origin.pid, origin.endpoint_url, flush=True)\n    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as parent:
        pid, url = parent.stdout.readline().split()
        server = os.pidfd_open(int(pid))
        parent.kill()
    ended, _, _ = select.select([server], [], [], 60)
    os.close(server)
    assert ended
    host, port = url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))

"""Alluxio as the origin, by the real alluxiofs: against a stand-in that speaks its REST contract, and a real cluster.

The stand-in is this file's: it answers as Alluxio's documentation and client say that a worker does. `ALLUXIO_URL`
(s3://bucket/folder of Parquet files, mounted in it) and `ALLUXIO_WORKERS` (host:port,…) name a real one.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache.origin.origin import Origin, introduce
from dataload.runtime.redact import without_credentials

DATA_PORT = 29998  # fixed in alluxiofs
alluxiofs = pytest.importorskip("alluxiofs", reason="no alluxiofs here: pip install alluxiofs")


class StandIn(ThreadingHTTPServer):
    """A stand-in for one worker. `objects` maps URLs in the store below; the worker lists them as /mnt/<path>."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Worker)
        self.objects: dict[str, bytes] = {}
        self.sent = 0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def said_of(self, url: str) -> dict[str, Any]:
        body = self.objects.get(url)
        kind = {"mType": "directory", "mLength": 0} if body is None else {"mType": "file", "mLength": len(body)}
        # The access count grows with each request.
        self.asked = getattr(self, "asked", 0) + 1
        return {**kind, "mPath": place(url), "mUfsPath": url, "mLastAccessTimeMs": self.asked, "mContentHash": ""}


def place(url: str) -> str:
    return f"/mnt/{url.partition('://')[2]}"


class Worker(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        path = parse_qs(asked.query).get("path", [""])[0].rstrip("/")
        if asked.path == "/v1/node":
            self.answer(json.dumps({"Host": "127.0.0.1", "HttpServerPort": self.server.server_port}).encode())
        elif asked.path == "/v1/info":
            known = path in self.server.objects or any(url.startswith(f"{path}/") for url in self.server.objects)
            self.answer(json.dumps([self.server.said_of(path)]).encode(), 200 if known else 500)
        elif asked.path == "/v1/files":
            found = [self.server.said_of(url) for url in self.server.objects if url.rpartition("/")[0] == path]
            self.answer(json.dumps(found).encode())
        else:
            body = next(body for url, body in self.server.objects.items() if place(url) == asked.path)
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            self.answer(body[int(first) : int(last) + 1], 206)

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body) if status == 206 else 0

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def workers() -> Iterator[tuple[StandIn, StandIn]]:
    """Start two stand-ins: one answers metadata requests, the other serves data."""
    try:
        data = StandIn(DATA_PORT)
    except OSError as error:
        pytest.skip(f"port {DATA_PORT} is taken: {error}")
    told = StandIn(0)
    data.objects = told.objects
    yield told, data
    told.close()
    data.close()


def options(bucket: Any, hosts: str) -> dict[str, Any]:
    """Return options that every release of alluxiofs accepts."""
    known = inspect.signature(alluxiofs.AlluxioFileSystem.__init__).parameters
    own = {"worker_hosts": hosts, "target_protocol": "s3", "target_options": bucket.options}
    return {**own, **({"logger": logging.getLogger("tests.alluxio")} if "logger" in known else {})}


def test_files_come_through_alluxio_once(bucket: Any, tmp_path: Path, workers: tuple[StandIn, StandIn]) -> None:
    told, data = workers
    body = np.random.default_rng(0).bytes(3_000_000)
    told.objects[bucket.url("data/x")] = body
    fs = fsspec.filesystem(
        "tiercache",
        target_protocol="alluxiofs",
        target_options=options(bucket, f"127.0.0.1:{told.server_port}"),
        cache_dir=str(tmp_path / "cache"),
        block_bytes="1MiB",
    )
    bucket.server.reset()
    for _ in range(2):
        assert fs.cat_file(f"{bucket.name}/data/x") == body
        assert fs.cat_file(f"{bucket.name}/data/x", 1_000_000, 1_000_010) == body[1_000_000:1_000_010]
    assert data.sent == len(body)
    assert bucket.server.stats()["get_bytes"] == 0


def test_a_dataset_comes_through_alluxio_once(
    bucket: Any, cache: CacheConfig, table_of: Any, workers: tuple[StandIn, StandIn]
) -> None:
    told, data = workers
    for number in range(2):
        sink = pa.BufferOutputStream()
        pq.write_table(table_of(500 * number, 500), sink)
        told.objects[bucket.url(f"data/{number}.parquet")] = sink.getvalue().to_pybytes()
    through = options(bucket, f"127.0.0.1:{told.server_port}")
    dataset = make_dataset(f"alluxiofs://{bucket.name}/data", storage_options=through, cache=cache)
    loader = make_loader(dataset, 50)
    for _ in range(2):
        assert sorted(np.concatenate([batch["row_id"] for batch in loader]).tolist()) == list(range(1000))
    assert loader.stats().bytes_origin == 0
    assert 0 < data.sent <= 2 * sum(map(len, told.objects.values()))


def test_how_to_get_in_is_no_part_of_what_the_store_is_called(bucket: Any) -> None:
    """Credentials do not enter the digest: other keys find the same cached data, and a digest reveals no key."""
    introduce()

    def identity(hosts: str, secret: str) -> str:
        into = {"key": secret, "secret": secret, "client_kwargs": {"aws_session_token": secret, "region_name": "x"}}
        through = {**options(bucket, hosts), "target_options": into, "options": {"alluxio.security.password": secret}}
        return Origin(fsspec.filesystem("alluxiofs", **through, skip_instance_cache=True)).identity

    assert identity("127.0.0.1:1", "one") == identity("127.0.0.1:1", "other")
    assert identity("127.0.0.1:1", "one") != identity("127.0.0.1:2", "one")


def test_what_a_store_holds_is_part_of_what_it_is_called(tmp_path: Path) -> None:
    """This also holds for options that look like credentials."""

    def reference(**found: Any) -> str:
        return Origin(fsspec.filesystem("reference", **found, skip_instance_cache=True)).identity

    one, other = ({"tokens/0": [str(tmp_path / name)]} for name in ("one", "other"))
    assert reference(fo=one) != reference(fo=other)
    assert reference(fo=one) == reference(fo=dict(one))
    url = "https://user:word@host/get?id={}&X-Amz-Signature={}"
    assert without_credentials(url.format(1, "a")) == without_credentials(url.format(1, "b")) == "https://host/get?id=1"
    assert without_credentials(url.format(1, "a")) != without_credentials(url.format(2, "a"))


@pytest.mark.skipif("ALLUXIO_URL" not in os.environ, reason="no real Alluxio named: set ALLUXIO_URL, ALLUXIO_WORKERS")
def test_a_real_alluxio(cache: CacheConfig) -> None:
    through = {"worker_hosts": os.environ["ALLUXIO_WORKERS"], "target_protocol": "s3"}
    folder = os.environ["ALLUXIO_URL"].removeprefix("s3://")
    dataset = make_dataset(f"alluxiofs://{folder}", storage_options=through, cache=cache)
    loader = make_loader(dataset, 64)
    for _ in range(2):
        assert sum(len(next(iter(batch.values()))) for batch in loader) == len(dataset)
    assert loader.stats().bytes_origin == 0

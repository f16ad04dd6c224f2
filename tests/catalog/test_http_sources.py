"""Sources over HTTP: a file takes one request to list, and a page of links is a folder."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attempts import fail_at_once
from http_servers import serving

from dataload import make_dataset
from dataload.benchmarks.origin.s3 import resolve_range
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.errors import OriginError, OriginNotFound

FILES = [f"/data/{number}.parquet" for number in range(4)]


class _Server(http.server.BaseHTTPRequestHandler):
    """A server of four files in a folder, whose page has links to them."""

    protocol_version = "HTTP/1.1"
    bodies: dict[str, bytes]
    mimetype: str | None = None  # of files
    requests: list[tuple[str, str, bool]]  # method, path, whether for a range
    together: threading.Barrier | None = None  # of the HEAD requests
    status = 200

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append((self.command, path, "Range" in self.headers))
        if self.command == "HEAD" and self.together is not None:
            self.together.wait(200)
        body = self.bodies.get(path.rstrip("/"))
        if body is None or self.status != 200:
            self._answer(404 if body is None else self.status, b"", None)
        elif path in FILES:
            span = resolve_range(self.headers.get("Range", ""), len(body)) or range(len(body))
            partial = (
                {"Content-Range": f"bytes {span.start}-{span.stop - 1}/{len(body)}"} if len(span) < len(body) else {}
            )
            self._answer(206 if partial else 200, body[span.start : span.stop], self.mimetype, ETag='"1"', **partial)
        else:
            self._answer(200, body, "text/html")

    do_HEAD = do_GET  # noqa: N815 (a name of http.server)

    def _answer(self, status: int, body: bytes, mimetype: str | None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "Content-Type": mimetype, **headers}.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Server]]]:
    """Return the URL of a server, and its class."""
    bodies = {"/data": "".join(f'<a href="{name}">x</a>' for name in FILES).encode()}
    for number, name in enumerate(FILES):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"x": [number]}), sink)
        bodies[name] = sink.getvalue().to_pybytes()
    kind = type("Server", (_Server,), {"bodies": bodies, "requests": []})
    with serving(kind) as url:
        yield url, kind


def heads(kind: type[_Server]) -> list[str]:
    return sorted(path for command, path, _ in kind.requests if command == "HEAD")


@pytest.mark.parametrize("mimetype", [None, "application/octet-stream"])
@pytest.mark.parametrize("query", ["", "?X-Amz-Signature=0"])
def test_a_list_of_files_takes_a_request_each_at_the_same_time(
    server: tuple[str, type[_Server]], query: str, mimetype: str | None
) -> None:
    url, kind = server
    kind.together, kind.mimetype = threading.Barrier(len(FILES)), mimetype
    dataset = make_dataset([f"{url}{name}{query}" for name in FILES], cache=False)
    assert [row["x"] for row in dataset.__getitems__([0, 1, 2, 3])] == [0, 1, 2, 3]
    assert heads(kind) == FILES
    assert all(is_range for command, _, is_range in kind.requests if command == "GET"), "a whole file was requested"


def test_a_file_is_found_by_one_request(server: tuple[str, type[_Server]], tmp_path: Path) -> None:
    url, kind = server
    fs = TierCacheFileSystem("http", cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    assert fs.find(f"{url}{FILES[0]}") == [f"{url}{FILES[0]}"]
    assert fs.size(f"{url}{FILES[0]}") == len(kind.bodies[FILES[0]])
    assert kind.requests == [("HEAD", FILES[0], False)]


@pytest.mark.parametrize("path", ["/data", "/data/", "/data/*.parquet", "/data/[0-3].parquet"])
def test_a_page_of_links_is_a_folder(server: tuple[str, type[_Server]], path: str) -> None:
    url, _ = server
    assert len(make_dataset(f"{url}{path}", cache=False)) == len(FILES)


def test_a_page_without_links_is_a_file(server: tuple[str, type[_Server]]) -> None:
    url, kind = server
    kind.mimetype = "text/html"
    assert len(make_dataset(f"{url}{FILES[0]}", cache=False)) == 1


@pytest.mark.parametrize("path", ["/typo", "/typo/", "/typo.parquet?X-Amz-Signature=0"])
def test_a_missing_file_is_named(server: tuple[str, type[_Server]], path: str) -> None:
    with pytest.raises(OriginNotFound, match=r"^no objects at .*typo"):
        make_dataset(f"{server[0]}{path}", cache=False)


@pytest.mark.parametrize("status", [403, 503])
def test_a_file_that_the_server_refuses_is_no_missing_one(
    server: tuple[str, type[_Server]], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_once(monkeypatch)
    url, kind = server
    kind.status = status
    fs = TierCacheFileSystem("http", cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    for find in (fs.find, fs.blocks.origin.list):
        with pytest.raises(OriginError, match=str(status)):
            find(f"{url}{FILES[0]}")

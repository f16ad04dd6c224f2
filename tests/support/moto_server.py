"""An S3 server inside this process that counts requests and bytes: moto's S3 behind persistent connections.

werkzeug's handler closes every connection and waits 10 ms after each answer. This one keeps connections alive.
"""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pq
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import ThreadedWSGIServer

from dataload.runtime.counters import Counters

STATS_PATH = "/__stats"
# Query keys of requests for the metadata or the upload of an object.
SUBRESOURCES = {"acl", "attributes", "legal-hold", "retention", "tagging", "torrent", "uploadId", "uploads"}
CHUNK = 1 << 20

WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """An answered request.

    Args:
        method: HTTP method.
        path: Path of the URL.
        range: Range header, or "".
        status: HTTP status of the answer.
        num_bytes: Length of the answer's body.
    """

    method: str
    path: str
    range: str
    status: int
    num_bytes: int


class S3Server:
    """An S3 endpoint on a free port of 127.0.0.1.

    It needs no AWS environment and patches nothing. moto keeps its objects per process, so that only one server can
    run at a time. The end of the block deletes every bucket, closes every connection and joins every thread.

    Args:
        wrap: Wraps the WSGI application, to inject faults or delays. The counters include its answers.

    Example:
        with S3Server() as server:
            filesystem = S3FileSystem(**server.storage_options)
    """

    def __init__(self, *, wrap: Callable[[WSGIApp], WSGIApp] | None = None) -> None:
        self._wrap = wrap
        self._counters = Counters()
        self._requests: list[Sent] = []

    def __enter__(self) -> Self:
        app: WSGIApp = create_backend_app("s3")
        self._http = _HTTPServer(self._wrap(app) if self._wrap else app, self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        for account in get_backend("s3").values():
            account.reset()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def stats_url(self) -> str:
        """URL of `stats()` as JSON, for other processes."""
        return self.endpoint_url + STATS_PATH

    @property
    def storage_options(self) -> dict[str, Any]:
        """Arguments for `s3fs.S3FileSystem`."""
        return {
            "key": "testing",
            "secret": "testing",
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    @property
    def requests(self) -> list[Sent]:
        """The requests answered since the start or the last `reset()`, oldest first."""
        return list(self._requests)

    def stats(self) -> dict[str, int]:
        """Return totals since the start or the last `reset()`, including answers with errors.

        A client that has an answer finds it counted. An answer that the client aborted may count up to 1 MiB too much.

        Returns:
            get_requests: GETs of object data. get_bytes: bytes of their bodies. head_requests: HEADs of objects or
            buckets. list_requests: listings. other_requests: all other requests, such as uploads.
        """
        names = ("get_requests", "get_bytes", "head_requests", "list_requests", "other_requests")
        return dict.fromkeys(names, 0) | {name: int(total) for name, total in self._counters.snapshot().items()}

    def reset(self) -> None:
        """Set all counters to zero. The objects stay."""
        self._counters = Counters()
        self._requests = []

    def count(self, environ: dict[str, Any], status: int, body: list[bytes]) -> Iterator[memoryview]:
        """Count a request whose answer is about to be sent. Return the body in pieces, each counted when it is sent."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        kind = classify(method, path, environ["QUERY_STRING"])
        self._counters.add(**{f"{kind}_requests": 1})
        self._requests.append(Sent(method, path, environ.get("HTTP_RANGE", ""), status, sum(map(len, body))))
        return counted_pieces(body, self._counters if kind == "get" else Counters())


def counted_pieces(body: list[bytes], counters: Counters) -> Iterator[memoryview]:
    for whole in body:
        for start in range(0, len(whole), CHUNK):
            piece = memoryview(whole)[start : start + CHUNK]
            counters.add(get_bytes=len(piece))
            yield piece


def classify(method: str, path: str, query: str) -> str:
    """Return the kind of a path-style S3 request: "get" (object data), "head", "list" or "other"."""
    if method == "HEAD":
        return "head"
    _, _, key = path.lstrip("/").partition("/")
    parameters = parse_qs(query, keep_blank_values=True).keys()
    if method != "GET" or (key and parameters & SUBRESOURCES):
        return "other"
    return "get" if key else "list"


class _HTTPServer(ThreadedWSGIServer):
    """An HTTP server that closes its open connections and joins their threads when it is closed."""

    def __init__(self, app: WSGIApp, owner: S3Server) -> None:
        self.owner = owner
        self.open: dict[socket.socket, threading.Thread] = {}
        super().__init__("127.0.0.1", 0, app, handler=_Connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self.open[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        self.open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection, thread in list(self.open.items()):
            with suppress(OSError):  # the client closed the connection first
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for this client's next request
            thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("connection from %s failed", client_address)


class _Connection(MotoRequestHandler):
    """The connection of one client, which may send many requests."""

    server: _HTTPServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        owner = self.server.owner
        environ = self.make_environ()
        if environ["PATH_INFO"] == STATS_PATH:
            stats = json.dumps(owner.stats()).encode()
            self.answer(200, [("Content-Type", "application/json")], len(stats), [stats])
            return
        chunked = environ.pop("HTTP_TRANSFER_ENCODING", None)
        received = environ["wsgi.input"].read(-1 if chunked else int(environ.get("CONTENT_LENGTH") or 0))
        environ |= {"wsgi.input": io.BytesIO(received), "CONTENT_LENGTH": str(len(received))}
        status, headers, body = self.call_app(environ)
        if self.command == "HEAD" or status in (204, 304):
            body = []
        self.answer(status, headers, sum(map(len, body)), owner.count(environ, status, body))

    def call_app(self, environ: dict[str, Any]) -> tuple[int, list[tuple[str, str]], list[bytes]]:
        """Return status, headers and body of the application's answer. Log an exception and return 500."""
        status, headers, body = 500, [("Content-Type", "text/plain")], list[bytes]()

        def start_response(line: str, given: list[tuple[str, str]], _exc_info: Any = None, /) -> Callable[..., object]:
            nonlocal status, headers
            status, headers = int(line[:3]), given
            return body.append

        try:
            answer = self.server.app(environ, start_response)
            try:
                body += answer
            finally:
                if hasattr(answer, "close"):
                    answer.close()
        except Exception:
            _log.exception("%s %s failed", environ["REQUEST_METHOD"], environ["PATH_INFO"])
            return 500, [("Content-Type", "text/plain")], [b"the server's application failed; see its log"]
        return status, headers, body

    def answer(
        self, status: int, headers: list[tuple[str, str]], num_bytes: int, pieces: Iterable[bytes | memoryview]
    ) -> None:
        """Send an answer whose body has `num_bytes` in `pieces`."""
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        if not lengths and status not in (204, 304):
            self.send_header("Content-Length", str(num_bytes))
        elif self.command != "HEAD" and lengths and int(lengths[0]) != num_bytes:
            self.close_connection = (
                True  # the wrapped application truncated its body: close, so that the client notices
            )
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)

    def log(self, kind: str, message: str, *args: Any) -> None:
        """Print nothing: requests are counted."""


@dataclass
class Bucket:
    """A new bucket on the S3 server, with counters at zero."""

    name: str
    server: S3Server
    client: Any

    @property
    def options(self) -> dict[str, Any]:
        return self.server.storage_options

    def url(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=body)

    def put_table(self, key: str, table: pa.Table, **options: Any) -> int:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, **options)
        body = sink.getvalue().to_pybytes()
        self.put(key, body)
        return len(body)

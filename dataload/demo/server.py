"""An S3 server inside this process that counts what it sends: moto's S3 behind our own HTTP/1.1 connections.

werkzeug's handler closes every connection and waits 10 ms after each answer; this one keeps connections alive.
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

from moto.backends import get_backend
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import ThreadedWSGIServer

from dataload.runtime.counters import Counters

STATS_PATH = "/__stats"
# Query keys that make a request on an object one about its metadata or its upload.
SUBRESOURCES = {"acl", "attributes", "legal-hold", "retention", "tagging", "torrent", "uploadId", "uploads"}
CHUNK = 1 << 20

WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """One answered request: its method, path, Range header ("" for none), status and length of the body."""

    method: str
    path: str
    range: str
    status: int
    num_bytes: int


class S3Server:
    """`with S3Server() as server:` an S3 endpoint at `server.endpoint_url`, on a free port of 127.0.0.1.

    wrap: optional `wrap(app) -> app` around the WSGI application, to inject faults or delays; what it sends is counted.

    Needs no AWS environment and patches nothing. moto keeps its objects per process: one server at a time, and
    leaving the block deletes every bucket, closes every connection and joins every thread.
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
        """Where other processes GET what `stats()` returns, as JSON."""
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
        """Every request answered since the start or the last `reset()`, oldest first."""
        return list(self._requests)

    def stats(self) -> dict[str, int]:
        """Totals since the start or the last `reset()`, whatever the status of the answers.

        get_requests, get_bytes: GETs of objects' data and the body bytes handed to the connection for them.
        head_requests, list_requests: HEADs of objects or buckets; listings. other_requests: uploads and all the rest.

        Who has an answer finds it counted. Of an answer that the client gave up on, up to 1 MiB too much is.
        """
        names = ("get_requests", "get_bytes", "head_requests", "list_requests", "other_requests")
        return dict.fromkeys(names, 0) | {name: int(total) for name, total in self._counters.snapshot().items()}

    def reset(self) -> None:
        """Counts start from zero; the objects stay."""
        self._counters = Counters()
        self._requests = []

    def count(self, environ: dict[str, Any], status: int, body: list[bytes]) -> Iterator[memoryview]:
        """Counts a request whose answer is about to leave; returns the body in pieces, each counted as it goes."""
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
    """What a path-style S3 request is: "get" (an object's data), "head", "list" or "other"."""
    if method == "HEAD":
        return "head"
    _, _, key = path.lstrip("/").partition("/")
    asked = parse_qs(query, keep_blank_values=True).keys()
    if method != "GET" or (key and asked & SUBRESOURCES):
        return "other"
    return "get" if key else "list"


class _HTTPServer(ThreadedWSGIServer):
    """Knows its open connections and their threads, so that closing it ends them all."""

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
            with suppress(OSError):  # the client hung up first
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for this client's next request
            thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - http.server's signature
        _log.exception("connection from %s failed", client_address)


class _Connection(MotoRequestHandler):
    """One client's connection: many requests, each body read whole, each answer with its length."""

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
        """(status, headers, body in pieces); 500 with the traceback in the log when the application raises."""
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
        except Exception:  # noqa: BLE001 - whatever it is, the client gets an answer
            _log.exception("%s %s failed", environ["REQUEST_METHOD"], environ["PATH_INFO"])
            return 500, [("Content-Type", "text/plain")], [b"the server's application failed; see its log"]
        return status, headers, body

    def answer(
        self, status: int, headers: list[tuple[str, str]], num_bytes: int, pieces: Iterable[bytes | memoryview]
    ) -> None:
        """Sends an answer whose body, in `pieces`, has `num_bytes`."""
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        if not lengths and status not in (204, 304):
            self.send_header("Content-Length", str(num_bytes))
        elif self.command != "HEAD" and lengths and int(lengths[0]) != num_bytes:
            self.close_connection = True  # a wrapped application cut its body short: hanging up is what a client sees
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)

    def log(self, kind: str, message: str, *args: Any) -> None:
        """Silent: requests are counted, not printed."""

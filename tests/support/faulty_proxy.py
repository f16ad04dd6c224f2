"""A proxy of an S3 server that spoils some answers: 503, bodies that are cut, and answers to writes that are lost."""

from __future__ import annotations

import http.client
import http.server
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from http_servers import serving

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    target: str
    share: float  # of requests, for each fault
    denied: str | None = None  # matches requests such as "PUT /bucket/key", for which the credentials do not suffice
    dropped: str | None = None  # a header of requests that the store does not know, and ignores
    draw: random.Random
    counts: Counter[str]
    mutex: threading.Lock

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.denied and re.search(self.denied, f"{self.command} {self.path}"):
            self.reply("denied", 403, {"Content-Type": "application/xml"}, DENIED)
            return
        with self.mutex:
            fault = self.draw.random()
        if fault < self.share:
            self.reply("slow down", 503, {"Content-Type": "application/xml"}, SLOW_DOWN)
            return
        status, headers, answer = self.forwarded(body)
        if self.command in ("PUT", "POST") and fault < 2 * self.share:
            self.counts["lost"] += 1
            self.close_connection = True
        elif self.command == "GET" and len(answer) > 1 and fault < 2 * self.share:
            self.reply("cut", status, headers, answer[: len(answer) // 2], len(answer))
            self.close_connection = True
        else:
            length = int(headers.get("Content-Length", 0)) if self.command == "HEAD" else len(answer)
            self.reply("whole", status, headers, answer, length)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 (names of http.server)

    def forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.target)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != self.dropped}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def reply(self, kind: str, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.counts[kind] += 1
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # The client has gone.

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def faulty_proxy(
    endpoint: str, share: float, seed: int, denied: str | None = None, dropped: str | None = None
) -> Iterator[tuple[str, Counter[str]]]:
    """Serve a proxy of an endpoint for the duration of the block. Yield its URL, and the answers by kind."""
    counts: Counter[str] = Counter()
    known = {
        "target": urlsplit(endpoint).netloc,
        "share": share,
        "draw": random.Random(seed),
        "counts": counts,
        "denied": denied,
        "dropped": dropped,
    }
    with serving(type("Handler", (_Handler,), {**known, "mutex": threading.Lock()})) as url:
        yield url, counts

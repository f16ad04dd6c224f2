"""An S3 server of tests whose answers are wrong in one way or another, as those of real stores are."""

from __future__ import annotations

import http.server
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import md5
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from http_servers import serving

from dataload.benchmarks.origin.listing import page_of
from dataload.benchmarks.origin.s3 import document, element, group, resolve_range

THEN = 1_700_000_000.0  # when objects were written, in seconds


@dataclass
class Stored:
    """An object."""

    data: bytes
    modified: float = THEN
    version_id: str | None = None

    @property
    def tag(self) -> str:
        return f'"{md5(self.data).hexdigest()}"'


@dataclass
class Asked:
    """A request.

    Attributes:
        kind: "list", "get", "head" or "other".
        number: How many requests of this kind came before.
    """

    method: str
    key: str
    query: dict[str, str]
    headers: Any
    kind: str
    number: int

    @property
    def access_key(self) -> str:
        """The access key that signed the request."""
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        return found[1] if found else ""


@dataclass
class Answer:
    """An answer. `pause`: seconds before each part of the body, of which there are `parts`."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    parts: int = 1
    cut: int | None = None  # bytes of the body after which the connection is closed
    reset: bool = False  # by RST

    @classmethod
    def error(cls, status: int, code: str = "", message: str = "As the test wants it", **headers: str) -> Answer:
        body = document("Error", element("Code", code), element("Message", message), namespace="") if code else ""
        return cls(status, body.encode(), {name.replace("_", "-"): value for name, value in headers.items()})


@dataclass
class Store:
    """The bucket "bucket" and how it answers.

    Attributes:
        listing: "v2"; "tokenless" (it says that more follows, without a token); "v1" (it knows markers alone);
            "repeating" (each token leads to the second page); "folders" ("a/x" comes before "a-x"); "endless" (a page
            without names follows for ever).
        page: Most names of a page of a listing.
        tags: Whether answers and listings have ETags. "listed": listings alone.
        dates: Whether answers and listings have the time of the last change.
        fault: Returns the answer to a request, or None for the right one; or changes the right one, which it is given.
    """

    objects: dict[str, Stored] = field(default_factory=dict)
    listing: str = "v2"
    page: int = 1000
    tags: bool | str = True
    dates: bool = True
    conditions: bool = True  # whether If-Match is respected
    region: str = "us-east-1"
    fault: Callable[[Asked], Answer | None] | None = None
    spoil: Callable[[Asked, Answer], Answer] | None = None
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    connections: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def options(self) -> dict[str, Any]:
        return {"key": "a-key", "secret": "a-secret", "endpoint_url": self.url}

    def put(self, key: str, data: bytes, modified: float = THEN) -> None:
        self.objects[key] = Stored(data, modified)

    def count(self, kind: str) -> int:
        return sum(asked.kind == kind for asked in self.asked)

    def note(self, method: str, path: str, headers: Any) -> Asked:
        parts = urlsplit(path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        kind = "other" if method not in ("GET", "HEAD") else method.lower() if key else "list"
        if kind == "list" and (method == "HEAD" or "location" in query):
            kind = "other"
        with self._lock:
            asked = Asked(method, key, query, headers, kind, self.count(kind))
            self.asked.append(asked)
        return asked

    def answer(self, asked: Asked) -> Answer:
        found = self.fault(asked) if self.fault else None
        if found is None:
            found = self.right(asked)
            found = self.spoil(asked, found) if self.spoil else found
        return found

    def right(self, asked: Asked) -> Answer:
        if asked.kind == "list":
            return self.listed(asked.query)
        if asked.kind == "other":
            return Answer(200, headers={"x-amz-bucket-region": self.region})
        stored = self.objects.get(asked.key)
        if stored is None:
            return Answer.error(404, "NoSuchKey")
        wanted = asked.headers.get("If-Match")
        if self.conditions and wanted is not None and wanted.strip('"') != stored.tag.strip('"'):
            return Answer.error(412, "PreconditionFailed")
        headers = {"Accept-Ranges": "bytes", "Content-Type": "binary/octet-stream"}
        if self.tags is True:
            headers["ETag"] = stored.tag
        if self.dates:
            headers["Last-Modified"] = formatdate(int(stored.modified), usegmt=True)
        if stored.version_id:
            headers["x-amz-version-id"] = stored.version_id
        try:
            span = resolve_range(asked.headers.get("Range", ""), len(stored.data))
        except ValueError:
            return Answer.error(416, "InvalidRange")
        if span is None:
            return Answer(200, stored.data, headers)
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{len(stored.data)}"
        return Answer(206, stored.data[span.start : span.stop], headers)

    def listed(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if self.listing == "v1":
            after = query.get("marker", "")
        else:
            after = max(query.get("continuation-token", ""), query.get("start-after", ""))
        if self.listing == "repeating" and "continuation-token" in query:
            after = sorted(self.objects)[self.page - 1]
        order = (lambda key: key.split("/")) if self.listing == "folders" else str
        keys = sorted((key for key in self.objects if key.startswith(prefix)), key=order)
        keys = [key for key in keys if not after or order(key) > order(after)]
        most = min(self.page, int(query.get("max-keys", self.page)))
        page = page_of(keys, prefix, delimiter, "" if self.listing == "folders" else after, most)
        encoded = quote if "encoding-type" in query else str
        token = "" if self.listing in ("tokenless", "v1") else page.token
        body = document(
            "ListBucketResult",
            element("Name", "bucket"),
            element("Prefix", encoded(prefix)),
            element("EncodingType", "url") if "encoding-type" in query else "",
            element("NextContinuationToken", token) if token else "",
            element("NextMarker", page.token) if self.listing == "v1" and page.token and delimiter else "",
            element("IsTruncated", "true" if page.token else "false"),
            *(self._entry(key, encoded(key)) for key in page.keys),
            *(group("CommonPrefixes", element("Prefix", encoded(each))) for each in page.prefixes),
        )
        return Answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _entry(self, key: str, shown: str) -> str:
        stored = self.objects[key]
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
        return group(
            "Contents",
            element("Key", shown),
            element("LastModified", date) if self.dates else "",
            element("ETag", stored.tag) if self.tags else "",
            element("Size", len(stored.data)),
            element("StorageClass", "STANDARD"),
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def do_GET(self) -> None:
        asked = self.store.note(self.command, self.path, self.headers)
        answer = self.store.answer(asked)
        self.send_response(answer.status)
        given = {name.lower() for name in answer.headers}
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "content-length" not in given:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = answer.body if answer.cut is None else answer.body[: answer.cut]
        size = max(1, -(-len(body) // answer.parts))
        for start in range(0, len(body), size):
            if answer.pause and self.store.stopped.wait(answer.pause):
                break
            self.wfile.write(body[start : start + size])
            self.wfile.flush()
        if answer.reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if answer.cut is not None or answer.reset:
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815 (names of http.server)

    def handle(self) -> None:
        self.store.connections += 1
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # The client has gone.

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def faulty_store(context: Any = None, **how: Any) -> Iterator[Store]:
    """Serve a bucket for the duration of the block; `context`: over TLS. The other arguments are those of `Store`."""
    store = Store(**how)
    with serving(type("Handler", (_Handler,), {"store": store}), context) as store.url:
        try:
            yield store
        finally:
            store.stopped.set()

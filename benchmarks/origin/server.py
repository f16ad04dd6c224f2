"""The HTTP server of `dataload.benchmarks.origin`: serves a folder as S3 with asyncio and sendfile."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

from aiohttp import web

from dataload.benchmarks.origin import listing, s3
from dataload.benchmarks.origin.behaviour import FAULTS, Behaviour, Fault, Faults
from dataload.benchmarks.origin.writes import Writes
from dataload.errors import ConfigError

PIECE = 1 << 20
COMPLEMENT = bytes(reversed(range(256)))
CLOSE_BY_RST = struct.pack("ii", 1, 0)


async def serve(
    folder: Path, behaviour: Behaviour, host: str, port: int, *, content_etags: bool, until_eof: bool, writable: bool
) -> None:
    """Print the URL and serve until SIGTERM or SIGINT, or with `until_eof` until standard input ends."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        loop.add_reader(sys.stdin.fileno(), stop.set)
    server = Server(folder, behaviour, content_etags=content_etags, writable=writable)
    runner = web.ServerRunner(
        web.Server(server.answer, handler_cancellation=True, access_log=None), shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=1024)
    await site.start()
    print(f"http://{host}:{runner.addresses[0][1]}", flush=True)  # noqa: T201 - the parent process waits for this line
    await stop.wait()
    await runner.cleanup()


@dataclass
class Tally:
    """The counters since the last reset.

    `errors` counts faults. `served` has (path, bytes, ETag) of every GET that was answered completely. `changes` has
    (seconds of the monotonic clock, GETs under way from then on).
    """

    get_requests: int = 0
    get_bytes: int = 0
    head_requests: int = 0
    list_requests: int = 0
    other_requests: int = 0
    duplicate_gets: int = 0
    gets_under_way: int = 0
    most_gets_at_once: int = 0
    errors: dict[Fault, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    served: set[tuple[str, s3.Span, str]] = field(default_factory=set)
    changes: list[tuple[float, int]] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        hidden = ("served", "gets_under_way", "changes")
        return {name: value for name, value in vars(self).items() if name not in hidden}

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self._change(1)
        self.most_gets_at_once = max(self.most_gets_at_once, self.gets_under_way)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        self.gets_under_way += by
        self.changes.append((time.monotonic(), self.gets_under_way))


@dataclass(frozen=True)
class S3Request:
    """A request with its bucket and key."""

    request: web.BaseRequest
    bucket: str
    key: str

    @property
    def resource(self) -> str:
        return f"/{self.bucket}/{self.key}"

    @cached_property
    def kind(self) -> str:
        """Name of the counter of this request: "get", "head", "list" or "other"."""
        query = self.request.rel_url.query
        if self.request.method == "HEAD":
            return "head"
        if self.request.method != "GET":
            return "other"
        if self.key:
            return "get" if all(is_harmless(name) for name in query) else "other"
        return "list" if self.bucket and query.get("list-type") == "2" else "other"


def is_harmless(parameter: str) -> bool:
    """Return whether a query parameter, such as a signature, does not change the kind of a GET."""
    return parameter.lower() == "x-id" or parameter.lower().startswith("x-amz-")


class Server:
    """A server of the objects below `folder`, whose first-level folders are the buckets."""

    def __init__(
        self, folder: Path, behaviour: Behaviour, *, content_etags: bool = False, writable: bool = False
    ) -> None:
        self.etag_of = s3.etag_of_content if content_etags else s3.etag_of_file
        self.folder = folder.resolve(strict=True)
        self.tally = Tally()
        self._writes = Writes(self.folder) if writable else None
        self.behave(behaviour)
        self._paid_until: WeakKeyDictionary[asyncio.Transport, float] = WeakKeyDictionary()
        self._host_paid_until = 0.0
        self._replacing = asyncio.Lock()

    def behave(self, behaviour: Behaviour) -> None:
        """Set the behaviour for all later requests. Restart the sequence of faults."""
        self.behaviour = behaviour
        self._faults = Faults(behaviour)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        bucket, key = s3.address(request.rel_url.raw_path)
        if bucket.startswith("__"):
            return await self.control(request, bucket)
        s3_request = S3Request(request, bucket, key)
        counter = f"{s3_request.kind}_requests"
        setattr(self.tally, counter, getattr(self.tally, counter) + 1)
        drawn = self._faults.draw() if s3_request.kind == "get" else (None, 0.0)
        try:
            if s3_request.kind == "get":
                with self.tally.under_way():
                    await asyncio.sleep(self.latency(drawn[0]))
                    return await self.get_object(s3_request, *drawn)
            await asyncio.sleep(self.behaviour.latency)
            if self._writes is not None and request.method in ("PUT", "POST", "DELETE"):
                return await self._writes.answer(request, bucket, key)
            if s3_request.kind == "head":
                return self.head(s3_request)
            return xml(await asyncio.to_thread(self.describe, s3_request))
        except s3.S3Error as error:
            return xml(error.body, error.status, error.headers)

    def latency(self, fault: Fault | None) -> float:
        """Return the seconds until the answer to a GET begins. Count a delayed one."""
        if fault != "delayed":
            return self.behaviour.latency
        self.tally.errors[fault] += 1
        return self.behaviour.latency + self.behaviour.delay

    async def control(self, request: web.BaseRequest, name: str) -> web.Response:
        """Answer `/__stats`, `/__gets`, `/__reset` and `/__behaviour` without latency and counters."""
        if request.method == "PUT" and name == "__behaviour":
            try:
                self.behave(Behaviour(**json.loads(await request.text())))
            except (ConfigError, TypeError, ValueError) as error:
                return web.Response(status=400, text=str(error))
        if request.method == "POST" and name == "__reset":
            self.tally = Tally()
        shown: dict[tuple[str, str], Callable[[], Any]] = {
            ("GET", "__stats"): self.tally.shown,
            ("POST", "__reset"): self.tally.shown,
            ("GET", "__gets"): lambda: self.tally.changes,
            ("GET", "__behaviour"): lambda: asdict(self.behaviour),
            ("PUT", "__behaviour"): lambda: asdict(self.behaviour),
        }
        if (request.method, name) not in shown:
            return web.Response(status=404, text=f"{request.method} {name}: there is no such control")
        return web.json_response(shown[request.method, name]())

    def describe(self, s3_request: S3Request) -> str:
        """Return the XML of a listing. Raise NotImplemented for other requests."""
        query = s3_request.request.rel_url.query
        if s3_request.kind == "list":
            return listing.list_objects(self.folder, s3_request.bucket, listing.Listing.parse(query), self.etag_of)
        if s3_request.request.method == "GET" and not s3_request.key:
            if not s3_request.bucket:
                return listing.list_buckets(self.folder)
            if "location" in query:
                return listing.location(self.folder, s3_request.bucket)
        raise s3.S3Error("NotImplemented", s3_request.resource)

    def head(self, s3_request: S3Request) -> web.StreamResponse:
        if not s3_request.key:
            s3.find_bucket(self.folder, s3_request.bucket)
            return web.Response(headers={"x-amz-bucket-region": "us-east-1"})
        with s3.open_object(self.folder, s3_request.bucket, s3_request.key) as file:
            answer = self.answer_object(s3_request, file)
        return web.StreamResponse(status=answer.status, headers=answer.headers)

    def answer_object(self, s3_request: S3Request, file: BinaryIO) -> s3.Answer:
        status = os.fstat(file.fileno())
        etag = self.etag_of(self.folder / s3_request.bucket / s3_request.key, status)
        return s3.answer_object(s3_request.request.headers, status, etag, s3_request.resource)

    async def get_object(self, s3_request: S3Request, fault: Fault | None, part: float) -> web.StreamResponse:
        if fault == "slow_down":
            self.tally.errors[fault] += 1
            raise s3.S3Error("SlowDown", s3_request.resource)
        with s3.open_object(self.folder, s3_request.bucket, s3_request.key) as file:
            answer = self.answer_object(s3_request, file)
            if answer.status == 304:
                return web.Response(status=304, headers=answer.headers)
            body = Body(self, s3_request, answer, file)
            try:
                await body.send(fault, part)
            except ConnectionError:
                body.response.force_close()
            return body.response

    async def pace(self, transport: asyncio.Transport, size: int) -> AsyncIterator[int]:
        """Yield the sizes of pieces of a body, at the bandwidths of the connection and of the host."""
        loop = asyncio.get_running_loop()
        rate = self.behaviour.bytes_per_second or math.inf
        host_rate = self.behaviour.host_bytes_per_second or math.inf
        due = max(loop.time(), self._paid_until.get(transport, 0.0))
        for piece in pieces(size, int(min(PIECE, max(1, rate / 100)))):
            now = loop.time()
            host_due = max(now, self._host_paid_until)
            self._host_paid_until = host_due + piece / host_rate
            due = max(due, host_due)
            await asyncio.sleep(due - now)
            due += piece / rate
            self._paid_until[transport] = due
            yield piece

    async def replace(self, s3_request: S3Request) -> None:
        async with self._replacing:
            await asyncio.to_thread(complement, self.folder / s3_request.bucket / s3_request.key, self.folder)


class Body:
    """The body of an answer."""

    def __init__(self, server: Server, s3_request: S3Request, answer: s3.Answer, file: BinaryIO) -> None:
        self.response = web.StreamResponse(status=answer.status, headers=answer.headers)
        self._server, self._request, self._file, self._span = server, s3_request, file, answer.span
        self._tally, self._behaviour = server.tally, server.behaviour
        self._identity = (s3_request.resource, answer.span, answer.headers["ETag"])
        self._repeats = self._identity in self._tally.served
        self._tally.duplicate_gets += self._repeats

    async def send(self, fault: Fault | None, part: float) -> None:
        """Send the requested bytes, with `fault` after a share `part` of them. Raise ConnectionError."""
        start, stop = self._span
        self._file.seek(start)
        if fault is None or fault == "delayed" or start == stop:
            await self.send_until(stop)
            return
        self._tally.errors[fault] += 1
        await self.send_until(start + int(part * (stop - start)))
        match fault:
            case "reset":
                self.hang_up()
                return
            case "short":
                self.response.force_close()
                return
            case "stalled":
                await asyncio.sleep(self._behaviour.stall)
            case "replaced":
                await self._server.replace(self._request)
        await self.send_until(stop)

    async def send_until(self, stop: int) -> None:
        """Send bytes up to `stop`. Count each byte before it is sent, and subtract bytes that were not sent."""
        async for size in self._server.pace(self.transport, stop - self._file.tell()):
            end = self._file.tell() + size
            self._tally.get_bytes += size
            if end == self._span.stop:
                self.count_served()
            try:
                await self.response.prepare(self._request.request)
                if size:
                    await asyncio.get_running_loop().sendfile(self.transport, self._file, self._file.tell(), size)
            finally:
                self._tally.get_bytes -= end - self._file.tell()

    def count_served(self) -> None:
        if not self._repeats and self._identity in self._tally.served:
            self._tally.duplicate_gets += 1
        self._tally.served.add(self._identity)

    def hang_up(self) -> None:
        """Close the connection with RST and drop bytes in flight."""
        connection: socket.socket = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CLOSE_BY_RST)
        self.transport.abort()

    @property
    def transport(self) -> asyncio.Transport:
        """The transport. Raises ConnectionResetError if the client has disconnected."""
        transport = self._request.request.transport
        if transport is None:
            raise ConnectionResetError
        return transport


def pieces(size: int, most: int) -> Iterator[int]:
    """Yield sizes of at most `most` that add up to `size`. An empty body is one empty piece."""
    while size > most:
        yield most
        size -= most
    yield size


def complement(path: Path, scratch: Path) -> None:
    """Replace a file by one of equal length and later time whose bytes are 255 minus the old ones."""
    with path.open("rb") as old, tempfile.NamedTemporaryFile(dir=scratch, delete=False) as new:
        try:
            while piece := old.read(PIECE):
                new.write(piece.translate(COMPLEMENT))
            new.flush()
            shutil.copymode(path, new.name)
            before = os.fstat(old.fileno()).st_mtime_ns
            later = max(os.fstat(new.fileno()).st_mtime_ns, before + 1)
            os.utime(new.name, ns=(later, later))
            Path(new.name).replace(path)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise


def xml(body: str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=body, status=status, headers=headers, content_type="application/xml")

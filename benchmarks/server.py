"""The HTTP server of `dataload.benchmarks.origin`: a folder as S3, on asyncio, whose bodies leave through sendfile."""

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
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

from aiohttp import web

from dataload.benchmarks import s3
from dataload.benchmarks.behaviour import FAULTS, Behaviour, Fault, Faults
from dataload.errors import ConfigError

PIECE = 1 << 20
COMPLEMENT = bytes(reversed(range(256)))
CLOSE_BY_RST = struct.pack("ii", 1, 0)


async def serve(folder: Path, behaviour: Behaviour, host: str, port: int, *, until_eof: bool) -> None:
    """Serves until SIGTERM or SIGINT, or when `until_eof` the end of standard input. Prints its URL once it listens."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        loop.add_reader(sys.stdin.fileno(), stop.set)
    server = Server(folder, behaviour)
    runner = web.ServerRunner(
        web.Server(server.answer, handler_cancellation=True, access_log=None), shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=1024)
    await site.start()
    print(f"http://{host}:{runner.addresses[0][1]}", flush=True)  # noqa: T201 - the line that its starter waits for
    await stop.wait()
    await runner.cleanup()


@dataclass
class Tally:
    """What was asked and what was sent since the last reset.

    Errors count the faults that struck. Served: the (path, bytes, ETag) of every GET that was answered whole.
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

    def shown(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("served", "gets_under_way")}

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self.gets_under_way += 1
        self.most_gets_at_once = max(self.most_gets_at_once, self.gets_under_way)
        try:
            yield
        finally:
            self.gets_under_way -= 1


@dataclass(frozen=True)
class Asked:
    """A request for something of S3."""

    request: web.BaseRequest
    bucket: str
    key: str

    @property
    def resource(self) -> str:
        return f"/{self.bucket}/{self.key}"

    @cached_property
    def kind(self) -> str:
        """Which of the counters it goes to: "get", "head", "list" or "other"."""
        query = self.request.rel_url.query
        if self.request.method == "HEAD":
            return "head"
        if self.request.method != "GET":
            return "other"
        if self.key:
            return "get" if all(is_harmless(name) for name in query) else "other"
        return "list" if self.bucket and query.get("list-type") == "2" else "other"


def is_harmless(parameter: str) -> bool:
    """Whether a query parameter leaves a GET of an object what it is: a signature, or the operation's name."""
    return parameter.lower() == "x-id" or parameter.lower().startswith("x-amz-")


class Server:
    """Answers requests for the objects below `folder`, whose first-level folders are the buckets."""

    def __init__(self, folder: Path, behaviour: Behaviour) -> None:
        self.folder = folder.resolve(strict=True)
        self.tally = Tally()
        self.behave(behaviour)
        self._paid_until: WeakKeyDictionary[asyncio.Transport, float] = WeakKeyDictionary()
        self._replacing = asyncio.Lock()

    def behave(self, behaviour: Behaviour) -> None:
        """From the next request on; the faults' sequence starts anew."""
        self.behaviour = behaviour
        self._faults = Faults(behaviour)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        bucket, key = s3.address(request.rel_url.raw_path)
        if bucket.startswith("__"):
            return await self.control(request, bucket)
        asked = Asked(request, bucket, key)
        counter = f"{asked.kind}_requests"
        setattr(self.tally, counter, getattr(self.tally, counter) + 1)
        drawn = self._faults.draw() if asked.kind == "get" else (None, 0.0)
        await asyncio.sleep(self.behaviour.latency)
        try:
            if asked.kind == "get":
                with self.tally.under_way():
                    return await self.get_object(asked, *drawn)
            if asked.kind == "head":
                return self.head(asked)
            return xml(await asyncio.to_thread(self.describe, asked))
        except s3.S3Error as error:
            return xml(error.body, error.status, error.headers)

    async def control(self, request: web.BaseRequest, name: str) -> web.Response:
        """`/__stats`, `/__reset` and `/__behaviour`, neither counted nor slowed."""
        match request.method, name:
            case "GET", "__stats":
                return web.json_response(self.tally.shown())
            case "POST", "__reset":
                self.tally = Tally()
                return web.json_response(self.tally.shown())
            case "PUT", "__behaviour":
                try:
                    self.behave(Behaviour(**json.loads(await request.text())))
                except (ConfigError, TypeError, ValueError) as error:
                    return web.Response(status=400, text=str(error))
                return web.json_response(asdict(self.behaviour))
            case "GET", "__behaviour":
                return web.json_response(asdict(self.behaviour))
        return web.Response(status=404, text=f"{request.method} {name}: there is no such control")

    def describe(self, asked: Asked) -> str:
        """The XML that answers a listing. Raises S3Error, NotImplemented for all that is no listing."""
        query = asked.request.rel_url.query
        if asked.kind == "list":
            return s3.list_objects(self.folder, asked.bucket, s3.Listing.parse(query))
        if asked.request.method == "GET" and not asked.key:
            if not asked.bucket:
                return s3.list_buckets(self.folder)
            if "location" in query:
                return s3.location(self.folder, asked.bucket)
        raise s3.S3Error("NotImplemented", asked.resource)

    def head(self, asked: Asked) -> web.StreamResponse:
        if not asked.key:
            s3.find_bucket(self.folder, asked.bucket)
            return web.Response(headers={"x-amz-bucket-region": "us-east-1"})
        with s3.open_object(self.folder, asked.bucket, asked.key) as file:
            answer = s3.answer_object(asked.request.headers, os.fstat(file.fileno()), asked.resource)
        return web.StreamResponse(status=answer.status, headers=answer.headers)

    async def get_object(self, asked: Asked, fault: Fault | None, part: float) -> web.StreamResponse:
        if fault == "slow_down":
            self.tally.errors[fault] += 1
            raise s3.S3Error("SlowDown", asked.resource)
        with s3.open_object(self.folder, asked.bucket, asked.key) as file:
            answer = s3.answer_object(asked.request.headers, os.fstat(file.fileno()), asked.resource)
            if answer.status == 304:
                return web.Response(status=304, headers=answer.headers)
            body = Body(self, asked, answer, file)
            try:
                await body.send(fault, part)
            except ConnectionError:
                body.response.force_close()
            return body.response

    async def pace(self, transport: asyncio.Transport, size: int, rate: float) -> AsyncIterator[int]:
        """Sizes of pieces of a body of `size` bytes, each when a connection of `rate` bytes per second may carry it."""
        loop = asyncio.get_running_loop()
        due = max(loop.time(), self._paid_until.get(transport, 0.0))
        for piece in pieces(size, int(min(PIECE, max(1, rate / 100)))):
            await asyncio.sleep(due - loop.time())
            due += piece / rate
            self._paid_until[transport] = due
            yield piece

    async def replace(self, asked: Asked) -> None:
        async with self._replacing:
            await asyncio.to_thread(complement, self.folder / asked.bucket / asked.key, self.folder)


class Body:
    """The body of one answer on its way."""

    def __init__(self, server: Server, asked: Asked, answer: s3.Answer, file: BinaryIO) -> None:
        self.response = web.StreamResponse(status=answer.status, headers=answer.headers)
        self._server, self._asked, self._file, self._span = server, asked, file, answer.span
        self._tally, self._behaviour = server.tally, server.behaviour
        self._identity = (asked.resource, answer.span, answer.headers["ETag"])
        self._repeats = self._identity in self._tally.served
        self._tally.duplicate_gets += self._repeats

    async def send(self, fault: Fault | None, part: float) -> None:
        """Sends the bytes asked for, and lets `fault` strike after this `part` of them. Raises ConnectionError."""
        start, stop = self._span
        self._file.seek(start)
        if fault is None or start == stop:
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
                await self._server.replace(self._asked)
        await self.send_until(stop)

    async def send_until(self, stop: int) -> None:
        """Every byte is counted before it leaves, and not counted when it did not."""
        rate = self._behaviour.bytes_per_second or math.inf
        async for size in self._server.pace(self.transport, stop - self._file.tell(), rate):
            end = self._file.tell() + size
            self._tally.get_bytes += size
            if end == self._span.stop:
                self.count_served()
            try:
                await self.response.prepare(self._asked.request)
                if size:
                    await asyncio.get_running_loop().sendfile(self.transport, self._file, self._file.tell(), size)
            finally:
                self._tally.get_bytes -= end - self._file.tell()

    def count_served(self) -> None:
        if not self._repeats and self._identity in self._tally.served:
            self._tally.duplicate_gets += 1
        self._tally.served.add(self._identity)

    def hang_up(self) -> None:
        """Closes the connection by RST, whatever was still under way."""
        connection: socket.socket = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CLOSE_BY_RST)
        self.transport.abort()

    @property
    def transport(self) -> asyncio.Transport:
        """Raises ConnectionResetError when the client is gone."""
        transport = self._asked.request.transport
        if transport is None:
            raise ConnectionResetError
        return transport


def pieces(size: int, most: int) -> Iterator[int]:
    """Sizes of at most `most` that add up to `size`; at least one, so that an empty body is one empty piece."""
    while size > most:
        yield most
        size -= most
    yield size


def complement(path: Path, scratch: Path) -> None:
    """Replaces the file by one of the same length whose every byte b is 255 - b, and which is later."""
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

"""Writes to the origin server: objects, also in parts, and their removal."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from aiohttp import web

from dataload.benchmarks.origin import s3


class Writes:
    """Writes below a folder, whose first-level folders are the buckets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uploads: dict[str, _Parts] = {}

    async def answer(self, request: web.BaseRequest, bucket: str, key: str) -> web.Response:
        """Answer PUT, POST and DELETE. Raise S3Error for other requests, and if an object is there that must be new."""
        inside, query = s3.find_bucket(self._folder, bucket), request.rel_url.query
        if request.method == "POST" and "delete" in query:
            names = re.findall(r"<Key>([^<]*)</Key>", await request.text())
            for name in names:
                self._remove(inside, name)
            return _xml(s3.document("DeleteResult", *(s3.group("Deleted", s3.element("Key", name)) for name in names)))
        if not key or not s3.stays_inside(inside, key):
            raise s3.S3Error("NotImplemented", f"/{bucket}/{key}")
        match request.method:
            case "DELETE":
                self._remove(inside, key)
                return web.Response(status=204)
            case "PUT" if "uploadId" in query:
                return await self._part(request, query["uploadId"], int(query["partNumber"]))
            case "PUT":
                return await self._object(request, inside / key)
            case "POST" if "uploads" in query:
                upload = uuid4().hex
                self._uploads[upload] = _Parts(self._draft())
                return _xml(s3.document("InitiateMultipartUploadResult", s3.element("UploadId", upload)))
            case "POST" if "uploadId" in query:
                parts = self._uploads.pop(query["uploadId"])
                parts.check()
                _publish(parts.path, inside / key)
                return _xml(s3.document("CompleteMultipartUploadResult", s3.element("ETag", f'"{uuid4().hex}"')))
        raise s3.S3Error("NotImplemented", f"/{bucket}/{key}")

    async def _part(self, request: web.BaseRequest, upload: str, number: int) -> web.Response:
        parts = self._uploads[upload]
        await _receive(request, parts.path, await parts.place(number, request.content_length or 0))
        return web.Response(headers={"ETag": f'"{number}"'})

    async def _object(self, request: web.BaseRequest, path: Path) -> web.Response:
        draft = self._draft()
        await _receive(request, draft)
        if request.headers.get("If-None-Match") == "*" and os.path.exists(path):  # noqa: ASYNC240, PTH110 (a look at memory)
            draft.unlink()
            raise s3.S3Error("PreconditionFailed", request.path)
        _publish(draft, path)
        return web.Response(headers={"ETag": f'"{uuid4().hex}"'})

    def _draft(self) -> Path:
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        os.close(descriptor)
        return Path(name)

    def _remove(self, inside: Path, key: str) -> None:
        with suppress(FileNotFoundError):
            if s3.stays_inside(inside, key):
                (inside / key).unlink()


class _Parts:
    """An object whose parts come in any order, each to its place in one file: to join them would cost a copy.

    All but the last one have the size of part 1, as clients of S3 send them. The others wait for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sizes: dict[int, int] = {}
        self._has_first = asyncio.Event()

    async def place(self, number: int, size: int) -> int:
        """Return where a part begins."""
        self._sizes[number] = size
        if number == 1:
            self._has_first.set()
        await self._has_first.wait()
        return (number - 1) * self._sizes[1]

    def check(self) -> None:
        """Raise S3Error if a part was not as big as part 1, and not the last."""
        if len({size for number, size in self._sizes.items() if number != max(self._sizes)}) > 1:
            raise s3.S3Error("NotImplemented", "parts of different sizes")


async def _receive(request: web.BaseRequest, path: Path, place: int = 0) -> None:
    """Write the body of a request into a file. Some clients, such as s3fs, first wait until they may send it."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    descriptor = os.open(path, os.O_WRONLY)
    try:
        async for piece in request.content.iter_any():
            place += os.pwrite(descriptor, piece, place)
    finally:
        os.close(descriptor)


def _publish(draft: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.replace(path)


def _xml(body: str) -> web.Response:
    return web.Response(text=body, content_type="application/xml")

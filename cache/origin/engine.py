"""Who moves an object's bytes: obstore where it can be told what s3fs was told, else the fsspec filesystem itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from fsspec.asyn import sync
from fsspec.caching import BaseCache
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dataload.cache.origin.obstore import Obstore, untranslatable, unusable
from dataload.cache.origin.version import CHANGED, version_of
from dataload.errors import ConfigError, ObjectChanged, OriginError
from dataload.runtime.redact import redacted

MOST_READ = 2  # times the bytes of a range: of an object that a store sends from its beginning instead of the range


class WrongBodyError(OSError):
    """Other bytes came than were asked for."""


class Engine(Protocol):
    """Fetches ranges of objects, from any thread.

    name: as statistics show it; reason: why it is this one.
    """

    name: str
    reason: str

    def get(self, path: str, start: int, stop: int, version: str) -> Any:
        """What the store sends for the bytes [start, stop) of that version of an object, bytes-like; once, no retry.

        Raises what the store's client raises, WrongBodyError, ObjectChanged.
        """
        ...

    def parts(self, path: str, start: int, stop: int, version: str) -> Iterator[Any]:
        """The same, part by part as it comes: for whoever puts it elsewhere, without another copy in between."""
        ...


def engine_for(filesystem: Any, wanted: str) -> Engine:
    """The engine for what `filesystem` reads. wanted: "auto", "fsspec" or "obstore".

    Raises ConfigError when it must be obstore and cannot.
    """
    if wanted == "fsspec":
        return Fsspec(filesystem, "asked for")
    if reason := unusable():
        return Fsspec(filesystem, reason)
    if reason := untranslatable(filesystem):
        if wanted == "obstore":
            raise ConfigError(f"engine='obstore' cannot be used: {reason}; leave engine out, or those options")
        return Fsspec(filesystem, reason)
    return Obstore(filesystem, "asked for" if wanted == "obstore" else "it takes the least time of the processor")


class Fsspec:
    """The filesystem itself. To s3fs its requests are dictated, because its own have no If-Match."""

    name = "fsspec"

    def __init__(self, filesystem: Any, reason: str) -> None:
        self.reason = reason
        self._filesystem = filesystem

    def get(self, path: str, start: int, stop: int, version: str) -> Any:
        filesystem = self._filesystem
        if not hasattr(filesystem, "call_s3"):
            if _speaks_http(filesystem):
                data = sync(filesystem.loop, _http_range, filesystem, path, start, stop)
            else:
                data = _range(filesystem, path, start, stop)
            if len(data) > stop - start:  # That has been read already, but will not be again.
                raise _ignores_ranges(path, start, stop)
            filesystem.invalidate_cache(path)
            if version_of(dict(filesystem.info(path))) != version:  # all that can be had without If-Match
                raise ObjectChanged(f"{redacted(path)} {CHANGED}")
            return data
        bucket, key, version_id = filesystem.split_path(path)
        asked = f"bytes={start}-{stop - 1}"
        condition = {"VersionId": version_id} if version_id else {"IfMatch": version}
        response = filesystem.call_s3("get_object", Bucket=bucket, Key=key, Range=asked, **condition)
        sent = response.get("ContentRange")
        whole = not sent and response["ResponseMetadata"]["HTTPStatusCode"] == 200
        data = sync(filesystem.loop, _body, response["Body"], path, (start, stop) if whole else None)
        _check_range(sent, asked)
        return data

    def parts(self, path: str, start: int, stop: int, version: str) -> Iterator[Any]:
        yield self.get(path, start, stop, version)


def _range(filesystem: Any, path: str, start: int, stop: int) -> bytes:
    if getattr(filesystem.cat_file, "__func__", None) is not AbstractFileSystem.cat_file:
        return bytes(filesystem.cat_file(path, start=start, end=stop))
    with filesystem.open(path, "rb") as file:  # as that one does, which would read ahead
        if isinstance(file, AbstractBufferedFile):
            file.cache = BaseCache(file.blocksize, file._fetch_range, file.size)  # noqa: SLF001 (fsspec's extension point)
        file.seek(start)
        return bytes(file.read(stop - start))


def _check_range(sent: str | None, asked: str) -> None:
    """Raise WrongBodyError if an answer's Content-Range names another range than the one that was asked for."""
    if sent and not sent.startswith(f"{asked.replace('=', ' ')}/"):
        raise WrongBodyError(f"{sent} came instead of {asked}")


def _speaks_http(filesystem: Any) -> bool:
    """Whether this is fsspec's filesystem of HTTP, which takes a whole object for a range."""
    return hasattr(filesystem, "encode_url") and hasattr(filesystem, "set_session")


async def _http_range(filesystem: Any, url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop), asked for as the filesystem asks."""
    session, options = await filesystem.set_session(), filesystem.kwargs
    asked = f"bytes={start}-{stop - 1}"
    headers = {**options.get("headers", {}), "Range": asked}
    async with session.get(filesystem.encode_url(url), **{**options, "headers": headers}) as answer:
        filesystem._raise_not_found_for_status(answer, url)  # noqa: SLF001 (as its own requests do)
        sent = answer.headers.get("Content-Range")
        _check_range(sent, asked)
        if sent or answer.status != 200:
            return bytes(await answer.read())
        try:
            return await _cut(answer.content.read, url, start, stop)
        finally:
            answer.close()  # else the rest of the object would be read before the connection is used again


async def _body(stream: Any, path: str, cut: tuple[int, int] | None) -> bytes:
    """Return all of a body, or those bytes of one that begins with the object."""
    async with stream:  # Left early, it closes the connection.
        return bytes(await stream.read()) if cut is None else await _cut(stream.read, path, *cut)


async def _cut(read: Callable[[int], Awaitable[bytes]], path: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of an object that comes from its beginning; what is behind them is not read.

    Raises OriginError where more would be read than `MOST_READ` allows.
    """
    if stop > MOST_READ * (stop - start):
        raise _ignores_ranges(path, start, stop)
    found = bytearray()
    while len(found) < stop and (part := await read(stop - len(found))):
        found += part
    return bytes(memoryview(found)[start:])


def _ignores_ranges(path: str, start: int, stop: int) -> OriginError:
    return OriginError(
        f"{redacted(path)} bytes {start}-{stop - 1}: the store ignores Range and sends the whole object: "
        "use a store or a proxy that answers ranges, or copy the data to one"
    )

"""Who moves an object's bytes: obstore where it can be told what s3fs was told, else the fsspec filesystem itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from fsspec.asyn import sync
from fsspec.caching import BaseCache
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dataload.cache.obstores import Obstore, untranslatable, unusable
from dataload.cache.redact import redacted
from dataload.cache.version import CHANGED, version_of
from dataload.errors import ConfigError, ObjectChanged


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
            data = _range(filesystem, path, start, stop)
            filesystem.invalidate_cache(path)
            if version_of(dict(filesystem.info(path))) != version:  # all that can be had without If-Match
                raise ObjectChanged(f"{redacted(path)} {CHANGED}")
            return data
        bucket, key, version_id = filesystem.split_path(path)
        asked = f"bytes={start}-{stop - 1}"
        condition = {"VersionId": version_id} if version_id else {"IfMatch": version}
        response = filesystem.call_s3("get_object", Bucket=bucket, Key=key, Range=asked, **condition)
        data = sync(filesystem.loop, _body, response["Body"])
        sent = response.get("ContentRange")
        if not sent and response["ResponseMetadata"]["HTTPStatusCode"] == 200:  # the whole object
            return data[start:stop]
        if sent and not sent.startswith(f"bytes {start}-{stop - 1}/"):
            raise WrongBodyError(f"{sent} came instead of {asked}")
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


async def _body(stream: Any) -> bytes:
    async with stream:
        return bytes(await stream.read())

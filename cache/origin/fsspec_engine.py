"""The engine that reads through the fsspec filesystem itself."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from fsspec.asyn import sync
from fsspec.caching import BaseCache
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dataload.cache.origin.credentials import Credentials
from dataload.cache.origin.errors import WrongBodyError, is_passing, is_transient, is_unsupported, status
from dataload.cache.origin.http import MAX_READ_RATIO, ignores_ranges
from dataload.cache.origin.identity import address_of
from dataload.cache.origin.listings import LocalNames
from dataload.cache.origin.obstore import UPLOAD_PART_BYTES
from dataload.cache.origin.version import (
    CHANGED,
    OF_TABLE,
    Answer,
    Comparison,
    bucket_info,
    forget,
    is_tag,
    refreshing,
    unwrapped,
    version_of,
)
from dataload.errors import ObjectChanged
from dataload.runtime.instances import Instances
from dataload.runtime.redact import redacted

SMALL_READ = 1 << 20  # bytes of a local file, which one call returns
# Filesystems without async_impl whose reads are requests of their own, without a shared cursor or connection.
CONCURRENT = frozenset({"alluxio", "alluxiofs", "file", "hdfs", "hf", "local", "memory", "oss", "webhdfs"})

T = TypeVar("T")

_locks: Instances[int, ExclusiveUse] = Instances(inherited=False)


class Fsspec:
    """The engine that uses the fsspec filesystem. It builds the requests of s3fs itself, to add If-Match.

    fsspec makes one filesystem for each thread if its class is not asynchronous, because threads may share no
    connection of FTP and no open archive. Here all threads share one filesystem, so one of them calls it at a time.
    """

    name = "fsspec"

    def __init__(self, filesystem: Any, reason: str) -> None:
        self.reason = reason
        self._filesystem = filesystem
        self._versions = Comparison()
        # s3fs has this option for stores that reject If-Match.
        self._sends_conditions = not getattr(filesystem, "local_expiry_check", False)
        self.credentials = Credentials(lambda: filesystem)
        self.lock = _lock_of(filesystem)

    @property
    def names(self) -> Any:
        return LocalNames() if type(self._filesystem) is LocalFileSystem else self._filesystem

    def parts(self, path: str, start: int, stop: int, version: str, seconds: float) -> Iterator[Any]:
        with self.lock:
            found = self._get(path, start, stop, version, seconds)
        yield found

    def _get(self, path: str, start: int, stop: int, version: str, seconds: float) -> Any:
        filesystem = self._filesystem
        if not hasattr(filesystem, "call_s3"):
            tag = None
            try:
                if _speaks_http(filesystem):
                    data, tag = sync(filesystem.loop, _within, seconds, _http_range, filesystem, path, start, stop)
                else:
                    data = _range(filesystem, path, start, stop)
            except WrongBodyError:  # The object may be shorter now.
                self._check_version(path, version)
                raise
            if len(data) > stop - start:  # Raise now: the next range would read the whole object again.
                raise ignores_ranges(path, start, stop)
            if tag != version:
                self._check_version(path, version)
            return data
        return self._get_from_s3(path, start, stop, version, seconds)

    def _get_from_s3(self, path: str, start: int, stop: int, version: str, seconds: float) -> Any:
        filesystem = self._filesystem
        bucket, key, version_id = filesystem.split_path(path)
        requested = f"bytes={start}-{stop - 1}"
        condition = {"VersionId": version_id} if version_id else {}
        if not version_id and self._sends_conditions and is_tag(version):
            condition = {"IfMatch": version}
        # An older `call_s3` adds no requester_pays itself.
        request = {"Bucket": bucket, "Key": key, "Range": requested, **filesystem.req_kw}
        try:
            response = filesystem.call_s3("get_object", **request, **condition)
        except Exception as error:
            if "IfMatch" not in condition or not is_unsupported(error):
                raise
            response = filesystem.call_s3("get_object", **request)  # The ETag of the answer is compared.
            self._sends_conditions = is_passing(error)
        sent = response.get("ContentRange")
        try:
            if not version_id:
                self._versions.check(path, version, _answer_of(response))
        except ObjectChanged:
            sync(filesystem.loop, _close, response["Body"])
            raise
        whole = not sent and response["ResponseMetadata"]["HTTPStatusCode"] == 200
        cut = (start, stop) if whole else None
        data = sync(filesystem.loop, _within, seconds, _body, response["Body"], path, cut)
        _check_range(sent, requested)
        return data

    def put(self, path: str, data: bytes, *, only_new: bool) -> bool:
        mode = "create" if only_new else "overwrite"
        with self.lock:
            try:
                self._in_folder(path, lambda: self._filesystem.pipe_file(path, data, mode=mode))
            except Exception as error:
                if only_new and (isinstance(error, FileExistsError) or status(error) == HTTPStatus.PRECONDITION_FAILED):
                    return False
                raise
        return True

    @contextmanager
    def writer(self, path: str) -> Iterator[Any]:
        with self.lock:
            file = self._in_folder(path, lambda: self._filesystem.open(path, "wb", block_size=UPLOAD_PART_BYTES))
        try:
            yield _InTurns(file, self.lock)
        except BaseException:
            # Neither the end of its own block nor its finalizer may complete half an object.
            with self.lock:
                if isinstance(file, AbstractBufferedFile):
                    file.discard()
                    file.closed = True
                else:  # It shows what is written at once.
                    with suppress(Exception):
                        file.close()
                        self._filesystem.rm_file(path)
            raise
        with self.lock:
            file.close()

    def _in_folder(self, path: str, write: Callable[[], T]) -> T:
        """Call a function that writes a file. Make its folder if that is missing, as on a disk, but never a bucket."""
        try:
            return write()
        except FileNotFoundError:
            folder = path.rpartition("/")[0]
            top = re.match(r"/*[^/]*", folder)
            if not (top and top[0] and self._filesystem.exists(top[0])):
                raise
        self._filesystem.makedirs(folder, exist_ok=True)
        return write()

    def remove(self, paths: Sequence[str]) -> None:
        with self.lock:
            for path in paths:
                with suppress(FileNotFoundError):
                    self._filesystem.rm_file(path)

    def _check_version(self, path: str, version: str) -> None:
        """Raise ObjectChanged if the object has another version now. Without If-Match, no check is better."""
        if version.startswith(OF_TABLE):
            return
        info = bucket_info(self._filesystem, path)
        if info is None:
            options = refreshing(self._filesystem, path)
            if not options:
                forget(self._filesystem, path)
            info = self._filesystem.info(path, **options)
        if version_of(dict(info)) != version:
            raise ObjectChanged(f"{redacted(path)} {CHANGED}")


class _InTurns:
    """A file that is written in turns with the other requests of its filesystem, such as those of a lease."""

    def __init__(self, file: Any, lock: AbstractContextManager[Any]) -> None:
        self._file, self._lock = file, lock

    def write(self, data: bytes) -> None:
        with self._lock:
            self._file.write(data)


def _answer_of(response: dict[str, Any]) -> Answer:
    """Return what an answer of botocore says about the version."""
    total = response.get("ContentRange", "").rpartition("/")[2]
    size = int(total) if total.isdecimal() else None
    return Answer(response.get("ETag"), response.get("LastModified"), size, response.get("VersionId"))


def _lock_of(filesystem: Any) -> AbstractContextManager[Any]:
    """Return the lock of a filesystem. It excludes no thread if all may call the filesystem at the same time."""
    filesystem, _ = unwrapped(filesystem)  # A `DirFileSystem` is asynchronous, whatever it wraps.
    if getattr(filesystem, "async_impl", False) or address_of(filesystem)[0] in CONCURRENT:
        return nullcontext()
    return _locks.get(id(filesystem), lambda: ExclusiveUse(filesystem))  # An engine keeps its filesystem.


class ExclusiveUse:
    """Lets one thread at a time call a filesystem. That thread may enter it again.

    FTP, SFTP and SMB keep a connection. After a request that failed, the next one opens a new connection.
    """

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        if getattr(filesystem, "tls", None) is True:  # FTP reconnects by itself, too, after an ABOR that fails.
            filesystem._connect = partial(_connect_encrypted, filesystem)  # noqa: SLF001 (as below)
        self._mutex = threading.RLock()
        self._may_be_lost = False

    def __enter__(self) -> None:
        self._mutex.acquire()
        try:
            if self._may_be_lost:
                self._connect()
        except BaseException:
            self._mutex.release()
            raise

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and is_transient(error) and hasattr(self._filesystem, "_connect"):
            self._may_be_lost = True
        self._mutex.release()

    def _connect(self) -> None:
        self._filesystem._connect()  # noqa: SLF001 (fsspec has no public name for it)
        self._may_be_lost = False


def _connect_encrypted(filesystem: Any) -> None:
    """Connect a filesystem of FTP, and encrypt the data as its constructor does. Its own `_connect` does not."""
    type(filesystem)._connect(filesystem)  # noqa: SLF001 (fsspec has no public name for it)
    filesystem.ftp.prot_p()


def _range(filesystem: Any, path: str, start: int, stop: int) -> bytes:
    if type(filesystem) is LocalFileSystem and stop - start <= SMALL_READ:  # Its own files take three times as long.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(file, stop - start, start)
        finally:
            os.close(file)
    # That of Arrow's filesystems, such as HDFS, fails from the first byte on.
    if getattr(filesystem.cat_file, "__func__", None) not in (AbstractFileSystem.cat_file, ArrowFSWrapper.cat_file):
        return bytes(filesystem.cat_file(path, start=start, end=stop))
    with filesystem.open(path, "rb") as file:  # like AbstractFileSystem.cat_file, but without read-ahead
        if isinstance(file, AbstractBufferedFile):
            file.cache = BaseCache(file.blocksize, file._fetch_range, file.size)  # noqa: SLF001 (fsspec's extension point)
        file.seek(start)
        return bytes(file.read(stop - start))


def _check_range(sent: str | None, requested: str) -> None:
    """Raise WrongBodyError if a response's Content-Range differs from the requested range."""
    if sent and not sent.startswith(f"{requested.replace('=', ' ')}/"):
        raise WrongBodyError(f"{sent} came instead of {requested}")


def _speaks_http(filesystem: Any) -> bool:
    """Return whether this is fsspec's HTTP filesystem. It accepts a whole object as the response to a range."""
    return hasattr(filesystem, "encode_url") and hasattr(filesystem, "set_session")


async def _http_range(filesystem: Any, url: str, start: int, stop: int) -> tuple[bytes, str | None]:
    """Fetch the bytes [start, stop) with the filesystem's own session and headers. Return them and their ETag."""
    session, options = await filesystem.set_session(), filesystem.kwargs
    requested = f"bytes={start}-{stop - 1}"
    # nginx ignores the range of a compressed answer, and makes its ETag a weak one.
    headers = {**options.get("headers", {}), "Accept-Encoding": "identity", "Range": requested}
    async with session.get(filesystem.encode_url(url), **{**options, "headers": headers}) as answer:
        filesystem._raise_not_found_for_status(answer, url)  # noqa: SLF001 (as its own requests do)
        sent, tag = answer.headers.get("Content-Range"), answer.headers.get("ETag")
        _check_range(sent, requested)
        if sent or answer.status != HTTPStatus.OK:
            return bytes(await answer.read()), tag
        try:
            return await _cut(answer.content.read, url, start, stop), tag
        finally:
            answer.close()  # else aiohttp would read the rest of the object before it reuses the connection


async def _within(seconds: float, call: Callable[..., Awaitable[T]], *args: Any) -> T:
    async with asyncio.timeout(seconds):
        return await call(*args)


async def _close(stream: Any) -> None:
    async with stream:
        pass


async def _body(stream: Any, path: str, cut: tuple[int, int] | None) -> bytes:
    """Return a whole body or, if `cut` is given, these bytes of a body that starts at the object's first byte."""
    async with stream:  # An early exit closes the connection.
        return bytes(await stream.read()) if cut is None else await _cut(stream.read, path, *cut)


async def _cut(read: Callable[[int], Awaitable[bytes]], path: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a stream that starts at the object's first byte. Stop reading after them.

    Raises:
        OriginError: The range would need more reading than `MAX_READ_RATIO` allows.
    """
    if stop > MAX_READ_RATIO * (stop - start):
        raise ignores_ranges(path, start, stop)
    found = bytearray()
    while len(found) < stop and (part := await read(stop - len(found))):
        found += part
    return bytes(memoryview(found)[start:])

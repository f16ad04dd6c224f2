"""The store that bytes come from, through any fsspec filesystem: versions, exact ranges, retries, errors with names."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.asyn import sync
from tenacity import Retrying, before_sleep_log, retry_if_exception, stop_after_attempt, stop_after_delay
from tenacity import wait_random_exponential as full_jitter

from dataload.cache.forks import ForkAware
from dataload.errors import ConfigError, DataloadError, ObjectChanged, OriginError, OriginNotFound
from dataload.metrics import Counters

ATTEMPTS = 6
ATTEMPTS_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
# Options that say which store an address is, as against how to get in. Credentials never become part of a key.
ADDRESS_OPTIONS = ("endpoint_url", "base_url", "host", "port", "account_name", "namenode")

# Packages whose errors are a request's, though they are no OSError: a body cut short is aiohttp's ClientPayloadError.
TRANSPORTS = frozenset({"aiobotocore", "aiohttp", "botocore"})

log = logging.getLogger(__name__)


class Origin(ForkAware):
    """Where objects come from.

    filesystem: any fsspec filesystem; in a forked child a fresh one with the same options takes its place.
    identity: the store's name in cache keys; default: its protocol and address.

    Notes: `read` may be called from any thread. Requests that fail in passing are retried with full jitter.
    """

    def __init__(self, filesystem: Any, identity: str | None = None) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._inherited = False
        self.identity = identity or _identity(filesystem)
        self.counters = Counters()

    def __reduce__(self) -> tuple[type[Origin], tuple[Any, str]]:
        return Origin, (self._filesystem, self.identity)

    def __repr__(self) -> str:
        return f"Origin({self.identity!r})"

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        # Its event loop runs in a thread that only the parent has.
        self._inherited = getattr(self._filesystem, "async_impl", False)

    def stats(self) -> dict[str, float]:
        """Totals of this process: requests, bytes, errors."""
        return self.counters.snapshot()

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem, of this process."""
        if self._inherited:
            old = self._filesystem
            self._filesystem = type(old)(*old.storage_args, **old.storage_options)
            self._inherited = False
        return self._filesystem

    def path_of(self, url: str) -> str:
        """The path that `url` has at this origin, without protocol."""
        return str(self.filesystem._strip_protocol(url))  # noqa: SLF001 (what fsspec calls its extension points)

    def info(self, path: str) -> dict[str, Any]:
        """What the store says of one object or folder, asked anew."""
        with self._naming(path):
            self.filesystem.invalidate_cache(path)
            return dict(self.filesystem.info(path))

    def find(self, path: str) -> dict[str, dict[str, Any]]:
        """All objects below `path`, or `path` itself when it is one, by path, listed anew."""
        with self._naming(path):
            self.filesystem.invalidate_cache(path)
            return dict(self.filesystem.find(path, detail=True))

    def glob(self, pattern: str) -> dict[str, dict[str, Any]]:
        """All objects and folders that match `pattern`, by path, listed anew."""
        with self._naming(pattern):
            self.filesystem.invalidate_cache()
            return dict(self.filesystem.glob(pattern, detail=True))

    def read(self, path: str, start: int, stop: int, version: str) -> bytes:
        """Exactly the bytes [start, stop) of that version of an object.

        Raises ObjectChanged when there is another version now (where the store can tell), OriginError after retries.
        """
        where = f"{path} bytes {start}-{stop - 1}"
        with self._naming(where):
            for attempt in _attempts():
                with attempt:
                    self.counters.add(requests=1)
                    data = self._get(path, start, stop, version)
                    self.counters.add(bytes=len(data))
                    if len(data) != stop - start:
                        raise _ShortBodyError(f"{where}: {len(data)} bytes came instead of {stop - start}")
        return data

    def _get(self, path: str, start: int, stop: int, version: str) -> bytes:
        filesystem = self.filesystem
        if not hasattr(filesystem, "call_s3"):
            return bytes(filesystem.cat_file(path, start=start, end=stop))
        # s3fs's own cat_file sends no If-Match.
        bucket, key, version_id = filesystem.split_path(path)
        response = filesystem.call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{stop - 1}",
            **({"VersionId": version_id} if version_id else {"IfMatch": version}),
        )
        return bytes(sync(filesystem.loop, _body, response["Body"]))

    @contextmanager
    def _naming(self, where: str) -> Iterator[None]:
        try:
            yield
        except DataloadError:
            raise
        except FileNotFoundError as error:
            raise OriginNotFound(
                f"{where} does not exist at {self.identity}: check its name and the endpoint"
            ) from error
        except Exception as error:
            if not _is_trouble(error):
                raise
            self.counters.add(errors=1)
            if _status(error) == 412:
                raise ObjectChanged(f"{where} was replaced while it was being read: list the dataset anew") from error
            if isinstance(error, PermissionError):
                raise OriginError(f"{where}: {self.identity} denied access: check the credentials ({error})") from error
            raise OriginError(f"{where}: {self.identity} failed: {type(error).__name__}: {error}") from error


class _ShortBodyError(OSError):
    pass


def connect(protocol: str, options: dict[str, Any] | None = None) -> Any:
    """The filesystem that fsspec knows as `protocol`. Raises ConfigError for an unknown one."""
    try:
        return fsspec.filesystem(protocol, **(options or {}))
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"no filesystem for {protocol}:// with these options: {error}") from error


def version_of(info: dict[str, Any]) -> str:
    """The version of an object, from what its store says: the ETag verbatim, else size and time of change."""
    for name in ("ETag", "etag"):
        if info.get(name):
            return str(info[name])
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        if info.get(name):
            return f"{info.get('size')}-{info[name]}"
    return f"{info.get('size')}"


def _attempts() -> Retrying:
    return Retrying(
        retry=retry_if_exception(_passing),
        stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(ATTEMPTS_SECONDS),
        wait=full_jitter(FIRST_PAUSE, LONGEST_PAUSE),
        before_sleep=before_sleep_log(log, logging.INFO),
        reraise=True,
    )


async def _body(stream: Any) -> bytes:
    async with stream:
        return bytes(await stream.read())


def _is_trouble(error: BaseException) -> bool:
    """Whether the store or the way to it failed, as against a mistake in the program."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in TRANSPORTS


def _passing(error: BaseException) -> bool:
    """Whether trying again may help: not with what the store has decided."""
    if not _is_trouble(error) or isinstance(error, (FileNotFoundError, PermissionError)):
        return False
    status = _status(error)
    return status is None or status in (408, 429) or status >= 500


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, where there is one (botocore keeps it in `response`)."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        cause = cause.__cause__
    return None


def _identity(filesystem: Any) -> str:
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    options = {**filesystem.storage_options, **filesystem.storage_options.get("client_kwargs", {})}
    address = [str(options[name]) for name in ADDRESS_OPTIONS if options.get(name)]
    if not address and hasattr(filesystem, "call_s3"):
        address = [str(filesystem.s3.meta.endpoint_url)]  # The environment or a profile may name another than AWS.
    return re.sub(r"//[^/@]*@", "//", f"{protocol}://{':'.join(address)}")

"""The clients that fetch bytes: obstore or `http`, if it supports the options of the filesystem, else that itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dataload.cache.origin.credentials import Credentials
from dataload.cache.origin.deferred_s3 import DeferredS3
from dataload.cache.origin.fsspec_engine import Fsspec
from dataload.cache.origin.http_engine import web_engine
from dataload.cache.origin.identity import address_of
from dataload.cache.origin.obstore import Obstore, unusable
from dataload.cache.origin.stores import translation_of
from dataload.cache.reports import warn_once
from dataload.errors import ConfigError
from dataload.runtime.instances import Instances

LEAST_TIME = "it uses the least CPU time"

_engines: Instances[tuple[int, str], Engine] = Instances(inherited=False)


class Engine(Protocol):
    """A thread-safe client that fetches byte ranges of objects.

    Attributes:
        name: The name in statistics.
        reason: Why this engine was chosen.
        names: A filesystem of fsspec that lists objects.
        lock: To hold while `names` is used.
        credentials: Those of its requests.
    """

    name: str
    reason: str
    credentials: Credentials

    @property
    def names(self) -> Any: ...

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def parts(self, path: str, start: int, stop: int, version: str, seconds: float) -> Iterator[Any]:
        """Fetch the bytes [start, stop) of a version of an object, without retries, as a stream of bytes-like parts.

        It gives up after about so many seconds, if the client can: a body may trickle.

        Raises:
            WrongBodyError: The response has another range.
            ObjectChanged: The object has another version now.
            Exception: Any error of the store's client.
        """
        ...

    def put(self, path: str, data: bytes, *, only_new: bool) -> bool:
        """Write an object. Return False, and write nothing, if there is one and it has to be new."""
        ...

    def writer(self, path: str) -> AbstractContextManager[Any]:
        """Open an object to write it in parts, which the client sends side by side, each again after an error.

        It is there once the block has ended without an exception.
        """
        ...

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, as far as they are there."""
        ...


def engine_for(filesystem: Any, requested: str) -> Engine:
    """Return the engine for a filesystem.

    Args:
        filesystem: The origin's fsspec filesystem, or a `DeferredS3`.
        requested: "auto", "fsspec" or "obstore".

    Raises:
        ConfigError: "obstore" is requested but does not support the filesystem's options.
    """
    known = filesystem.known if isinstance(filesystem, DeferredS3) else None
    purpose = "requested" if requested == "obstore" else LEAST_TIME
    if requested != "fsspec" and known is not None and not unusable():
        return Obstore(filesystem.load, purpose, known=known)
    filesystem = filesystem.load() if isinstance(filesystem, DeferredS3) else filesystem
    if requested == "fsspec":
        return Fsspec(filesystem, "requested")
    if requested == "auto" and (kind := web_engine(filesystem)):
        return kind
    translation = translation_of(filesystem)
    unknown = f"obstore reads no {address_of(filesystem)[0]}://"
    reason = translation.untranslatable(filesystem) if translation else unknown
    if translation is None or reason:
        reason = reason or unknown
        if requested == "obstore":
            raise ConfigError(f"engine='obstore' cannot be used: {reason}; omit engine, or those options")
        return fallback(filesystem, reason, "omit those options")
    if reason := unusable():
        return fallback(filesystem, reason, "start workers with multiprocessing_context='forkserver'")
    return Obstore(lambda: filesystem, purpose, translation)


def fallback(filesystem: Any, reason: str, fix: str) -> Fsspec:
    """Return the slower engine. Log the first of each reason for a store that obstore can read with other settings."""
    if translation := translation_of(filesystem):
        place = f"{translation.package} instead of obstore reads {address_of(filesystem)[0]}://"
        message = f"{place}, which takes three times the CPU time: {reason}; {fix}"
        warn_once(reason, f"{message}, or silence this by CacheConfig(engine='fsspec')")
    return Fsspec(filesystem, reason)


def shared_engine(filesystem: Any, requested: str) -> Engine:
    """Return the engine of this process for a filesystem, as `engine_for` does. All datasets of it share connections.

    It lasts as long as a dataset uses it. A forked child gets another one.
    """
    same = hash(filesystem) if isinstance(filesystem, DeferredS3) else id(filesystem)  # An engine keeps its filesystem.
    return _engines.get((same, requested), lambda: engine_for(filesystem, requested))

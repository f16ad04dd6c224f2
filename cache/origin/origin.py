"""The origin store, through any fsspec filesystem: versions, exact ranges, retries, errors that name the object."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from json import JSONDecodeError
from time import perf_counter
from types import TracebackType
from typing import Any, Self, TypeVar

import fsspec

from dataload.cache.origin.deferred_s3 import DeferredS3
from dataload.cache.origin.engine import Engine, fallback, shared_engine
from dataload.cache.origin.errors import UnsuitableError, WrongBodyError, is_passing, is_refusal, is_unsupported, status
from dataload.cache.origin.explanation import explained, opening, origin_error, rejected_options
from dataload.cache.origin.fsspec_engine import Fsspec
from dataload.cache.origin.guarded import guarded
from dataload.cache.origin.hub import pinned
from dataload.cache.origin.identity import address_of, endpoint_of, identity_of, is_s3
from dataload.cache.origin.limiter import RequestLimiter
from dataload.cache.origin.listings import complete, folder_of_glob, fresh_info, has_wildcard
from dataload.cache.origin.obstore import UPLOAD_PART_BYTES
from dataload.cache.origin.patience import HURRIED, Patience
from dataload.cache.origin.pickled import PickledFilesystem, pickled
from dataload.cache.origin.retries import FIRST_CONTACT_SECONDS, RETRY_SECONDS, retried
from dataload.cache.origin.s3_names import check_version
from dataload.cache.origin.version import fresh_listing, version_of
from dataload.cache.reports import warn_once
from dataload.errors import ConfigError, DataloadError, OriginError, OriginNotFound
from dataload.runtime.counters import Counters, charge
from dataload.runtime.forks import ForkAware
from dataload.runtime.redact import cause_of, redacted
from dataload.telemetry.wait_timeline import doing

T = TypeVar("T")


class Origin(ForkAware):
    """The store that holds the objects.

    Args:
        filesystem: Any fsspec filesystem, or a `DeferredS3`. A forked child and another process recreate it with the
            same options.
        identity: Name of the store in cache keys. Default: its protocol and address.
        engine: The client that fetches bytes: "auto", "fsspec" or "obstore".
        limiter: Limits the requests in flight; None: no limit.

    Attributes:
        took: Called with the seconds and the bytes of each request that worked.

    Notes: thread-safe. Transient errors are retried for `RETRY_SECONDS`, or `FIRST_CONTACT_SECONDS` without any answer.
    """

    def __init__(
        self,
        filesystem: Any,
        identity: str | None = None,
        engine: str = "auto",
        limiter: RequestLimiter | None = None,
    ) -> None:
        self.limiter = limiter
        self._filesystem = filesystem
        guarded(filesystem)
        self._inherited = self._has_answered = False
        self._identity = identity
        self._requested_engine = engine
        self._engine: Engine | None = None
        self._second: Fsspec | None = None  # for objects that the engine cannot read
        self.counters = Counters()
        self.took: Callable[[float, int], object] | None = None
        self._patience = Patience()
        super().__init__()

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = pickled(self._filesystem), self._identity, self._requested_engine, self.limiter
        return Origin, arguments, {"_has_answered": self._has_answered}

    def __repr__(self) -> str:
        return f"Origin({redacted('://'.join(address_of(self._own)))!r})"

    def after_fork_in_child(self) -> None:
        self.counters, self._engine, self._second = Counters(), None, None
        self._inherited = True  # The parent's event loops run in threads that the child lacks.

    @property
    def _own(self) -> Any:
        """The filesystem of this process, which may be deferred."""
        if self._inherited:
            self._filesystem = pickle.loads(pickle.dumps(pickled(self._filesystem)))  # noqa: S301
            self._inherited = False
        found = self._filesystem
        needs_s3fs = isinstance(found, DeferredS3) and found.known is None  # in this process
        return found.load() if needs_s3fs or isinstance(found, PickledFilesystem) else found

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem of this process."""
        found = self._own
        return found.load() if isinstance(found, DeferredS3) else found

    @property
    def engine(self) -> Engine:
        """The client that fetches bytes in this process.

        Raises:
            ConfigError: The requested engine does not support the filesystem's options.
        """
        if self._engine is None:
            self._engine = shared_engine(self._own, self._requested_engine)
        return self._engine

    @property
    def is_local(self) -> bool:
        """Whether the objects are local files, which are read without waiting."""
        return bool(getattr(self._filesystem, "local_file", False))

    @property
    def address(self) -> str:
        """The origin's name in messages: the endpoint of S3, or the protocol and configured address of others."""
        return endpoint_of(self._own) or redacted("://".join(address_of(self._own)))

    @property
    def identity(self) -> str:
        """The name of the store in cache keys."""
        if self._identity is None:
            self._identity = identity_of(self._own)
        return self._identity

    def stats(self) -> dict[str, float]:
        """Return the totals of this process: requests, bytes, errors."""
        return self.counters.snapshot()

    def _served(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return metadata with the path under which the store serves the object, which Alluxio lists by another one."""
        return {**info, "name": self.path_of(info["ufs_path"])} if info.get("ufs_path") else dict(info)

    def path_of(self, url: str) -> str:
        """Return the path of a URL at this origin, without the protocol. Raise ConfigError as `check_version` does."""
        check_version(url, self._own)
        return str(self._own._strip_protocol(url.removeprefix("tiercache://")))  # noqa: SLF001 (an extension point)

    def pinned(self, paths: Sequence[str]) -> list[str]:
        """Return paths at commits, if they are of branches on the Hugging Face Hub. Raises OriginError."""
        if address_of(self._own)[0] != "hf":
            return list(paths)
        return self.metadata(paths[0], lambda filesystem: pinned(filesystem, paths))

    def url_of(self, path: str) -> str:
        """Return the URL of a path at this origin."""
        return str(self._own.unstrip_protocol(path))

    def info(self, path: str) -> dict[str, Any]:
        """Fetch the metadata of one object or folder, bypassing caches."""
        return self.metadata(path, lambda filesystem: self._served(fresh_info(filesystem, path)))

    def list(self, path: str, *, is_glob: bool | None = None) -> dict[str, dict[str, Any]]:
        """Fetch the metadata of the objects at `path`, an object, a folder or a glob, by path. Bypass caches.

        Args:
            path: The path.
            is_glob: Whether it is a glob; None: if it has one of the characters of globs.
        """
        is_glob = has_wildcard(path) if is_glob is None else is_glob
        folder = folder_of_glob(path) if is_glob else path  # of all that is listed

        def find(filesystem: Any) -> dict[str, dict[str, Any]]:
            with fresh_listing(filesystem, folder or None):
                whole = complete(filesystem)
                found = (whole.glob if is_glob else whole.find)(path, detail=True)
            infos = [
                # Before 2026, fsspec's wrapper of a folder leaves the whole names in the infos.
                self._served({**(info if info.get("size") is not None else filesystem.info(name)), "name": name})
                for name, info in found.items()
                if info.get("type", "file") == "file" and not name.endswith("/")  # HTTP lists folders without a type
            ]
            return {info["name"]: info for info in infos}

        listed = self.metadata(path, find)
        if not listed and not is_glob:
            with suppress(OriginNotFound):
                self.info(path)  # HTTP lists nothing when the server is down; `info` then raises.
        return listed

    def read(self, path: str, start: int, stop: int, version: str) -> memoryview:
        """Fetch exactly the bytes [start, stop) of a version of an object.

        Raises:
            ObjectChanged: The object has another version now, if the store can tell.
            OriginError: All retries failed.
        """
        found = memoryview(bytearray(stop - start))
        self.read_into(found, path, start, version)
        return found.toreadonly()

    def read_into(self, buffer: memoryview, path: str, start: int, version: str) -> None:
        """Fill `buffer` with the bytes from `start` on. Raise the same errors as `read`."""
        stop = start + len(buffer)

        def receive(engine: Engine, seconds: float) -> None:
            received = 0
            for part in self._counted(engine.parts(path, start, stop, version, seconds)):
                end = received + len(part)
                if end <= len(buffer):
                    buffer[received:end] = part
                received = end
            _check(received, len(buffer))

        with self.map_errors(f"{path} bytes {start}-{stop - 1}", version=version), doing("origin"):
            self._fetched(receive, len(buffer))

    def content(self, path: str) -> bytes:
        """Fetch a small object as it is now. Raise the errors of `info` and `read`."""
        info = self.info(path)
        return bytes(self.read(path, 0, info["size"], version_of(info))) if info["size"] else b""

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object unless there is one, by a conditional request where the store has those.

        Returns:
            Whether the object has these bytes now.

        Raises:
            OriginError: All retries failed.
        """

        def put(engine: Engine) -> bool:
            try:
                return engine.put(path, data, only_new=True)
            except Exception as error:
                if not is_unsupported(error) or is_passing(error):
                    raise
            return not engine.names.exists(path) and engine.put(path, data, only_new=False)

        with self.map_errors(path):
            created = self._retried(lambda: self._admitted(lambda: self._suited(put)))
        with suppress(OriginNotFound):  # It has been removed since.
            return created or self.content(path) == data  # The answer to an earlier attempt may have been lost.
        return False

    def upload(self, path: str) -> Upload:
        """Write an object in parts, by a `with` block. It is there once the block has ended without an exception.

        Raises:
            OriginError: All retries of a part failed.
        """
        with self.map_errors(path):
            return Upload(self, path, self._suited(lambda engine: engine.writer(path)))

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, as far as they are there. Raises OriginError."""
        if paths:
            with self.map_errors(paths[0]):
                self._retried(lambda: self._admitted(lambda: self._suited(lambda engine: engine.remove(paths))))

    def _fetched(self, call: Callable[[Engine, float], T], num_bytes: int) -> T:
        """Make a request for bytes, and repeat it. The call gets the seconds that an attempt may take."""
        attempts = itertools.count()

        def request() -> T:
            attempt = next(attempts)
            if attempt and not self._has_answered:
                attempt = HURRIED  # Then only refused connections are tried again.
            seconds = self._patience.seconds(num_bytes, attempt)
            return self._request(lambda engine: call(engine, seconds), num_bytes, seconds)

        return self._retried(request)

    def _retried(self, request: Callable[[], T]) -> T:
        found = retried(request, self._retry_seconds, self._count_retry)
        self._has_answered = True
        return found

    def _retry_seconds(self, error: Exception) -> float:
        """Return for how long to retry after an error."""
        self._has_answered = self._has_answered or status(error) is not None
        return RETRY_SECONDS if self._has_answered else FIRST_CONTACT_SECONDS

    def _count_retry(self, error: Exception) -> None:
        self.counters.add(retries=1)
        charge(retries_origin=1)
        reason, seconds = explained(error, in_s3=is_s3(self._own)), self._retry_seconds(error)
        message = f"{self.address} {reason}; retrying for up to {seconds:.0f} s"
        warn_once(f"{self.address} {type(error).__name__} {status(error)}", message)

    def _request(self, call: Callable[[Engine], T], num_bytes: int, seconds: float) -> T:
        """Make one request for bytes as soon as the limiter allows it. seconds: after which the call gives up."""
        with _slot(self.limiter):
            self.counters.add(requests=1)
            charge(requests_origin=1)
            since = perf_counter()
            try:
                found = self._admitted(lambda: self._suited(call))
            except Exception:
                if (took := perf_counter() - since) >= seconds:
                    self._patience.note(took, num_bytes)
                raise
            took = perf_counter() - since
        self._patience.note(took, num_bytes)
        if self.took is not None:
            self.took(took, num_bytes)
        return found

    def _suited(self, call: Callable[[Engine], T]) -> T:
        """Make a request by the engine that can read the object."""
        try:
            return call(self.engine)
        except UnsuitableError as error:
            if not error.whole_store:
                self._second = self._second or Fsspec(self.filesystem, str(error))
                return call(self._second)
            self._engine = fallback(self.filesystem, str(error), error.fix)
            return call(self._engine)

    def _admitted(self, request: Callable[[], T]) -> T:
        """Make a request. If the store rejects its credentials, and there are new ones, repeat it once with those."""
        credentials = self.engine.credentials
        number = credentials.number
        try:
            return request()
        except Exception as error:
            if not is_refusal(error) or not credentials.renew(number):
                raise
        try:
            return request()
        except Exception as error:
            if is_refusal(error):
                credentials.pause()
            raise

    def _counted(self, parts: Iterable[Any]) -> Iterator[memoryview]:
        received = 0
        try:
            for part in parts:
                received += len(part)
                yield memoryview(part)
        finally:
            self.counters.add(bytes=received)
            charge(bytes_origin=received)

    def metadata(self, path: str, request: Callable[[Any], T]) -> T:
        """Make a request for metadata through the filesystem that it is given. Errors name `path`.

        Raises:
            ConfigError: The filesystem rejects its options.
            OriginError: As for `map_errors`.
        """
        with self.map_errors(path):
            try:
                return self._retried(lambda: self._admitted(lambda: _limited(self.limiter, self.engine, request)))
            except (DataloadError, OSError, UnicodeError, JSONDecodeError):  # the last two: malformed responses
                raise
            except (TypeError, ValueError) as error:  # s3fs passes its options to botocore at the first request.
                raise ConfigError(rejected_options(path, error)) from cause_of(error)

    @contextmanager
    def map_errors(self, what: str, *, version: str | None = None) -> Iterator[None]:
        """Raise errors of the store as an OriginError that names `what`.

        Args:
            what: Path of an object or a folder, perhaps with a byte range.
            version: That of the object when the dataset was listed; None: it was not.

        Raises:
            OriginNotFound: The object does not exist.
            ObjectChanged: The object has another version now.
            OriginError: Any other error of the store.
            ConfigError: The endpoint is invalid.
        """
        try:
            yield
        except DataloadError:
            raise
        except Exception as raised:
            error = origin_error(raised, what, self.address, in_s3=is_s3(self._own), version=version)
            if error is None:
                raise
            self.counters.add(errors=isinstance(error, OriginError) and not isinstance(error, OriginNotFound))
            try:
                raise error from cause_of(raised)
            finally:
                del error  # Its traceback refers to this frame, which would make a reference cycle.


class Upload:
    """A stream that writes an object in parts. Its arguments are those of `Origin.upload`, and that of an engine."""

    closed = False  # The end of the block completes the object.

    def __init__(self, origin: Origin, path: str, stream: AbstractContextManager[Any]) -> None:
        self._origin, self._path, self._stream = origin, path, stream
        self._written = 0

    def __enter__(self) -> Self:
        with self._origin.map_errors(self._path):
            self._opened = self._stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error of the end would hide the one that is raised.
        with suppress(Exception) if error is not None else self._origin.map_errors(self._path):
            self._stream.__exit__(kind, error, trace)

    def write(self, data: Any) -> int:
        """Write bytes, which may change afterwards. Raises OriginError."""
        view = memoryview(data).cast("B")
        with self._origin.map_errors(self._path):
            for start in range(0, len(view), UPLOAD_PART_BYTES):
                # A copy, because obstore sends the very memory that it is given, later; of a part, not of a tensor.
                self._opened.write(bytes(view[start : start + UPLOAD_PART_BYTES]))
        self._written += len(view)
        return len(view)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._written

    def flush(self) -> None:
        """Do nothing: a part is sent when it is full."""

    def close(self) -> None:
        """Do nothing: the end of the block completes the object."""


def introduce() -> None:
    """Register Alluxio under the protocol "alluxiofs"; its package registers only "alluxio"."""
    fsspec.register_implementation("alluxiofs", "alluxiofs.AlluxioFileSystem", clobber=True)


def connect(protocol: str, options: dict[str, Any] | None = None) -> Any:
    """Return the fsspec filesystem of a protocol.

    Raises:
        ConfigError: The protocol is unknown, or its filesystem rejects the options.
        OriginError: The filesystem cannot connect to its server.
    """
    introduce()
    given = options or {}
    with opening(f"{protocol}://{given.get('host', '')}", f"no filesystem for {protocol}:// with these options"):
        return fsspec.filesystem(protocol, **given)


def _slot(limiter: RequestLimiter | None) -> AbstractContextManager[object]:
    """Hold one of the requests in flight for the duration of the block. A thread must not hold two."""
    return limiter.request() if limiter else nullcontext()


def _limited(limiter: RequestLimiter | None, engine: Engine, request: Callable[[Any], T]) -> T:
    """Make one request for metadata, alone if threads may not share the filesystem."""
    with _slot(limiter), engine.lock:
        return request(engine.names)


def _check(received: int, requested: int) -> None:
    if received != requested:
        raise WrongBodyError(f"{received} bytes came instead of {requested}")

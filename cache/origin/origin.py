"""The store that bytes come from, through any fsspec filesystem: versions, exact ranges, retries, errors with names."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from json import JSONDecodeError
from typing import Any, TypeVar

import fsspec
from fsspec.core import has_magic
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_after_delay
from tenacity import wait_random_exponential as full_jitter

from dataload.cache.origin.engine import Engine, Fsspec, WrongBodyError, engine_for
from dataload.cache.origin.errors import denied, is_trouble, meant, passing, status
from dataload.cache.origin.identity import address_of, identity_of
from dataload.cache.origin.limiter import RequestLimiter
from dataload.cache.origin.obstore import UnsuitableError
from dataload.cache.origin.version import CHANGED
from dataload.errors import ConfigError, DataloadError, ObjectChanged, OriginError, OriginNotFound
from dataload.runtime.counters import Counters, charge
from dataload.runtime.forks import ForkAware
from dataload.runtime.redact import redacted
from dataload.telemetry.wait_timeline import doing

ATTEMPTS = 6
ATTEMPTS_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Origin(ForkAware):
    """Where objects come from.

    filesystem: any fsspec filesystem; in a forked child a fresh one with the same options takes its place.
    identity: the store's name in cache keys; default: its protocol and address.
    engine: who moves the bytes: "auto", "fsspec" or "obstore".
    limiter: of the requests in flight; None: there is no limit.

    Notes: `read` may be called from any thread. Requests that fail in passing are retried with full jitter.
    """

    def __init__(self, filesystem: Any, identity: str | None = None, engine: str = "auto") -> None:
        self._filesystem = filesystem
        self._inherited = False
        self._identity = identity
        self._wanted = engine
        self._engine: Engine | None = None
        self.limiter: RequestLimiter | None = None
        self.counters = Counters()
        super().__init__()

    def __reduce__(self) -> tuple[Any, ...]:
        return Origin, (self._filesystem, self._identity, self._wanted), {"limiter": self.limiter}

    def __repr__(self) -> str:
        return f"Origin({self.address!r})"

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self._engine = None
        self._inherited = True  # with event loops that run in threads of the parent's

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem, of this process."""
        if self._inherited:
            # Pickling is how fsspec rebuilds one from its arguments, and those that it wraps.
            self._filesystem = pickle.loads(pickle.dumps(self._filesystem))  # noqa: S301
            self._inherited = False
        return self._filesystem

    @property
    def engine(self) -> Engine:
        """Who moves the bytes in this process. Raises ConfigError when the one asked for cannot."""
        if self._engine is None:
            self._engine = engine_for(self.filesystem, self._wanted)
        return self._engine

    @property
    def address(self) -> str:
        """The origin as messages name it: its protocol, and the address that it was given."""
        return redacted("://".join(address_of(self._filesystem)))

    @property
    def identity(self) -> str:
        """The store's name in cache keys."""
        if self._identity is None:
            self._identity = identity_of(self.filesystem)
        return self._identity

    def stats(self) -> dict[str, float]:
        """Return the totals of this process: requests, bytes, errors."""
        return self.counters.snapshot()

    def path_of(self, url: str) -> str:
        """The path that `url` has at this origin, without protocol."""
        return str(self.filesystem._strip_protocol(url))  # noqa: SLF001 (what fsspec calls its extension points)

    def info(self, path: str) -> dict[str, Any]:
        """What the store says of one object or folder, asked anew."""
        with self.asking(path) as filesystem:
            filesystem.invalidate_cache(path)
            return self._said(filesystem.info(path))

    def list(self, path: str) -> dict[str, dict[str, Any]]:
        """What the store says of the objects at `path`, an object, a folder or a glob, by their paths; asked anew."""
        with self.asking(path) as filesystem:
            filesystem.invalidate_cache(None if has_magic(path) else path)
            found = filesystem.glob(path, detail=True) if has_magic(path) else filesystem.find(path, detail=True)
            if not found and not has_magic(path):
                with suppress(OriginNotFound):
                    self.info(path)  # HTTP finds nothing, too, where nobody answers; but then this says so.
            infos = [
                self._said(info if info.get("size") is not None else filesystem.info(name))
                for name, info in found.items()
                if info.get("type", "file") == "file" and not name.endswith("/")  # HTTP says nothing of one
            ]
            return {info["name"]: info for info in infos}

    def read(self, path: str, start: int, stop: int, version: str) -> memoryview:
        """Exactly the bytes [start, stop) of that version of an object.

        Raises ObjectChanged when there is another version now (where the store can tell), OriginError after retries.
        """

        def whole(engine: Engine) -> memoryview:
            [found] = self._counted([engine.get(path, start, stop, version)])
            _check(len(found), stop - start)
            return found

        with self.naming(f"{path} bytes {start}-{stop - 1}"), doing("origin"):
            return _attempts()(self._request, whole)

    def read_into(self, rooms: Sequence[memoryview], path: str, start: int, version: str) -> None:
        """Fill `rooms`, one after the other, with the bytes from `start` on; raises what `read` does."""
        stop = start + sum(map(len, rooms))

        def parts(engine: Engine) -> None:
            _check(_scatter(self._counted(engine.parts(path, start, stop, version)), rooms), stop - start)

        with self.naming(f"{path} bytes {start}-{stop - 1}"), doing("origin"):
            _attempts()(self._request, parts)

    def _said(self, info: dict[str, Any]) -> dict[str, Any]:
        """What the store says of an object, under the path that it is asked for by."""
        # Alluxio calls an object by its place in Alluxio, and is asked for it by that in the store below.
        return {**info, "name": self.path_of(info["ufs_path"])} if info.get("ufs_path") else dict(info)

    def _request(self, ask: Callable[[Engine], T]) -> T:
        """What comes of one request, made as soon as the limiter allows it."""
        with self.limiter.request() if self.limiter else nullcontext():
            self.counters.add(requests=1)
            charge(requests_origin=1)
            try:
                return ask(self.engine)
            except UnsuitableError as error:
                other = Fsspec(self.filesystem, str(error))
                if error.whole_store:
                    self._engine = other
                return ask(other)

    def _counted(self, parts: Iterable[Any]) -> Iterator[memoryview]:
        for part in parts:
            self.counters.add(bytes=len(part))
            charge(bytes_origin=len(part))
            yield memoryview(part)

    @contextmanager
    def asking(self, path: str) -> Iterator[Any]:
        """Gives the filesystem. Raises, beside what `naming` does, ConfigError where it was not told how to get in."""
        with self.naming(path):
            try:
                yield self.filesystem
            except (DataloadError, OSError, UnicodeError, JSONDecodeError):  # the last two of what a store answers
                raise
            except (TypeError, ValueError) as error:  # s3fs tells botocore its options when it is first asked.
                said = f"{redacted(path)} cannot be asked for with these options: {redacted(error)}"
                raise ConfigError(said) from error

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """What goes wrong inside is raised as an OriginError that names `what`."""
        try:
            yield
        except DataloadError:
            raise
        except Exception as raised:
            error = meant(raised)
            where, said = redacted(what), redacted(str(error).partition("\n")[0])  # obstore adds its source
            if isinstance(error, FileNotFoundError):
                place = f"{where} does not exist at {self.address}"
                raise OriginNotFound(f"{place}: check its name and the endpoint") from raised
            if not is_trouble(error):
                raise
            self.counters.add(errors=1)
            if status(error) == 412:
                raise ObjectChanged(f"{where} {CHANGED}") from raised
            if denied(error):
                raise OriginError(f"{where}: {self.address} denied access, check the credentials: {said}") from raised
            raise OriginError(f"{where}: {self.address} failed: {type(error).__name__}: {said}") from raised


def introduce() -> None:
    """Have fsspec know Alluxio by its own name, too: its package makes it known as "alluxio" alone."""
    fsspec.register_implementation("alluxiofs", "alluxiofs.AlluxioFileSystem", clobber=True)


def connect(protocol: str, options: dict[str, Any] | None = None) -> Any:
    """The filesystem that fsspec knows as `protocol`. Raises ConfigError for an unknown one."""
    introduce()
    try:
        return fsspec.filesystem(protocol, **(options or {}))
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"no filesystem for {protocol}:// with these options: {redacted(error)}") from error


def _attempts() -> Retrying:
    return Retrying(
        retry=retry_if_exception(passing),
        stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(ATTEMPTS_SECONDS),
        wait=full_jitter(FIRST_PAUSE, LONGEST_PAUSE),
        before_sleep=_log_failure,
        reraise=True,
    )


def _log_failure(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.debug("attempt %d failed, trying again: %s", state.attempt_number, redacted(error))


def _scatter(parts: Iterable[memoryview], rooms: Iterable[memoryview]) -> int:
    """Write these bytes into `rooms`, one after the other, as far as they find room; how many there were."""
    left, count = deque(room for room in rooms if len(room)), 0
    for part in parts:
        count += len(part)
        while len(part) and left:
            room = left.popleft()
            size = min(len(part), len(room))
            room[:size] = part[:size]
            part = part[size:]  # noqa: PLW2901 (what is left of it)
            if size < len(room):
                left.appendleft(room[size:])
    return count


def _check(came: int, asked: int) -> None:
    if came != asked:
        raise WrongBodyError(f"{came} bytes came instead of {asked}")

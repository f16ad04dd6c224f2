"""The store that bytes come from, through any fsspec filesystem: versions, exact ranges, retries, errors with names."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import fsspec
from fsspec.core import has_magic
from fsspec.utils import tokenize
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_after_delay
from tenacity import wait_random_exponential as full_jitter

from dataload.cache.engine import Engine, Fsspec, WrongBodyError, engine_for
from dataload.cache.forks import ForkAware
from dataload.cache.hedge import Hedge
from dataload.cache.locks import Slots
from dataload.cache.obstores import UnsuitableError
from dataload.cache.redact import CREDENTIALS, redacted, unsigned
from dataload.cache.version import CHANGED
from dataload.errors import ConfigError, DataloadError, ObjectChanged, OriginError, OriginNotFound
from dataload.metrics import Counters
from dataload.timeline import doing

ATTEMPTS = 6
ATTEMPTS_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0

# Options that say which store an address is, as against how to get in. Credentials never become part of a key.
ADDRESS_OPTIONS = ("endpoint_url", "base_url", "host", "port", "account_name", "namenode")
# Where protocol, address and path together name an object in full. Elsewhere (an archive, a folder of another
# filesystem) all that the filesystem was made with becomes part of the store's name, digested, but for credentials.
PATH_IS_NAME = frozenset(
    {
        "abfs",
        "abfss",
        "adl",
        "az",
        "file",
        "ftp",
        "gcs",
        "gs",
        "hdfs",
        "hf",
        "http",
        "https",
        "local",
        "memory",
        "s3",
        "s3a",
        "sftp",
        "smb",
        "ssh",
        "webhdfs",
    }
)
# Packages whose errors are a request's, though they are no OSError: a body cut short is aiohttp's ClientPayloadError.
TRANSPORTS = frozenset({"aiobotocore", "aiohttp", "botocore", "obstore"})

_SAID_STATUS = re.compile(r"status code: (\d{3})")  # by obstore, in its words
_DENIALS = ("PermissionDeniedError", "UnauthenticatedError")  # obstore's, which are no PermissionError

log = logging.getLogger(__name__)


class Origin(ForkAware):
    """Where objects come from.

    filesystem: any fsspec filesystem; in a forked child a fresh one with the same options takes its place.
    identity: the store's name in cache keys; default: its protocol and address.
    engine: who moves the bytes: "auto", "fsspec" or "obstore".
    hedge: whether what takes longer than usual is asked for a second time.
    places: one for each request that may be under way; None: for as many as are made.

    Notes: `read` may be called from any thread. Requests that fail in passing are retried with full jitter.
    """

    def __init__(
        self, filesystem: Any, identity: str | None = None, engine: str = "auto", *, hedge: bool = False
    ) -> None:
        self._filesystem = filesystem
        self._inherited = False
        self._identity = identity
        self._wanted = engine
        self._hedge = Hedge() if hedge else None
        self._engine: Engine | None = None
        self.places: Slots | None = None
        self.counters = Counters()
        super().__init__()

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(Origin, hedge=self._hedge is not None), (self._filesystem, self._identity, self._wanted)
        return *made, {"places": self.places}

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
        return redacted("://".join(_address(self._filesystem)))

    @property
    def identity(self) -> str:
        """The store's name in cache keys."""
        if self._identity is None:
            self._identity = _identity(self.filesystem)
        return self._identity

    def stats(self) -> dict[str, float]:
        """Totals of this process: requests, bytes, errors; hedged: of the requests, those that were asked for again."""
        return {**self.counters.snapshot(), "hedged": self._hedge.hedged if self._hedge else 0}

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
        with self.naming(f"{path} bytes {start}-{stop - 1}"), doing("origin"):
            for attempt in _attempts():
                with attempt:
                    get = partial(self._get, path, start, stop, version)
                    data = self._hedge.first(stop - start, get) if self._hedge else get()
                    if len(data) != stop - start:
                        raise WrongBodyError(f"{len(data)} bytes came instead of {stop - start}")
        return data

    def _said(self, info: dict[str, Any]) -> dict[str, Any]:
        """What the store says of an object, under the path that it is asked for by."""
        # Alluxio calls an object by its place in Alluxio, and is asked for it by that in the store below.
        return {**info, "name": self.path_of(info["ufs_path"])} if info.get("ufs_path") else dict(info)

    def _get(self, path: str, start: int, stop: int, version: str) -> memoryview:
        """What comes of one request, as soon as there is a place for it."""
        with self.places.take() if self.places else nullcontext():
            self.counters.add(requests=1)
            try:
                data = self.engine.get(path, start, stop, version)
            except UnsuitableError as error:
                other = Fsspec(self.filesystem, str(error))
                if error.whole_store:
                    self._engine = other
                data = other.get(path, start, stop, version)
            found = memoryview(data)
            self.counters.add(bytes=len(found))
            return found

    @contextmanager
    def asking(self, path: str) -> Iterator[Any]:
        """Gives the filesystem. Raises, beside what `naming` does, ConfigError where it was not told how to get in."""
        with self.naming(path):
            try:
                yield self.filesystem
            except (DataloadError, OSError):
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
            error = _meant(raised)
            where, said = redacted(what), redacted(str(error).partition("\n")[0])  # obstore adds its source
            if isinstance(error, FileNotFoundError):
                place = f"{where} does not exist at {self.address}"
                raise OriginNotFound(f"{place}: check its name and the endpoint") from raised
            if not _is_trouble(error):
                raise
            self.counters.add(errors=1)
            if _status(error) == 412:
                raise ObjectChanged(f"{where} {CHANGED}") from raised
            if _denied(error):
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
        retry=retry_if_exception(_passing),
        stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(ATTEMPTS_SECONDS),
        wait=full_jitter(FIRST_PAUSE, LONGEST_PAUSE),
        before_sleep=_log_failure,
        reraise=True,
    )


def _log_failure(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.debug("attempt %d failed, trying again: %s", state.attempt_number, redacted(error))


def _is_trouble(error: BaseException) -> bool:
    """Whether the store or the way to it failed, as against a mistake in the program."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in TRANSPORTS


def _meant(error: BaseException) -> BaseException:
    """What went wrong: fsspec has HTTP say "not found" of whatever happens when it asks for an object's size."""
    cause = error.__cause__
    made_up = isinstance(error, FileNotFoundError) and cause is not None and _is_trouble(cause)
    return cause if made_up and cause is not None and _status(cause) != 404 else error


def _passing(error: BaseException) -> bool:
    """Whether trying again may help: not with what the store has decided."""
    if not _is_trouble(error) or isinstance(error, (FileNotFoundError, DataloadError)) or _denied(error):
        return False
    status = _status(error)
    return status is None or status in (408, 429) or status >= 500


def _denied(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or type(error).__name__ in _DENIALS or _status(error) in (401, 403)


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, where there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(status := getattr(cause, "status", None), int):  # aiohttp
            return status
        response = getattr(cause, "response", None)
        if type(cause).__module__.startswith("obstore"):
            said = _SAID_STATUS.search(str(cause))
            if said or type(cause).__name__ == "PreconditionError":
                return int(said[1]) if said else 412
        if isinstance(response, dict):  # botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        cause = cause.__cause__
    return None


def _address(filesystem: Any) -> tuple[str, str]:
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    options = {**filesystem.storage_options, **(filesystem.storage_options.get("client_kwargs") or {})}
    return protocol, ":".join(str(options[name]) for name in ADDRESS_OPTIONS if options.get(name))


def _identity(filesystem: Any) -> str:
    protocol, address = _address(filesystem)
    if protocol not in PATH_IS_NAME:
        address = tokenize(type(filesystem), _named(filesystem.storage_args), _public(filesystem.storage_options))
    elif not address and hasattr(filesystem, "call_s3"):
        address = filesystem.s3.meta.endpoint_url  # The environment or a profile may name another than AWS.
    return redacted(f"{protocol}://{address}")


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a filesystem was made with, without what says how to get in."""
    found = {}
    for name, value in options.items():
        if not CREDENTIALS.search(name):
            nested = isinstance(value, Mapping) and name.endswith(("options", "kwargs"))
            found[name] = _public(value) if nested else _named(value)
    return found


def _named(said: Any) -> Any:
    """What names a store, or is its content: all of it, but for credentials in URLs."""
    if isinstance(said, Mapping):
        return {name: _named(value) for name, value in said.items()}
    if isinstance(said, (list, tuple)):
        return [_named(value) for value in said]
    if isinstance(said, fsspec.AbstractFileSystem):
        return _identity(said)
    return unsigned(said) if isinstance(said, str) else said

"""The engine that reads through obstore, with the options of the user's fsspec filesystem."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dataload.cache.origin.credentials import Credentials, provided
from dataload.cache.origin.errors import UnsuitableError, is_passing, is_unsupported
from dataload.cache.origin.known_s3 import KnownS3
from dataload.cache.origin.patience import LEAST_SECONDS
from dataload.cache.origin.s3 import S3, arguments
from dataload.cache.origin.s3_names import S3Names
from dataload.cache.origin.translation import NOWHERE, Translation
from dataload.cache.origin.version import CHANGED, Answer, Comparison
from dataload.errors import ObjectChanged
from dataload.runtime.forks import ForkAware
from dataload.runtime.redact import redacted

if TYPE_CHECKING:
    from obstore import GetResult

# Minimum size of a streamed part. obstore copies each part into zeroed memory, for which malloc maps fresh pages from
# 128 KiB on.
PART_BYTES = 96 << 10
# Uploads send so many parts of so many bytes side by side. S3 allows 10,000 parts.
UPLOAD_PART_BYTES, UPLOAD_PARTS = 32 << 20, 8
UPLOAD_SECONDS = 120  # that a part may take
UPLOAD_RETRIES = {"max_retries": 10, "retry_timeout": timedelta(seconds=300)}  # of a part, by obstore itself
NOT_PARTIAL = "non-partial response"
NO_CERTIFICATES = "No CA certificates were loaded"

_used_in: int | None = None  # The process in which obstore started its threads. A forked child lacks them.


def unusable() -> str | None:
    """Return why obstore cannot be used in this process; None if it can."""
    inherited = _used_in is not None and _used_in != os.getpid()
    return "this process was forked from one that used obstore, and lacks its threads" if inherited else None


class Obstore(ForkAware):
    """The engine that fetches ranges through obstore's own threads; see `dataload.cache.origin.engine.Engine`.

    Args:
        filesystem: Returns the user's filesystem. It is called for a bucket that is not known, and once the
            credentials have expired.
        reason: Why this engine was chosen.
        translation: Of the filesystem.
        known: Settings and credentials of all buckets in S3.
    """

    name = "obstore"
    lock = nullcontext()

    def __init__(
        self,
        filesystem: Callable[[], Any],
        reason: str,
        translation: Translation = S3,
        known: KnownS3 | None = None,
    ) -> None:
        self.reason = reason
        self._filesystem = filesystem
        self._translation = translation
        self._versions = Comparison()
        self._sends_conditions = True
        self._making = threading.Lock()
        # By number of the credentials, which obstore keeps, bucket, the time that a request may take, and its purpose.
        self._stores: dict[tuple[int, str, float, bool], Any] = {}
        self._settings: dict[str, dict[str, Any]] = {}  # by bucket
        self._known = known
        held = _lasting(known) if known else None
        self.credentials = Credentials(filesystem, held, translation.fetched, translation.renewed)
        super().__init__()

    @property
    def names(self) -> Any:
        """The filesystem that lists objects: s3fs if only its session finds the settings."""
        return self._filesystem() if self._known is None else S3Names(self._store, self._filesystem)

    def after_fork_in_child(self) -> None:
        for store in self._stores.values():  # Leak them: the destructor would wait for threads that the child lacks.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    def parts(self, path: str, start: int, stop: int, version: str, seconds: float) -> Iterator[Any]:
        return iter(self._response(path, start, stop, version, seconds).stream(min_chunk_size=PART_BYTES))

    def _response(self, path: str, start: int, stop: int, version: str, seconds: float) -> GetResult:
        bucket, key, version_id = self._split(path)
        if not _is_plain(key):
            raise UnsuitableError("obstore changes the names of such objects", whole_store=False)
        options: dict[str, Any] = {"range": (start, stop)}
        if version_id:
            options["version"] = version_id
        elif self._sends_conditions:
            options |= self._translation.condition(version)
        store = self._store(bucket, seconds)
        try:
            found = self._requested(store, key, options)
        except FileNotFoundError:
            if not version_id and "version" in options and _exists(store, key):  # as another version
                raise ObjectChanged(f"{redacted(path)} {CHANGED}") from None
            raise
        meta = found.meta
        modified = meta["last_modified"] if meta["last_modified"].timestamp() else None  # obstore has 1970 for none.
        try:
            if not version_id:
                answer = Answer(self._translation.version(meta), modified, meta["size"], meta["version"])
                self._versions.check(path, version, answer)
        except ObjectChanged:
            del found  # An error's traceback refers to this frame, which would keep the connection.
            raise
        return found

    def _requested(self, store: Any, key: str, options: dict[str, Any]) -> GetResult:
        try:
            return _got(store, key, options)
        except Exception as error:
            if "if_match" not in options or not is_unsupported(error):
                raise
            passes = is_passing(error)
        del options["if_match"]  # The ETag of the answer is compared.
        found = _got(store, key, options)
        self._sends_conditions = passes
        return found

    def put(self, path: str, data: bytes, *, only_new: bool) -> bool:
        import obstore

        bucket, key = self._plain(path)
        try:
            obstore.put(self._store(bucket), key, data, mode="create" if only_new else "overwrite", use_multipart=False)
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
            return False
        return True

    def writer(self, path: str) -> AbstractContextManager[Any]:
        import obstore

        bucket, key = self._plain(path)
        store = self._store(bucket, UPLOAD_SECONDS, uploads=True)
        found: AbstractContextManager[Any] = obstore.open_writer(
            store, key, buffer_size=UPLOAD_PART_BYTES, max_concurrency=UPLOAD_PARTS
        )
        return found

    def remove(self, paths: Sequence[str]) -> None:
        import obstore

        by_bucket: dict[str, list[str]] = {}
        for bucket, key in map(self._plain, paths):
            by_bucket.setdefault(bucket, []).append(key)
        for bucket, keys in by_bucket.items():
            with suppress(FileNotFoundError):
                obstore.delete(self._store(bucket), keys)

    def _plain(self, path: str) -> tuple[str, str]:
        """Return bucket and key of an object to write. Raise UnsuitableError if the filesystem has to write it."""
        if not self._translation.writes:
            raise UnsuitableError(f"{self._translation.package} writes objects", whole_store=False)
        bucket, key, _ = self._split(path)
        if not _is_plain(key):
            raise UnsuitableError("obstore changes the names of such objects", whole_store=False)
        return bucket, key

    def _split(self, path: str) -> tuple[str, str, str | None]:
        """Return bucket, key and version of a path."""
        bucket, _, key = path.partition("/")
        if self._translation.version_mark not in key and (bucket in self._settings or self._known is not None):
            return bucket, key, None
        found: tuple[str, str, str | None] = self._filesystem().split_path(path)
        return found

    def _store(self, bucket: str, seconds: float = LEAST_SECONDS, *, uploads: bool = False) -> Any:
        with self._making:
            number = self.credentials.number
            key = number, bucket, seconds, uploads
            if key not in self._stores:
                if bucket not in self._settings:
                    known = self._known_settings(bucket)
                    self._settings[bucket] = known or self._translation.settings(self._filesystem(), bucket)
                current = {key: store for key, store in self._stores.items() if key[0] == number}
                kind, settings = self._translation.store, self._settings[bucket]
                self._stores = {**current, key: _store_of(kind, settings, self.credentials, seconds, uploads)}
            return self._stores[key]

    def _known_settings(self, bucket: str) -> dict[str, Any] | None:
        known = self._known
        place = None if known is None else known.place_of(bucket)
        if known is None or place is None:
            return None
        anon = known.credentials is None
        return arguments(bucket, *place, pays=known.requester_pays, anon=anon, certificate=known.certificate)


def _got(store: Any, key: str, options: dict[str, Any]) -> GetResult:
    """Request an object. Raise UnsuitableError for an answer that s3fs may be able to read."""
    import obstore

    try:
        return obstore.get(store, key, options=options)  # type: ignore[arg-type] # a TypedDict
    except Exception as error:
        if NOT_PARTIAL in str(error):
            what = "the store answers a range with the whole object, which obstore rejects"
            raise UnsuitableError(what) from error
        if NOWHERE in str(error):
            raise UnsuitableError("the store redirects to another host", whole_store=False) from error
        raise


def _exists(store: Any, key: str) -> bool:
    import obstore

    with suppress(FileNotFoundError):
        obstore.head(store, key)
        return True
    return False


def _store_of(kind: str, settings: dict[str, Any], credentials: Credentials, seconds: float, uploads: bool) -> Any:
    import obstore
    import obstore.store

    global _used_in  # noqa: PLW0603 - of the process, like the threads
    _used_in = os.getpid()
    provider: Any = None if settings["skip_signature"] else credentials
    options = {
        **settings["client_options"],
        "timeout": f"{round(1000 * seconds)}ms",
    }  # of a request with its whole body
    repeated: dict[str, Any] = {}
    if uploads:  # No byte comes back before the whole part is sent.
        options["read_timeout"], repeated = options["timeout"], {"retry_config": UPLOAD_RETRIES}
    try:
        make = getattr(obstore.store, kind)
        return make(**{**settings, "client_options": options, **repeated}, credential_provider=provider)
    except obstore.exceptions.GenericError as error:
        if NO_CERTIFICATES in str(error):  # also if no connection needs a certificate
            fix = "install ca-certificates, or set SSL_CERT_FILE"
            raise UnsuitableError("obstore finds no CA certificates on this system", fix=fix) from error
        if kind == S3.store:
            raise
        # obstore reads the environment, too, for what it does not use here.
        reason = f"obstore rejects the environment: {redacted(str(error).partition('Debug source')[0])}"
        raise UnsuitableError(reason, fix="unset what it names") from error


def _is_plain(key: str) -> bool:
    """Return whether obstore uses this key unchanged: it normalizes or rejects others."""
    return key.isprintable() and all(part not in ("", ".", "..") for part in key.split("/"))


def _lasting(known: KnownS3) -> dict[str, Any] | None:
    """Return credentials that do not expire, as `Credentials` returns them; None for anonymous requests."""
    return None if known.credentials is None else provided(*known.credentials)

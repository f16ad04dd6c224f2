"""S3 through obstore, with the options of the user's s3fs filesystem."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dataload.cache.origin.credentials import Credentials, provided
from dataload.cache.origin.errors import UnsuitableError, is_passing, is_transient, is_unsupported
from dataload.cache.origin.known_s3 import AMAZON, KnownS3, bundle_of_requests, read_bundle
from dataload.cache.origin.patience import LEAST_SECONDS
from dataload.cache.origin.s3_names import VERSION, S3Names
from dataload.cache.origin.version import Answer, Comparison, is_tag
from dataload.errors import ObjectChanged
from dataload.runtime.forks import ForkAware

if TYPE_CHECKING:
    from obstore import GetResult

# Options of s3fs that are passed on to obstore, and options that do not affect range requests.
TRANSLATED = frozenset({"anon", "client_kwargs", "endpoint_url", "key", "requester_pays", "secret", "token", "use_ssl"})
IRRELEVANT = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "config_kwargs",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "fixed_upload_size",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
        "version_aware",
    }
)
CLIENT_OPTIONS = frozenset({"endpoint_url", "region_name", "use_ssl"})
# Timeouts and connection counts: this module sets its own.
CONFIG_OPTIONS = frozenset({"connect_timeout", "max_pool_connections", "read_timeout", "retries"})
STALL_SECONDS = 20  # without receiving a byte
# Minimum size of a streamed part. obstore copies each part into zeroed memory, for which malloc maps fresh pages from
# 128 KiB on.
PART_BYTES = 96 << 10
# A proxy for all hosts but that of the store, so that obstore follows no redirect to others: it would send the token of
# a session there. Nothing can listen on port 0. Subdomains of the store's host are exempt, too: no exclusion is exact.
NOWHERE = "127.0.0.1:0"
# Uploads send so many parts of so many bytes side by side. S3 allows 10,000 parts.
UPLOAD_PART_BYTES, UPLOAD_PARTS = 32 << 20, 8
UPLOAD_SECONDS = 120  # that a part may take
UPLOAD_RETRIES = {"max_retries": 10, "retry_timeout": timedelta(seconds=300)}  # of a part, by obstore itself
NOT_PARTIAL = "non-partial response"
NO_CERTIFICATES = "No CA certificates were loaded"

_used_in: int | None = None  # The process in which obstore started its threads. A forked child lacks them.


def untranslatable(filesystem: Any) -> str | None:
    """Return why obstore cannot replace this filesystem; None if it can."""
    kind = type(filesystem)
    if (kind.__module__, kind.__name__) != ("s3fs.core", "S3FileSystem"):
        return f"{kind.__module__}.{kind.__name__} is not s3fs"
    options = {name for name, value in filesystem.storage_options.items() if value is not None}
    unknown = {
        *(options - TRANSLATED - IRRELEVANT),
        *(f"{name} in client_kwargs" for name in set(filesystem.client_kwargs) - CLIENT_OPTIONS),
        *(f"{name} in config_kwargs" for name in set(filesystem.config_kwargs) - CONFIG_OPTIONS),
    }
    if filesystem.storage_args:
        return "s3fs was given positional arguments"
    return f"s3fs was given {', '.join(sorted(unknown))}" if unknown else None


def unusable() -> str | None:
    """Return why obstore cannot be used in this process; None if it can."""
    inherited = _used_in is not None and _used_in != os.getpid()
    return "this process was forked from one that used obstore, and lacks its threads" if inherited else None


@dataclass(frozen=True)
class Resolved:
    """The resolved settings of the buckets that a process reads, for another process.

    Attributes:
        settings: Arguments of `S3Store`, by bucket.
        credentials: As `Credentials` returns them; None for anonymous requests.
    """

    settings: dict[str, dict[str, Any]] = field(repr=False)  # An endpoint may have a password.
    credentials: dict[str, Any] | None = field(repr=False)


class Obstore(ForkAware):
    """The engine that fetches ranges through obstore's own threads; see `dataload.cache.origin.engine.Engine`.

    Args:
        filesystem: Returns the user's filesystem. It is called for a bucket that is not resolved, and once the
            credentials have expired.
        reason: Why this engine was chosen.
        resolved: Settings and credentials from another process.
        known: Settings and credentials of all buckets.
    """

    name = "obstore"
    lock = nullcontext()

    def __init__(
        self,
        filesystem: Callable[[], Any],
        reason: str,
        resolved: Resolved | None = None,
        known: KnownS3 | None = None,
    ) -> None:
        self.reason = reason
        self._filesystem = filesystem
        self._versions = Comparison()
        self._sends_conditions = True
        self._making = threading.Lock()
        # By number of the credentials, which obstore keeps, bucket, the time that a request may take, and its purpose.
        self._stores: dict[tuple[int, str, float, bool], Any] = {}
        self._settings = {} if resolved is None else dict(resolved.settings)
        self._known = known
        received = None if resolved is None else resolved.credentials
        self.credentials = Credentials(filesystem, _lasting(known) if known else received)
        super().__init__()

    @property
    def names(self) -> Any:
        """The filesystem that lists objects: s3fs if only its session finds the settings."""
        return self._filesystem() if self._known is None else S3Names(self._store, self._filesystem)

    def resolved(self) -> Resolved | None:
        """Return what a process needs to read the same buckets; None if it is unknown."""
        known = self._settings.copy()  # Another thread may add a bucket.
        if not known:
            return None
        is_anonymous = any(settings["skip_signature"] for settings in known.values())
        with suppress(Exception):  # The other process asks its own session then, and raises the error.
            return Resolved(known, None if is_anonymous else self.credentials())
        return None

    def after_fork_in_child(self) -> None:
        for store in self._stores.values():  # Leak them: the destructor would wait for threads that the child lacks.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    def get(self, path: str, start: int, stop: int, version: str, seconds: float) -> Any:
        return self._response(path, start, stop, version, seconds).bytes()

    def parts(self, path: str, start: int, stop: int, version: str, seconds: float) -> Iterator[Any]:
        return iter(self._response(path, start, stop, version, seconds).stream(min_chunk_size=PART_BYTES))

    def _response(self, path: str, start: int, stop: int, version: str, seconds: float) -> GetResult:
        bucket, key, version_id = self._split(path)
        if not _is_plain(key):
            raise UnsuitableError("obstore changes the names of such objects", whole_store=False)
        options: dict[str, Any] = {"range": (start, stop)}
        if version_id:
            options["version"] = version_id
        elif self._sends_conditions and is_tag(version):
            options["if_match"] = version
        found = self._requested(self._store(bucket, seconds), key, options)
        meta = found.meta
        modified = meta["last_modified"] if meta["last_modified"].timestamp() else None  # obstore has 1970 for none.
        try:
            if not version_id:
                answer = Answer(meta["e_tag"], modified, meta["size"], meta["version"])
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
        """Return bucket and key of an object to write. Raise UnsuitableError if obstore would change its name."""
        bucket, key, _ = self._split(path)
        if not _is_plain(key):
            raise UnsuitableError("obstore changes the names of such objects", whole_store=False)
        return bucket, key

    def _split(self, path: str) -> tuple[str, str, str | None]:
        """Return bucket, key and version of a path."""
        bucket, _, key = path.partition("/")
        if VERSION not in key and (bucket in self._settings or self._known is not None):
            return bucket, key, None
        found: tuple[str, str, str | None] = self._filesystem().split_path(path)
        return found

    def _store(self, bucket: str, seconds: float = LEAST_SECONDS, *, uploads: bool = False) -> Any:
        with self._making:
            number = self.credentials.number
            key = number, bucket, seconds, uploads
            if key not in self._stores:
                if bucket not in self._settings:
                    self._settings[bucket] = self._known_settings(bucket) or _settings_of(self._filesystem(), bucket)
                current = {key: store for key, store in self._stores.items() if key[0] == number}
                self._stores = {**current, key: _store_of(self._settings[bucket], self.credentials, seconds, uploads)}
            return self._stores[key]

    def _known_settings(self, bucket: str) -> dict[str, Any] | None:
        known = self._known
        place = None if known is None else known.place_of(bucket)
        if known is None or place is None:
            return None
        anon = known.credentials is None
        return _arguments(bucket, *place, pays=known.requester_pays, anon=anon, certificate=known.certificate)


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


def _store_of(settings: dict[str, Any], credentials: Credentials, seconds: float, uploads: bool) -> Any:
    import obstore
    from obstore.store import S3Store

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
        return S3Store(**{**settings, "client_options": options, **repeated}, credential_provider=provider)
    except obstore.exceptions.GenericError as error:  # also if no connection needs a certificate
        if NO_CERTIFICATES not in str(error):
            raise
        fix = "install ca-certificates, or set SSL_CERT_FILE"
        raise UnsuitableError("obstore finds no CA certificates on this system", fix=fix) from error


def _settings_of(filesystem: Any, bucket: str) -> dict[str, Any]:
    """Return the arguments of `S3Store` for a bucket, without credentials."""
    filesystem.connect()
    meta = filesystem.s3.meta
    if setting := _unsupported_setting(filesystem, bucket):
        raise UnsuitableError(f"obstore does not support {setting}")
    endpoint, region = str(meta.endpoint_url), meta.region_name or "us-east-1"
    if AMAZON.fullmatch(endpoint):
        region = bucket_region(filesystem, bucket) or region  # obstore follows no redirects
        endpoint = f"https://s3.{region}.amazonaws.com"
    certificate = None
    bundle = filesystem.session.get_config_variable("ca_bundle") or bundle_of_requests(os.environ)
    if bundle and endpoint.startswith("https:"):
        certificate = read_bundle(bundle)
    pays, anon = bool(filesystem.req_kw), bool(filesystem.anon)
    return _arguments(bucket, endpoint, region, pays=pays, anon=anon, certificate=certificate)


def _arguments(
    bucket: str, endpoint: str, region: str, *, pays: bool, anon: bool, certificate: bytes | None = None
) -> dict[str, Any]:
    """Return the arguments of `S3Store`, without credentials."""
    location = urlsplit(endpoint)
    host = location.hostname or ""
    if getproxies().get(location.scheme, getproxies().get("all")) and not proxy_bypass(host):
        fix = f"if {host} can be reached without the proxy, add it to NO_PROXY"
        raise UnsuitableError("through a proxy, obstore would follow redirects to any host", fix=fix)
    client: Any = {"allow_http": location.scheme == "http", "proxy_url": f"http://{NOWHERE}", "proxy_excludes": host}
    client["read_timeout"] = f"{STALL_SECONDS}s"
    if certificate is not None:
        client["root_certificate"] = certificate
    return {
        "bucket": bucket,
        "region": region,
        "request_payer": pays,
        # Explicit values: obstore would read these from the environment, as botocore already did.
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,
        "virtual_hosted_style_request": False,
        "s3_express": False,
        "skip_signature": anon,
        "client_options": client,
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=60)},  # `Origin` retries.
    }


def _unsupported_setting(filesystem: Any, bucket: str) -> str | None:
    """Return a botocore setting, from environment, profile or bucket name, that obstore does not support; else None."""
    config = filesystem.s3.meta.config
    unlike = {"addressing_style": ("auto", "path", None), "use_accelerate_endpoint": (False, None)}
    unlike["use_dualstack_endpoint"] = (False, None)
    for name, usual in unlike.items():
        if (config.s3 or {}).get(name) not in usual:
            return name
    if config.proxies:
        return "proxies"
    if "accelerate" in filesystem.s3.meta.endpoint_url:
        return "accelerated endpoints"
    return f"buckets such as {bucket}" if bucket.startswith("arn:") or bucket.endswith("--x-s3") else None


def bucket_region(filesystem: Any, bucket: str) -> str | None:
    """Return the AWS region of a bucket, which denied responses name, too; None if the server names none.

    Raises:
        OSError: The request failed, and a retry may succeed.
    """
    try:
        answer = filesystem.call_s3("head_bucket", Bucket=bucket)
    except OSError as error:
        if is_transient(error):
            raise
        answer = getattr(error.__cause__, "response", {})
    region: str | None = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return region


def _is_plain(key: str) -> bool:
    """Return whether obstore uses this key unchanged: it normalizes or rejects others."""
    return key.isprintable() and all(part not in ("", ".", "..") for part in key.split("/"))


def _lasting(known: KnownS3) -> dict[str, Any] | None:
    """Return credentials that do not expire, as `Credentials` returns them; None for anonymous requests."""
    return None if known.credentials is None else provided(*known.credentials)

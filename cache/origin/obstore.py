"""S3 through obstore, set up as the s3fs filesystem is that the user gave."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.asyn import sync

from dataload.runtime.forks import ForkAware

if TYPE_CHECKING:
    from obstore import GetResult

# What s3fs can be told that obstore is told too, or that has nothing to do with fetching ranges.
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
# Those that are about time and numbers; ours hold here.
CONFIG_OPTIONS = frozenset({"connect_timeout", "max_pool_connections", "read_timeout", "retries"})
CREDENTIALS_LAST = timedelta(minutes=5)  # then the session is asked again, which renews what is about to expire
STALL_SECONDS = 20  # without a byte
PART_BYTES = 512 << 10  # of an answer at least, in one call
NOT_PARTIAL = "non-partial response"
AMAZON = re.compile(r"https://s3([.-][a-z0-9-]+)?\.amazonaws\.com/?")  # and not one's own door to it

_used_in: int | None = None  # The process in which obstore has started its threads. They are lost in a fork.


class UnsuitableError(Exception):
    """obstore cannot read this; the message says why. whole_store: nor anything else there."""

    def __init__(self, reason: str, *, whole_store: bool = True) -> None:
        super().__init__(reason)
        self.whole_store = whole_store


def untranslatable(filesystem: Any) -> str | None:
    """Why obstore cannot stand in for this filesystem; None when it can."""
    kind = type(filesystem)
    if (kind.__module__, kind.__name__) != ("s3fs.core", "S3FileSystem"):
        return f"{kind.__module__}.{kind.__name__} is not s3fs"
    options = {name for name, value in filesystem.storage_options.items() if value is not None}
    unknown = {
        *(options - TRANSLATED - IRRELEVANT),
        *(set(filesystem.client_kwargs) - CLIENT_OPTIONS),
        *(set(filesystem.config_kwargs) - CONFIG_OPTIONS),
    }
    if filesystem.storage_args:
        return "s3fs was given arguments without names"
    return f"s3fs was given {', '.join(sorted(unknown))}" if unknown else None


def unusable() -> str | None:
    """Why obstore cannot be used in this process; None when it can."""
    inherited = _used_in is not None and _used_in != os.getpid()
    return "this process was forked from one that used obstore, whose threads are not here" if inherited else None


class Obstore(ForkAware):
    """Ranges of objects through obstore's own threads; see `dataload.cache.origin.engine.Engine`."""

    name = "obstore"

    def __init__(self, filesystem: Any, reason: str) -> None:
        self.reason = reason
        self._filesystem = filesystem
        self._making = threading.Lock()
        self._stores: dict[str, Any] = {}
        super().__init__()

    def after_fork_in_child(self) -> None:
        for store in self._stores.values():  # To let go of one waits for its threads, which are not here: never do.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    def get(self, path: str, start: int, stop: int, version: str) -> Any:
        return self._answer(path, start, stop, version).bytes()

    def parts(self, path: str, start: int, stop: int, version: str) -> Iterator[Any]:
        return iter(self._answer(path, start, stop, version).stream(min_chunk_size=PART_BYTES))

    def _answer(self, path: str, start: int, stop: int, version: str) -> GetResult:
        import obstore

        bucket, key, version_id = self._filesystem.split_path(path)
        if not _is_plain(key):
            raise UnsuitableError("obstore changes the names of such objects", whole_store=False)
        options: dict[str, Any] = {"version": version_id} if version_id else {"if_match": version}
        options["range"] = (start, stop)
        try:
            return obstore.get(self._store(bucket), key, options=options)  # type: ignore[arg-type] # a TypedDict
        except obstore.exceptions.GenericError as error:
            if NOT_PARTIAL in str(error):
                raise UnsuitableError(
                    "the store answers a range with the whole object, which obstore refuses"
                ) from error
            raise

    def _store(self, bucket: str) -> Any:
        with self._making:
            if bucket not in self._stores:
                self._stores[bucket] = _store_of(self._filesystem, bucket)
            return self._stores[bucket]


def _store_of(filesystem: Any, bucket: str) -> Any:
    from obstore.store import S3Store

    global _used_in  # noqa: PLW0603 - of the process, like the threads
    _used_in = os.getpid()
    filesystem.connect()
    told = filesystem.s3.meta
    if settings := _settings_of_botocore(filesystem, bucket):
        raise UnsuitableError(f"obstore cannot be told of {settings}")
    endpoint, region = str(told.endpoint_url), told.region_name or "us-east-1"
    if AMAZON.fullmatch(endpoint):
        region = _region(filesystem, bucket, region)
        endpoint = f"https://s3.{region}.amazonaws.com"
    # A limit for the whole body would be one for the speed of the wire.
    client: Any = {"allow_http": True, "read_timeout": f"{STALL_SECONDS}s", "timeout": "1day"}
    if endpoint.startswith("https:") and (bundle := filesystem.session.get_config_variable("ca_bundle")):
        client["root_certificate"] = Path(bundle).read_bytes()
    return S3Store(
        bucket,
        region=region,
        request_payer=bool(filesystem.req_kw),
        credential_provider=None if filesystem.anon else _Credentials(filesystem),  # type: ignore[arg-type] # a TypedDict
        # All that obstore would otherwise take from the environment, where botocore has looked already.
        endpoint=endpoint,
        aws_endpoint_url_s3=endpoint,
        virtual_hosted_style_request=False,
        s3_express=False,
        skip_signature=bool(filesystem.anon),
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},  # The origin tries again.
    )


def _settings_of_botocore(filesystem: Any, bucket: str) -> str | None:
    """What botocore was told by the environment or a profile, or knows by a bucket's name, and obstore is not."""
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


def _region(filesystem: Any, bucket: str, default: str) -> str:
    """Where a bucket at Amazon lies: obstore, unlike botocore, does not follow it there. Refusals say it, too."""
    try:
        answer = filesystem.call_s3("head_bucket", Bucket=bucket)
    except OSError as error:
        answer = getattr(error.__cause__, "response", {})
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region", default))


def _is_plain(key: str) -> bool:
    """Whether obstore asks for just this key: it joins and drops parts of others, or refuses them."""
    return key.isprintable() and all(part not in ("", ".", "..") for part in key.split("/"))


class _Credentials:
    """Asks the filesystem's session, which knows profiles, roles and instances, and renews what expires."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def __call__(self) -> dict[str, Any]:
        key, secret, token = self._filesystem.key, self._filesystem.secret, self._filesystem.token
        if not (key and secret):
            key, secret, token = sync(self._filesystem.loop, self._ask)
        until = datetime.now(UTC) + CREDENTIALS_LAST
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": until}

    async def _ask(self) -> tuple[str, str, str | None]:
        found = await self._filesystem.session.get_credentials()
        if found is None:
            raise PermissionError("no credentials were found: give key and secret, or anon=True for a public bucket")
        frozen = await found.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token

"""S3 through obstore, set up as the s3fs filesystem is that the user gave."""

from __future__ import annotations

import ctypes
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from fsspec.asyn import sync

from dataload.cache.forks import ForkAware

# What s3fs can be told that obstore is told too, or that has nothing to do with fetching ranges.
TRANSLATED = frozenset({"anon", "client_kwargs", "endpoint_url", "key", "requester_pays", "secret", "token", "use_ssl"})
IRRELEVANT = frozenset(
    {
        "asynchronous",
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
NOT_PARTIAL = "non-partial response"
AMAZON = ".amazonaws.com"

_used_in: int | None = None  # The process in which obstore has started its threads. They are lost in a fork.


class UnsuitableError(Exception):
    """obstore cannot read from this store at all; the message says why."""


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
    """Ranges of objects through obstore's own threads; see `dataload.cache.engine.Engine`."""

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
        import obstore

        bucket, key, version_id = self._filesystem.split_path(path)
        options: dict[str, Any] = {"version": version_id} if version_id else {"if_match": version}
        options["range"] = (start, stop)
        try:
            return obstore.get(self._store(bucket), key, options=options).bytes()  # type: ignore[arg-type] # a TypedDict
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
    endpoint = str(told.endpoint_url)
    elsewhere = not endpoint.endswith(AMAZON)
    options: dict[str, Any] = {"region": told.region_name or "us-east-1", "request_payer": bool(filesystem.req_kw)}
    if elsewhere:
        options["endpoint"] = endpoint
    else:
        options["region"] = _region(filesystem, bucket)
    if filesystem.anon:
        options["skip_signature"] = True
    elif filesystem.key and filesystem.secret:
        options |= {"access_key_id": filesystem.key, "secret_access_key": filesystem.secret}
        options |= {"session_token": filesystem.token} if filesystem.token else {}
    else:
        options["credential_provider"] = _Credentials(filesystem)
    return S3Store(
        bucket,
        **options,
        client_options={"allow_http": True, "read_timeout": f"{STALL_SECONDS}s", "timeout": "60s"},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},  # The origin tries again.
    )


def _region(filesystem: Any, bucket: str) -> str:
    """Where a bucket at Amazon lies: obstore, unlike botocore, does not follow it there."""
    found = filesystem.call_s3("head_bucket", Bucket=bucket)
    return str(found["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"])


class _Credentials:
    """Asks the filesystem's session, which knows profiles, roles and instances, and renews what expires."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def __call__(self) -> dict[str, Any]:
        key, secret, token = sync(self._filesystem.loop, self._ask)
        until = datetime.now(UTC) + CREDENTIALS_LAST
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": until}

    async def _ask(self) -> tuple[str, str, str | None]:
        found = await self._filesystem.session.get_credentials()
        if found is None:
            raise PermissionError("no credentials were found: give key and secret, or anon=True for a public bucket")
        frozen = await found.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token

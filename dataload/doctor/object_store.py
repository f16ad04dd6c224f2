"""Checks of an object store: network, credentials, and the parts of its protocol that a cache needs."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, build_opener, getproxies, proxy_bypass

from fsspec.asyn import sync

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.origin.explanation import fix_of
from dataload.cache.origin.guarded_s3 import lacks_token
from dataload.cache.origin.s3 import bucket_region
from dataload.cache.origin.stores import translation_of
from dataload.cache.origin.version import LOCAL_FIELDS, VERSION_FIELDS
from dataload.catalog.sources import list_objects
from dataload.doctor.finding import Case, Finding, ok, problem, reason, warning
from dataload.errors import ConfigError, DataloadError, ObjectChanged, OriginNotFound
from dataload.formats.hive_partitions import Keys, Partitioning
from dataload.rows.known_nulls import ON_THE_COMMAND_LINE
from dataload.runtime.cached_property import cached_property

TIMEOUT = 5.0  # seconds
SKEW_WARNING, SKEW_PROBLEM = 60, 900  # seconds; Amazon rejects signatures that are more than 900 s off
PORTS = {"http": 80, "https": 443}
READ_ADVICE = "check that the credentials allow reading objects, not only listing them"


class Store:
    """The object store behind a URL. It sends no request before the first check that needs one.

    Args:
        url: An object, a folder or a glob.
        blocks: Reads the blocks of its objects.
        partitioning: As in `make_dataset`.
    """

    def __init__(self, url: str, blocks: Blocks, partitioning: Partitioning = "hive") -> None:
        self.url = url
        self._partitioning = partitioning
        self.blocks = blocks
        self.origin = blocks.origin

    @property
    def filesystem(self) -> Any:
        return self.origin.filesystem

    @property
    def is_s3(self) -> bool:
        return hasattr(self.filesystem, "call_s3")

    @cached_property
    def endpoint(self) -> str | None:
        """The URL of the server; None if the store is not reached over HTTP."""
        if self.is_s3:
            self.filesystem.connect()
            return str(self.filesystem.s3.meta.endpoint_url)
        return self.url if urlsplit(self.url).scheme in PORTS else None

    @cached_property
    def objects(self) -> dict[Object, Keys]:
        """The objects at the URL with their partition keys.

        Raises:
            OriginError: The store cannot be listed.
        """
        return list_objects(self.url, self.blocks, self._partitioning)

    @property
    def first(self) -> Object:
        """The first object at the URL.

        Raises:
            OriginError: The store cannot be listed.
        """
        return next(iter(self.objects))

    def get(self, **condition: str) -> dict[str, Any]:
        """Request the first byte of the first object from S3. Return the answer without the body.

        Args:
            condition: More arguments of GetObject, such as IfMatch.

        Raises:
            OSError: S3 answered with an error.
        """
        bucket, key, _ = self.filesystem.split_path(self.first.path)
        answer = self.filesystem.call_s3("get_object", Bucket=bucket, Key=key, Range="bytes=0-0", **condition)
        answer.pop("Body").close()
        return answer  # type: ignore[no-any-return]


def endpoint(store: Store) -> Finding:
    try:
        address = _host_and_port(store.endpoint) if store.endpoint else None
    except Exception as error:  # noqa: BLE001 (each library below a client raises its own errors)
        return problem(
            f"{store.url} cannot be opened: {reason(error)}",
            fix_of(error) or "check AWS_ENDPOINT_URL, AWS_PROFILE, the files in ~/.aws, and --storage-options",
        )
    if address is None:
        return ok(f"{store.origin.address} needs no network connection")
    try:
        socket.create_connection(address, TIMEOUT).close()
    except OSError as error:
        return problem(
            f"{address[0]}:{address[1]} cannot be reached: {reason(error)}",
            "check AWS_ENDPOINT_URL or endpoint_url, the network, and proxies",
        )
    return ok(f"{address[0]}:{address[1]} can be reached")


def clock(store: Store) -> Finding:
    origin_time = _date(store.endpoint) if store.endpoint else None
    if origin_time is None:
        return ok("the origin sends no date")
    skew = (datetime.now(UTC) - origin_time).total_seconds()
    if abs(skew) < SKEW_WARNING:
        return ok(f"this host's clock is within {SKEW_WARNING} s of the origin's")
    message = f"this host's clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the origin's"
    advice = "set the clock: timedatectl set-ntp true, or chronyc makestep"
    return problem(message, advice) if abs(skew) > SKEW_PROBLEM else warning(message, advice)


def credentials(store: Store) -> Finding:
    """Check that the credentials allow listing the objects at the URL."""
    try:
        found = store.objects
    except OriginNotFound as error:
        return problem(reason(error), "check bucket, prefix and endpoint")
    except DataloadError as error:
        message, fix = reason(error), fix_of(error.__cause__ or error)
        if fix:
            return problem(message.removesuffix(f": {fix}"), fix)
        if isinstance(error, ConfigError):  # It says what to pass, such as the files of a table's version.
            return problem(message, "")
        return problem(message, "check AWS_ENDPOINT_URL or endpoint_url, and certificates (AWS_CA_BUNDLE)")
    return ok(f"{len(found):,} objects can be listed")


def region(store: Store) -> Finding:
    if not store.is_s3:
        return ok("the store has no regions")
    bucket, _, _ = store.filesystem.split_path(store.first.path)
    client_region = store.filesystem.s3.meta.region_name
    own_region = bucket_region(store.filesystem, bucket)
    if own_region and own_region != client_region:
        return warning(
            f"bucket {bucket} is in {own_region}, but requests are signed for {client_region or 'no region'}",
            f"set AWS_DEFAULT_REGION={own_region}; reading from another region is slower and costs money",
        )
    return ok(own_region or client_region or "the region is unknown")


def ranges(store: Store) -> Finding:
    first = store.first
    advice = "read through a store that serves ranges: this one serves only the beginning of a file"
    try:
        with store.origin.map_errors(first.path):
            if store.is_s3:
                served = store.get()["ResponseMetadata"]["HTTPStatusCode"] == 206
            elif store.endpoint:
                served = sync(store.filesystem.loop, _status, store.filesystem, first.path, timeout=TIMEOUT) == 206
            else:
                served = len(store.filesystem.cat_file(first.path, start=0, end=1)) == 1
    except DataloadError as error:
        return problem(reason(error), READ_ADVICE)
    if served:
        return ok("the store serves ranges")
    return problem(f"{first.path}: the store answers a range request with the whole object", advice)


def client(store: Store) -> Finding:
    """Report which client fetches the bytes, and why."""
    engine = store.origin.engine
    found = f"{engine.name} fetches the bytes: {engine.reason}"
    if engine.name == "fsspec" and engine.reason != "requested" and translation_of(store.filesystem):
        return warning(found, "omit what it names, or go on: obstore takes a third of the CPU time")
    return ok(found)


def listing(store: Store) -> Finding:
    """Check that a listing of more than one page leads to the next one."""
    if not store.is_s3:
        return ok("this kind of store has no pages of listings")
    bucket, key, _ = store.filesystem.split_path(store.first.path)
    folder = key.rpartition("/")[0]
    with store.origin.map_errors(store.first.path):
        page = store.filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=folder and f"{folder}/", MaxKeys=1)
    if lacks_token(page):
        return warning(
            "the store sends no token for the next page of a listing: dataload goes on after the last name",
            "other programs may lose the objects after the first page: update the store, or list files by name",
        )
    return ok("each page of a listing leads to the next one" if page.get("IsTruncated") else "a listing has one page")


def etag(store: Store) -> Finding:
    first = store.first
    try:
        info = store.origin.info(first.path)
    except DataloadError as error:
        return problem(reason(error), READ_ADVICE)
    if info.keys() >= set(LOCAL_FIELDS):
        return ok("the inode, the time of change and the size of a file identify its version")
    field = next((name for name in VERSION_FIELDS if info.get(name)), None)
    if field is None and info.get("LastModified"):
        return warning(
            f"{first.path} has no ETag and no version: time and size tell versions apart",
            "write new objects under new names: one of equal size within a second is not noticed",
        )
    if field is None:
        return warning(
            f"{first.path} has no ETag and no version: a replaced object is not detected",
            "write new objects under new names, or use a store with ETags",
        )
    return ok(f"{field} identifies the version of an object")


def if_match(store: Store) -> Finding:
    if not store.is_s3:
        if store.origin.engine.name in ("http", "obstore"):
            return ok("each read names the version of its object")
        return ok("this kind of store is not sent If-Match: versions are compared with each answer, or after it")
    try:
        with store.origin.map_errors(store.first.path):
            answer = store.get(IfMatch='"no such version"')
    except ObjectChanged:
        return ok("the store rejects a request for another version")
    except DataloadError as error:
        return warning(
            f"the store answers If-Match with an error: {reason(error)}", "do not replace objects while they are read"
        )
    if answer.get("ETag"):
        return ok("the store ignores If-Match: the ETag of each answer is compared")
    return warning(
        "the store ignores If-Match, and its answers have no ETag: an object that is replaced during a read may mix "
        "with the old one",
        "write new objects under new names, and do not replace any while they are read",
    )


def dataset(case: Case) -> Finding:
    """Report whether the footers of all objects fit together and were read."""
    if case.reads is None:
        advice = "mend or remove what this names, or choose other objects"
        return problem(f"the dataset cannot be read: {case.unreadable}", advice)
    order, blobs = case.reads
    if nulls := blobs.maker.known_nulls:
        return problem(nulls, ON_THE_COMMAND_LINE)
    return ok(f"the footers describe {order.n:,} rows")


def _host_and_port(url: str) -> tuple[str, int]:
    """Return the host and port of the proxy for a URL, or of the URL itself. Raise ValueError for a bad port."""
    parts = urlsplit(url)
    if (proxy := getproxies().get(parts.scheme)) and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"http://{proxy}")  # curl and urllib do the same
    return parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443)


def _date(url: str) -> datetime | None:
    """Return the date that a server sends with any answer; None without one."""
    try:
        answer = build_opener().open(Request(url, method="HEAD"), timeout=TIMEOUT)  # noqa: S310 (http or https)
        headers = answer.headers
        answer.close()
    except HTTPError as error:
        headers = error.headers
        error.close()
    except (OSError, HTTPException):
        return None
    try:
        return parsedate_to_datetime(headers.get("Date", ""))
    except ValueError:
        return None


async def _status(filesystem: Any, url: str) -> int:
    """Request the first byte with the session and credentials of the filesystem. Return the HTTP status.

    Raises:
        aiohttp.ClientError: The server answered with an error.
    """
    session, options = await filesystem.set_session(), filesystem.kwargs
    headers = {**options.get("headers", {}), "Range": "bytes=0-0"}
    async with session.get(filesystem.encode_url(url), **{**options, "headers": headers}) as answer:
        answer.raise_for_status()
        return int(answer.status)  # The body is not read: it may be the whole object.

"""Whether a store can be reached, lets us in, and answers as a cache needs it to."""

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
from dataload.cache.origin.version import VERSION_FIELDS
from dataload.catalog.manifest import list_objects
from dataload.doctor.finding import Finding, ok, problem, reason, warning
from dataload.errors import DataloadError, ObjectChanged, OriginNotFound
from dataload.formats.hive_partitions import Keys
from dataload.runtime.cached_property import cached_property

SECONDS = 5.0  # for an answer
WRONG_SECONDS, REFUSED_SECONDS = 60, 900  # of the clock; Amazon refuses what is signed by one that is wrong by so much
PORTS = {"http": 80, "https": 443}
READABLE = "check that it may be read, not only listed"


class Store:
    """The objects at a URL. Nothing is asked of it before the first check that does.

    blocks: of its origin.
    """

    def __init__(self, url: str, blocks: Blocks) -> None:
        self.url = url
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
        """Where it is, as a URL; None: not on the web."""
        if self.is_s3:
            self.filesystem.connect()
            return str(self.filesystem.s3.meta.endpoint_url)
        return self.url if urlsplit(self.url).scheme in PORTS else None

    @cached_property
    def objects(self) -> dict[Object, Keys]:
        """With their partition keys. Raises OriginError."""
        return list_objects(self.url, self.blocks)

    @property
    def first(self) -> Object:
        """Raises OriginError."""
        return next(iter(self.objects))

    def get(self, **condition: str) -> int:
        """The status of S3's answer to a request for the first byte of the first object. Raises OSError."""
        bucket, key, _ = self.filesystem.split_path(self.first.path)
        answer = self.filesystem.call_s3("get_object", Bucket=bucket, Key=key, Range="bytes=0-0", **condition)
        answer["Body"].close()
        return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def endpoint(store: Store) -> Finding:
    try:
        place = _place(store.endpoint) if store.endpoint else None
    except Exception as error:  # noqa: BLE001 (of what a client is made from, each part raises its own)
        return problem(
            f"{store.url} cannot be opened: {reason(error)}",
            "check AWS_ENDPOINT_URL, AWS_PROFILE, what is in ~/.aws, and --storage-options",
        )
    if place is None:
        return ok(f"{store.origin.address} is not on the web")
    try:
        socket.create_connection(place, SECONDS).close()
    except OSError as error:
        return problem(
            f"{place[0]}:{place[1]} cannot be reached: {reason(error)}",
            "check AWS_ENDPOINT_URL or endpoint_url, the network, and proxies",
        )
    return ok(f"{place[0]}:{place[1]} can be reached")


def clock(store: Store) -> Finding:
    said = _date(store.endpoint) if store.endpoint else None
    if said is None:
        return ok("the origin does not tell the time")
    apart = (datetime.now(UTC) - said).total_seconds()
    if abs(apart) < WRONG_SECONDS:
        return ok(f"it is the origin's, within {WRONG_SECONDS} s")
    what = f"this host's clock is {abs(apart):,.0f} s {'ahead of' if apart > 0 else 'behind'} the origin's"
    advice = "set it: timedatectl set-ntp true, or chronyc makestep"
    return problem(what, advice) if abs(apart) > REFUSED_SECONDS else warning(what, advice)


def credentials(store: Store) -> Finding:
    """Whether what is at the URL may be listed."""
    try:
        found = store.objects
    except OriginNotFound as error:
        return problem(reason(error), "check bucket, prefix and endpoint")
    except DataloadError as error:
        said = reason(error)
        if "locate credentials" in said or "NoCredentials" in said:
            return problem(
                f"{store.url}: no credentials were found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role; for a public bucket "
                "--storage-options '{\"anon\": true}'",
            )
        if "denied access" in said:
            return problem(said, "check key, secret and token, and that they may list and read this bucket")
        return problem(said, "check AWS_ENDPOINT_URL or endpoint_url, and certificates (AWS_CA_BUNDLE)")
    return ok(f"{len(found):,} objects can be listed")


def region(store: Store) -> Finding:
    if not store.is_s3:
        return ok("it has none")
    bucket, _, _ = store.filesystem.split_path(store.first.path)
    ours = store.filesystem.s3.meta.region_name
    theirs = _headers(store, bucket).get("x-amz-bucket-region")
    if theirs and theirs != ours:
        return warning(
            f"bucket {bucket} is in {theirs}, requests are made for {ours or 'no region'}",
            f"set AWS_DEFAULT_REGION={theirs}; from another region bytes come slower, and cost",
        )
    return ok(theirs or ours or "not said")


def ranges(store: Store) -> Finding:
    first = store.first
    advice = "read through a store that serves ranges: only the beginning of a file can be read from this one"
    try:
        with store.origin.naming(first.path):
            if store.is_s3:
                served = store.get() == 206
            elif store.endpoint:
                served = sync(store.filesystem.loop, _status, store.filesystem, first.path, timeout=SECONDS) == 206
            else:
                served = len(store.filesystem.cat_file(first.path, start=0, end=1)) == 1
    except DataloadError as error:
        return problem(reason(error), READABLE)
    return ok("it serves ranges") if served else problem(f"{first.path}: a range is answered with all of it", advice)


def etag(store: Store) -> Finding:
    first = store.first
    try:
        info = store.origin.info(first.path)
    except DataloadError as error:
        return problem(reason(error), READABLE)
    named = next((name for name in VERSION_FIELDS if info.get(name)), None)
    if named is None:
        return warning(
            f"{first.path} has no ETag nor version: one that is written anew is not told from the old one",
            "write new objects under new names, or use a store with ETags",
        )
    return ok(f"versions are told by their {named}")


def if_match(store: Store) -> Finding:
    if not store.is_s3:
        return ok("not asked of this kind of store: versions are looked at before and after")
    try:
        with store.origin.naming(store.first.path):
            store.get(IfMatch='"no such version"')
    except ObjectChanged:
        return ok("another version is refused")
    except DataloadError as error:
        return warning(
            f"If-Match is answered with an error: {reason(error)}", "do not replace objects while they are read"
        )
    return warning(
        "If-Match is not heeded: an object that is replaced while it is read may be taken for the old one",
        "write new objects under new names, and do not replace any while they are read",
    )


def _place(url: str) -> tuple[str, int]:
    """Host and port that requests for a URL go to: the proxy's, where there is one. Raises ValueError."""
    where = urlsplit(url)
    if (proxy := getproxies().get(where.scheme)) and not proxy_bypass(where.hostname or ""):
        where = urlsplit(proxy if "//" in proxy else f"http://{proxy}")  # as curl and urllib take it
    return where.hostname or "", where.port or PORTS.get(where.scheme, 443)


def _date(url: str) -> datetime | None:
    """The time at a server, whatever else it answers."""
    try:
        answer = build_opener().open(Request(url, method="HEAD"), timeout=SECONDS)  # noqa: S310 (http or https)
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
    """The status of HTTP's answer to a request for the first byte, asked as the filesystem asks, with what lets it in.

    Raises aiohttp.ClientError.
    """
    session, options = await filesystem.set_session(), filesystem.kwargs
    headers = {**options.get("headers", {}), "Range": "bytes=0-0"}
    async with session.get(filesystem.encode_url(url), **{**options, "headers": headers}) as answer:
        answer.raise_for_status()
        return int(answer.status)  # What may be all of the object is not read.


def _headers(store: Store, bucket: str) -> dict[str, str]:
    """Of the answer about a bucket, refusals among them."""
    try:
        answer = store.filesystem.call_s3("head_bucket", Bucket=bucket)
    except OSError as error:
        answer = getattr(error.__cause__, "response", {})
    found: dict[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return found

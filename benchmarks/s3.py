"""The protocol of a read-only S3 without I/O: addresses, conditions, ranges, listings and their XML."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote, unquote_to_bytes
from xml.sax.saxutils import escape

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
MAX_KEYS = 1000
ERRORS = {
    "InvalidArgument": (400, "An argument of the request is not valid."),
    "NoSuchBucket": (404, "The specified bucket does not exist."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "PreconditionFailed": (412, "At least one of the preconditions you specified did not hold."),
    "InvalidRange": (416, "The requested range is not satisfiable."),
    "NotImplemented": (501, "This server reads and lists objects; it does nothing else."),
    "SlowDown": (503, "Please reduce your request rate."),
}


def storage_options(endpoint_url: str) -> dict[str, Any]:
    """Return arguments for `s3fs.S3FileSystem`. The server accepts any key and secret."""
    return {
        "key": "testing",
        "secret": "testing",
        "endpoint_url": endpoint_url,
        "client_kwargs": {"region_name": "us-east-1"},
    }


class S3Error(Exception):
    """An error answer of S3.

    Args:
        code: S3's error code, a key of ERRORS.
        resource: The path of the request.
        headers: Headers of the answer.
    """

    def __init__(self, code: str, resource: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(code)
        self.status, message = ERRORS[code]
        self.headers = dict(headers or {})
        self.body = document(
            "Error", element("Code", code), element("Message", message), element("Resource", resource), namespace=""
        )


class Span(NamedTuple):
    """A range of bytes: `start` (inclusive) to `stop` (exclusive)."""

    start: int
    stop: int


class Answer(NamedTuple):
    """The answer to a GET or HEAD of an object. The body of a GET is `span`."""

    status: int
    headers: dict[str, str]
    span: Span


def address(raw_path: str) -> tuple[str, str]:
    """Return (bucket, key) of a percent-encoded path; "" for a missing part."""
    decoded = os.fsdecode(unquote_to_bytes(raw_path.encode(errors="surrogateescape")))
    bucket, _, key = decoded.removeprefix("/").partition("/")
    return bucket, key


def find_bucket(folder: Path, bucket: str) -> Path:
    """Return the folder of a bucket in `folder`, which is absolute and without symbolic links. Raise NoSuchBucket."""
    path = folder / bucket
    if not bucket or not stays_inside(folder, bucket) or not path.is_dir():
        raise S3Error("NoSuchBucket", bucket)
    return path


def open_object(folder: Path, bucket: str, key: str) -> BinaryIO:
    """Open the file of an object, unbuffered. Only regular files are objects. Raise NoSuchBucket or NoSuchKey."""
    inside = find_bucket(folder, bucket)
    if stays_inside(inside, key):
        with suppress(OSError):
            descriptor = os.open(inside / key, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe must not block
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.fdopen(descriptor, "rb", buffering=0)
            os.close(descriptor)
    raise S3Error("NoSuchKey", f"/{bucket}/{key}")


def stays_inside(folder: Path, name: str) -> bool:
    """Return whether `name` is a path below `folder` without "..", empty parts and symbolic links."""
    path = f"{folder}/{name}"
    return "\0" not in name and os.path.realpath(path) == path


def etag_of(status: os.stat_result) -> str:
    """Return the quoted ETag of a file, which changes with the file."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def answer_object(request: Mapping[str, str], status: os.stat_result, resource: str = "") -> Answer:
    """Return the answer to a GET or HEAD of an object.

    Args:
        request: Headers of the request.
        status: Status of the object's file.
        resource: Path of the object, for errors.

    Raises:
        S3Error: PreconditionFailed, InvalidRange, or NotImplemented for conditions on dates.
    """
    if {"If-Modified-Since", "If-Unmodified-Since", "If-Range"} & set(request):
        raise S3Error("NotImplemented", resource)
    etag, size = etag_of(status), status.st_size
    if "If-Match" in request and not names_etag(request["If-Match"], etag):
        raise S3Error("PreconditionFailed", resource)
    headers = {"ETag": etag, "Last-Modified": formatdate(int(status.st_mtime), usegmt=True), "Accept-Ranges": "bytes"}
    if "If-None-Match" in request and names_etag(request["If-None-Match"], etag):
        return Answer(304, headers, Span(0, 0))
    try:
        span = resolve_range(request.get("Range", ""), size)
    except ValueError:
        raise S3Error("InvalidRange", resource, {"Content-Range": f"bytes */{size}"}) from None
    headers |= {"Content-Type": "binary/octet-stream", "Content-Length": str(size)}
    if span is None:
        return Answer(200, headers, Span(0, size))
    headers |= {
        "Content-Length": str(span.stop - span.start),
        "Content-Range": f"bytes {span.start}-{span.stop - 1}/{size}",
    }
    return Answer(206, headers, span)


def names_etag(header: str, etag: str) -> bool:
    """Return whether an If-Match or If-None-Match header matches `etag`. Quotes are optional; "*" matches all."""
    tags = {tag.strip().removeprefix("W/").strip('"') for tag in header.split(",")}
    return "*" in tags or etag.strip('"') in tags


def resolve_range(header: str, size: int) -> Span | None:
    """Return the bytes that a Range header requests; None for the whole object.

    Several ranges and malformed ones get the whole object.

    Raises:
        ValueError: The object has none of the bytes.
    """
    match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", header.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first and last and int(first) > int(last):
        return None
    if first:
        span = Span(int(first), min(int(last) + 1, size) if last else size)
    else:
        span = Span(max(0, size - int(last)), size)
    if span.start >= span.stop:
        raise ValueError(header)
    return span


def keys_below(folder: Path, prefix: str = "", after: str = "", base: str = "") -> Iterator[str]:
    """Yield the keys below `folder` that start with `prefix` and sort after `after`, in UTF-8 byte order.

    Symbolic links and names that are not UTF-8 are skipped.
    """
    with os.scandir(folder) as entries:
        names = sorted(  # strings sort like their UTF-8
            base + entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
            for entry in entries
            if (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)) and is_text(entry.name)
        )
    for name in names:
        if not name.endswith("/"):
            if name.startswith(prefix) and name > after:
                yield name
        elif (name.startswith(prefix) or prefix.startswith(name)) and (name > after or after.startswith(name)):
            yield from keys_below(folder / name.removeprefix(base), prefix, after, name)


def is_text(name: str) -> bool:
    return name == name.encode(errors="ignore").decode()


class Page(NamedTuple):
    """A page of a listing. `token` is its last entry if more pages follow, else ""."""

    keys: list[str]
    prefixes: list[str]
    token: str


def page_of(keys: Iterable[str], prefix: str, delimiter: str, token: str, max_keys: int) -> Page:
    """Return the page of `max_keys` entries after the entry `token`.

    Keys with the delimiter after the prefix form one entry for each common prefix, which ends with the delimiter.

    Args:
        keys: Sorted keys that start with `prefix`.
        prefix: Prefix of the listing.
        delimiter: Delimiter of common prefixes, or "".
        token: Last entry of the page before; "" for the first page.
        max_keys: Most entries of a page.
    """
    following = (entry for entry in entries_of(keys, prefix, delimiter) if entry[0] > token)
    entries = list(islice(following, max_keys))
    more = bool(entries) and next(following, None) is not None
    return Page(
        [name for name, common in entries if not common],
        [name for name, common in entries if common],
        entries[-1][0] if more else "",
    )


def entries_of(keys: Iterable[str], prefix: str, delimiter: str) -> Iterator[tuple[str, bool]]:
    """Yield (key, False) and (common prefix, True), each once."""
    last = ""
    for key in keys:
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        entry = key if cut < 0 else key[: cut + len(delimiter)]
        if entry != last:
            yield entry, cut >= 0
        last = entry


@dataclass(frozen=True)
class Listing:
    """The parameters of a ListObjectsV2 request."""

    prefix: str = ""
    delimiter: str = ""
    start_after: str = ""
    token: str = ""
    max_keys: int = MAX_KEYS
    encode: bool = False

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Listing:
        """Parse the query of a request. Raise InvalidArgument."""
        max_keys = query.get("max-keys", str(MAX_KEYS))
        if not re.fullmatch("[0-9]{1,9}", max_keys):
            raise S3Error("InvalidArgument", "max-keys")
        if query.get("encoding-type", "url") != "url":
            raise S3Error("InvalidArgument", "encoding-type")
        return cls(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            start_after=query.get("start-after", ""),
            token=read_token(query.get("continuation-token", "")),
            max_keys=min(int(max_keys), MAX_KEYS),
            encode="encoding-type" in query,
        )

    def name(self, tag: str, name: str) -> str:
        """Return an element with a key or prefix, URL-encoded if the request says so."""
        return element(tag, quote(name) if self.encode else name)


def write_token(entry: str) -> str:
    return base64.urlsafe_b64encode(entry.encode()).decode()


def read_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise S3Error("InvalidArgument", "continuation-token") from None


def list_objects(folder: Path, bucket: str, listing: Listing) -> str:
    """Return the XML of one page. Raise NoSuchBucket."""
    inside = find_bucket(folder, bucket)
    keys = keys_below(inside, listing.prefix, max(listing.start_after, listing.token))
    page = page_of(keys, listing.prefix, listing.delimiter, listing.token, listing.max_keys)
    return document(
        "ListBucketResult",
        element("Name", bucket),
        listing.name("Prefix", listing.prefix),
        listing.name("Delimiter", listing.delimiter) if listing.delimiter else "",
        listing.name("StartAfter", listing.start_after) if listing.start_after else "",
        element("ContinuationToken", write_token(listing.token)) if listing.token else "",
        element("NextContinuationToken", write_token(page.token)) if page.token else "",
        element("KeyCount", len(page.keys) + len(page.prefixes)),
        element("MaxKeys", listing.max_keys),
        element("EncodingType", "url") if listing.encode else "",
        element("IsTruncated", "true" if page.token else "false"),
        *(contents(inside, key, listing) for key in page.keys),
        *(group("CommonPrefixes", listing.name("Prefix", prefix)) for prefix in page.prefixes),
    )


def contents(folder: Path, key: str, listing: Listing) -> str:
    """Return the entry of an object; "" if its file has been removed since the listing."""
    try:
        status = (folder / key).stat()
    except FileNotFoundError:
        return ""
    return group(
        "Contents",
        listing.name("Key", key),
        element("LastModified", timestamp(int(status.st_mtime))),
        element("ETag", etag_of(status)),
        element("Size", status.st_size),
        element("StorageClass", "STANDARD"),
    )


def list_buckets(folder: Path) -> str:
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and is_text(path.name))
    buckets = (
        group("Bucket", element("Name", path.name), element("CreationDate", timestamp(path.stat().st_ctime)))
        for path in found
    )
    return document("ListAllMyBucketsResult", group("Buckets", *buckets))


def location(folder: Path, bucket: str) -> str:
    """Return the XML of the region us-east-1, which is an empty element in S3. Raise NoSuchBucket."""
    find_bucket(folder, bucket)
    return document("LocationConstraint")


def timestamp(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S.000Z}"


def document(tag: str, *inside: str, namespace: str = NAMESPACE) -> str:
    attribute = f' xmlns="{namespace}"' if namespace else ""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{tag}{attribute}>{"".join(inside)}</{tag}>'


def group(tag: str, *inside: str) -> str:
    return f"<{tag}>{''.join(inside)}</{tag}>"


def element(tag: str, value: object) -> str:
    text = str(value).encode(errors="replace").decode()
    return group(tag, escape(text, {"\r": "&#13;", '"': "&quot;"}))

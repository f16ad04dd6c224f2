"""The pure part of a read-only S3: addresses, conditions, ranges, listings and the XML they are told in."""

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
    """Arguments for `s3fs.S3FileSystem`; any key and secret will do."""
    return {
        "key": "testing",
        "secret": "testing",
        "endpoint_url": endpoint_url,
        "client_kwargs": {"region_name": "us-east-1"},
    }


class S3Error(Exception):
    """An answer that S3 gives as an error: its code, its HTTP status, and the XML that says so."""

    def __init__(self, code: str, resource: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(code)
        self.status, message = ERRORS[code]
        self.headers = dict(headers or {})
        self.body = document(
            "Error", element("Code", code), element("Message", message), element("Resource", resource), namespace=""
        )


class Span(NamedTuple):
    """Bytes `start` up to `stop`, without `stop`."""

    start: int
    stop: int


class Answer(NamedTuple):
    """What a GET or HEAD of an object is answered with. Bytes of `span` follow the headers of a GET."""

    status: int
    headers: dict[str, str]
    span: Span


def address(raw_path: str) -> tuple[str, str]:
    """(bucket, key) of a path as it stands in the request, percent-encoded; "" for what is not there."""
    decoded = os.fsdecode(unquote_to_bytes(raw_path.encode(errors="surrogateescape")))
    bucket, _, key = decoded.removeprefix("/").partition("/")
    return bucket, key


def find_bucket(folder: Path, bucket: str) -> Path:
    """The folder of a bucket. `folder` is absolute and without symbolic links. Raises NoSuchBucket."""
    path = folder / bucket
    if not bucket or not stays_inside(folder, bucket) or not path.is_dir():
        raise S3Error("NoSuchBucket", bucket)
    return path


def open_object(folder: Path, bucket: str, key: str) -> BinaryIO:
    """The object's file, unbuffered. Only regular files are objects. Raises NoSuchBucket and NoSuchKey."""
    inside = find_bucket(folder, bucket)
    if stays_inside(inside, key):
        with suppress(OSError):
            descriptor = os.open(inside / key, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe must not block
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.fdopen(descriptor, "rb", buffering=0)
            os.close(descriptor)
    raise S3Error("NoSuchKey", f"/{bucket}/{key}")


def stays_inside(folder: Path, name: str) -> bool:
    """Whether `name` is a plain path below `folder`: no "..", no empty part, no symbolic link on the way."""
    path = f"{folder}/{name}"
    return "\0" not in name and os.path.realpath(path) == path


def etag_of(status: os.stat_result) -> str:
    """Opaque, in quotes; another one after any change of the object."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def answer_object(asked: Mapping[str, str], status: os.stat_result, resource: str = "") -> Answer:
    """The answer to a GET or HEAD with the headers `asked`, for an object whose file has this `status`.

    Raises PreconditionFailed, InvalidRange, and NotImplemented for conditions on dates.
    """
    if {"If-Modified-Since", "If-Unmodified-Since", "If-Range"} & set(asked):
        raise S3Error("NotImplemented", resource)
    etag, size = etag_of(status), status.st_size
    if "If-Match" in asked and not names_etag(asked["If-Match"], etag):
        raise S3Error("PreconditionFailed", resource)
    headers = {"ETag": etag, "Last-Modified": formatdate(int(status.st_mtime), usegmt=True), "Accept-Ranges": "bytes"}
    if "If-None-Match" in asked and names_etag(asked["If-None-Match"], etag):
        return Answer(304, headers, Span(0, 0))
    try:
        span = resolve_range(asked.get("Range", ""), size)
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
    """Whether an If-Match or If-None-Match header names `etag`; quotes may be missing, "*" names every one."""
    tags = {tag.strip().removeprefix("W/").strip('"') for tag in header.split(",")}
    return "*" in tags or etag.strip('"') in tags


def resolve_range(header: str, size: int) -> Span | None:
    """The bytes a Range header asks for; None for the whole object, which several or malformed ranges get too.

    Raises ValueError when the object has none of the bytes.
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
    """Keys of the files below `folder` that begin with `prefix` and come after `after`, in UTF-8 byte order.

    Symbolic links, and names that are not UTF-8, are left out.
    """
    with os.scandir(folder) as entries:
        names = sorted(  # strings compare as their UTF-8 does
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
    """One page of a listing. `token`: the last entry when more follow, "" on the last page."""

    keys: list[str]
    prefixes: list[str]
    token: str


def page_of(keys: Iterable[str], prefix: str, delimiter: str, token: str, max_keys: int) -> Page:
    """The `max_keys` entries after the entry `token` ("" for the first page).

    keys: sorted, all beginning with `prefix`. Those that hold the `delimiter` beyond it count as one entry each
    common prefix, which ends with the delimiter.
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
    """(key, False) or (common prefix, True), each once."""
    last = ""
    for key in keys:
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        entry = key if cut < 0 else key[: cut + len(delimiter)]
        if entry != last:
            yield entry, cut >= 0
        last = entry


@dataclass(frozen=True)
class Listing:
    """What a ListObjectsV2 request asks for."""

    prefix: str = ""
    delimiter: str = ""
    start_after: str = ""
    token: str = ""
    max_keys: int = MAX_KEYS
    encode: bool = False

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Listing:
        """Raises InvalidArgument."""
        given = query.get("max-keys", str(MAX_KEYS))
        if not re.fullmatch("[0-9]{1,9}", given):
            raise S3Error("InvalidArgument", "max-keys")
        if query.get("encoding-type", "url") != "url":
            raise S3Error("InvalidArgument", "encoding-type")
        return cls(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            start_after=query.get("start-after", ""),
            token=read_token(query.get("continuation-token", "")),
            max_keys=min(int(given), MAX_KEYS),
            encode="encoding-type" in query,
        )

    def name(self, tag: str, name: str) -> str:
        """An element with a key or a part of one, encoded as the request wants it."""
        return element(tag, quote(name) if self.encode else name)


def write_token(entry: str) -> str:
    return base64.urlsafe_b64encode(entry.encode()).decode()


def read_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise S3Error("InvalidArgument", "continuation-token") from None


def list_objects(folder: Path, bucket: str, asked: Listing) -> str:
    """The XML of one page. Raises NoSuchBucket."""
    inside = find_bucket(folder, bucket)
    keys = keys_below(inside, asked.prefix, max(asked.start_after, asked.token))
    page = page_of(keys, asked.prefix, asked.delimiter, asked.token, asked.max_keys)
    return document(
        "ListBucketResult",
        element("Name", bucket),
        asked.name("Prefix", asked.prefix),
        asked.name("Delimiter", asked.delimiter) if asked.delimiter else "",
        asked.name("StartAfter", asked.start_after) if asked.start_after else "",
        element("ContinuationToken", write_token(asked.token)) if asked.token else "",
        element("NextContinuationToken", write_token(page.token)) if page.token else "",
        element("KeyCount", len(page.keys) + len(page.prefixes)),
        element("MaxKeys", asked.max_keys),
        element("EncodingType", "url") if asked.encode else "",
        element("IsTruncated", "true" if page.token else "false"),
        *(contents(inside, key, asked) for key in page.keys),
        *(group("CommonPrefixes", asked.name("Prefix", prefix)) for prefix in page.prefixes),
    )


def contents(folder: Path, key: str, asked: Listing) -> str:
    """The entry of an object; nothing when its file is gone since it was listed."""
    try:
        status = (folder / key).stat()
    except FileNotFoundError:
        return ""
    return group(
        "Contents",
        asked.name("Key", key),
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
    """us-east-1, which S3 tells by an empty element. Raises NoSuchBucket."""
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

"""The protocol of a read-only S3: addresses, conditions, ranges and errors."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote_to_bytes
from xml.sax.saxutils import escape

ETagOf = Callable[[Path, os.stat_result], str]

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
WRITABLE = "python -m dataload.benchmarks.origin FOLDER --writable"
ERRORS = {
    "InvalidArgument": (400, "An argument of the request is not valid."),
    "NoSuchBucket": (404, "The specified bucket does not exist."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "PreconditionFailed": (412, "At least one of the preconditions you specified did not hold."),
    "InvalidRange": (416, "The requested range is not satisfiable."),
    "NotImplemented": (501, f"This server does not support that. For one that takes writes: {WRITABLE}"),
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


def etag_of_file(_: Path, status: os.stat_result) -> str:
    """Return a quoted ETag that changes with the file."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def etag_of_content(path: Path, status: os.stat_result) -> str:
    """Return a quoted ETag that changes with the content only, as that of S3 does. It reads the file once."""
    return _md5(path, etag_of_file(path, status))


@cache
def _md5(path: Path, _version: str) -> str:
    with path.open("rb") as file:
        return f'"{hashlib.file_digest(file, "md5").hexdigest()}"'


def answer_object(request: Mapping[str, str], status: os.stat_result, etag: str, resource: str = "") -> Answer:
    """Return the answer to a GET or HEAD of an object.

    Args:
        request: Headers of the request.
        status: Status of the object's file.
        etag: The object's ETag.
        resource: Path of the object, for errors.

    Raises:
        S3Error: PreconditionFailed, InvalidRange, or NotImplemented for conditions on dates.
    """
    if {"If-Modified-Since", "If-Unmodified-Since", "If-Range"} & set(request):
        raise S3Error("NotImplemented", resource)
    size = status.st_size
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


def document(tag: str, *inside: str, namespace: str = NAMESPACE) -> str:
    attribute = f' xmlns="{namespace}"' if namespace else ""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{tag}{attribute}>{"".join(inside)}</{tag}>'


def group(tag: str, *inside: str) -> str:
    return f"<{tag}>{''.join(inside)}</{tag}>"


def element(tag: str, value: object) -> str:
    text = str(value).encode(errors="replace").decode()
    return group(tag, escape(text, {"\r": "&#13;", '"': "&quot;"}))

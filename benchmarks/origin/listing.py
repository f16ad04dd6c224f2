"""The listings of a read-only S3: keys below a folder, pages of them, and their XML."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from dataload.benchmarks.origin.s3 import ETagOf, S3Error, document, element, find_bucket, group

MAX_KEYS = 1000


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


def list_objects(folder: Path, bucket: str, listing: Listing, etag_of: ETagOf) -> str:
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
        *(contents(inside, key, listing, etag_of) for key in page.keys),
        *(group("CommonPrefixes", listing.name("Prefix", prefix)) for prefix in page.prefixes),
    )


def contents(folder: Path, key: str, listing: Listing, etag_of: ETagOf) -> str:
    """Return the entry of an object; "" if its file has been removed since the listing."""
    try:
        status = (folder / key).stat()
    except FileNotFoundError:
        return ""
    return group(
        "Contents",
        listing.name("Key", key),
        element("LastModified", timestamp(int(status.st_mtime))),
        element("ETag", etag_of(folder / key, status)),
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

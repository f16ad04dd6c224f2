"""The version of an object, from the metadata that its store returns."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from fsspec.implementations.dirfs import DirFileSystem

from dataload.errors import ObjectChanged
from dataload.runtime.redact import redacted

CHANGED = "was replaced after it was listed: start the program again, and write new objects under new names"
# Google's etag changes with the metadata, such as the storage class after a read; its generation only with the content.
VERSION_FIELDS = ("generation", "ETag", "etag", "sha256", "md5Hash", "checksum", "content_hash", "blob_id", "xet_hash")
DERIVED = "derived:"  # begins the versions that no store has given
OF_TABLE = f"{DERIVED}table/"  # begins those of files that never change, by the rules of their table
MODIFIED = f"{DERIVED}modified/"  # seconds and size follow
# The version of a local file. Owner, rights, links and the time of their change are no part of it.
LOCAL_FIELDS = ("ino", "mtime", "size")
# Not part of a version: the names, of which WebHDFS has another one in listings, and fields that a read changes.
NAMES = ("name", "url", "pathSuffix")
IN_BUCKET = re.compile(r"buckets/[^/]+/[^/]+/.")  # at Hugging Face
MOST_ANSWERS = 20_000  # to compare later ones with: some megabytes
CHANGED_BY_READS = ("accessTime", "completed", "in_alluxio_percentage", "last_access_time_ms", "persisted")


def version_of(info: dict[str, Any]) -> str:
    """Return the version of an object: its first version field verbatim, else one that is derived.

    It is derived from time and size for an object in S3, from `LOCAL_FIELDS` for a local file, and otherwise from all
    metadata.
    """
    if lfs := info.get("lfs"):  # at Hugging Face, whose `blob_id` is that of a pointer
        return str(lfs["sha256"])
    for name in VERSION_FIELDS:
        if info.get(name):
            return str(info[name])
    if isinstance(http_date := info.get("Last-Modified"), str) and info.get("size") is not None:
        with suppress(ValueError):  # a web server without ETags
            return f"{MODIFIED}{int(parsedate_to_datetime(http_date).timestamp())}/{info['size']}"
    modified = info.get("LastModified")
    if isinstance(modified, datetime) and "size" in info:  # in S3, without an ETag
        return f"{MODIFIED}{int(modified.timestamp())}/{info['size']}"
    names = LOCAL_FIELDS if info.keys() >= set(LOCAL_FIELDS) else sorted(info.keys() - _volatile(info))
    fields = [(name, _text(info[name])) for name in names]
    return DERIVED + hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()


def is_tag(version: str) -> bool:
    """Return whether a version is what the store calls it, as opposed to one that follows from other metadata."""
    return not version.startswith(DERIVED)


def _volatile(info: dict[str, Any]) -> set[str]:
    accessed = ["time"] if "mtime" in info else []  # In SFTP and SMB, "time" is that of the last access.
    return {*NAMES, *CHANGED_BY_READS, *accessed}


def forget(filesystem: Any, path: str) -> None:
    """Make a filesystem of fsspec forget the info of an object. Some keep it in the listing of its folder alone."""
    filesystem, path = unwrapped(filesystem, path)
    filesystem.invalidate_cache(path)
    parent = filesystem._parent(path)  # noqa: SLF001 (an extension point of fsspec)
    if parent in filesystem.dircache:  # Nothing is above a repository of Hugging Face: its filesystem would raise.
        filesystem.invalidate_cache(parent)


@contextmanager
def fresh_listing(filesystem: Any, path: str | None) -> Iterator[None]:
    """Make a filesystem of fsspec forget its listings of `path` and below (None: all), and those of the block.

    It would keep 1 to 2 kB an object for the life of the process.
    """
    filesystem, place = unwrapped(filesystem, path or "")  # fsspec's own wrapper passes nothing on before 2026
    if filesystem.protocol == "reference":  # Its listings are made of the references, once and together.
        yield
        return
    filesystem.invalidate_cache(None if path is None else place)
    if path is not None:
        _forget_below(filesystem, place)
    before = set(filesystem.dircache)
    try:
        yield
    finally:
        # Reads from Hugging Face take sizes from the listing.
        for folder in set(filesystem.dircache) - before if filesystem.protocol != "hf" else ():
            with suppress(KeyError):  # Another thread forgets it, too.
                del filesystem.dircache[folder]


def _forget_below(filesystem: Any, path: str) -> None:
    """Make a filesystem forget its listings of the folders below a path. `invalidate_cache` of FTP keeps them."""
    for folder in list(filesystem.dircache):
        if folder.startswith(f"{path.rstrip('/')}/"):
            filesystem.dircache.pop(folder, None)


def refreshing(filesystem: Any, path: str) -> dict[str, Any]:
    """Return the arguments of `info` with which Hugging Face's filesystem requests one object; none for others.

    Without them it lists the whole folder. While another thread forgets that listing, an info lacks fields.
    """
    filesystem, path = unwrapped(filesystem, path)
    is_in_repository = filesystem.protocol == "hf" and getattr(filesystem.resolve_path(path), "path_in_repo", "")
    return {"refresh": True, "expand_info": True} if is_in_repository else {}


def bucket_info(filesystem: Any, path: str) -> dict[str, Any] | None:
    """Request the info of an object or a folder in a bucket of Hugging Face; None if it is missing or elsewhere.

    The `info` of its filesystem lists the whole folder of an object. It raises a KeyError if another thread makes it
    forget that listing.
    """
    inner, place = unwrapped(filesystem, path)
    if inner.protocol != "hf" or not IN_BUCKET.match(place) or not _lists_single_objects():
        return None
    try:
        listed = inner.ls(place, refresh=True)
    except FileNotFoundError:
        return None
    found = next((info for info in listed if info["name"] == place), None)
    if found is None:
        return {"name": path, "size": 0, "type": "directory"}
    if found not in inner.dircache.get(inner._parent(place), [found]):  # noqa: SLF001 (an extension point of fsspec)
        forget(inner, place)  # Its reads would take the size from the older listing.
    return {**found, "name": path}


def _lists_single_objects() -> bool:
    """Return whether Hugging Face lists a single object. Before 2.2, it kept that listing as one of the folder."""
    import huggingface_hub

    major, minor = huggingface_hub.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 2)


def unwrapped(filesystem: Any, path: str = "") -> tuple[Any, str]:
    """Return the filesystem that keeps connections and listings, without those that add a folder to each path."""
    while isinstance(filesystem, DirFileSystem):
        path, filesystem = filesystem._join(path), filesystem.fs  # noqa: SLF001 (fsspec has no public name for it)
    return filesystem, path


class Answer(NamedTuple):
    """What an answer of S3 says about the version of its object; None where it says nothing."""

    tag: str | None = None
    modified: datetime | None = None
    size: int | None = None
    version_id: str | None = None


class Comparison:
    """Compares the version of an object with that of each answer. Any thread may call it."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], Answer] = {}
        self._mutex = threading.Lock()

    def check(self, path: str, version: str, answer: Answer) -> None:
        """Raise ObjectChanged if an answer is of another version.

        An answer without a usable ETag is compared with the time and the size in `version`, if it has them, and with
        the first answer of the object.
        """
        if answer.tag and is_tag(version):
            is_other = _opaque(answer.tag) != _opaque(version)
        else:
            is_other = self._first_of(path, version, answer) != answer or _is_later(answer, version)
        if is_other:
            raise ObjectChanged(f"{redacted(path)} {CHANGED}")

    def _first_of(self, path: str, version: str, answer: Answer) -> Answer:
        with self._mutex:
            first = self._first.setdefault((path, version), answer)
            if len(self._first) > MOST_ANSWERS:
                del self._first[next(iter(self._first))]
            return first


def _is_later(answer: Answer, version: str) -> bool:
    """Return whether an answer has another time or size than the version names. Headers and listings round times."""
    if not version.startswith(MODIFIED):
        return False
    modified, size = map(int, version.removeprefix(MODIFIED).split("/"))
    if answer.modified is not None and abs(answer.modified.timestamp() - modified) > 1:
        return True
    return answer.size is not None and answer.size != size


def _opaque(tag: str) -> str:
    return tag.removeprefix("W/").strip('"')  # Some stores leave out the quotes in listings.


def _text(value: Any) -> str:
    # fsspec's memory filesystem has a time as seconds in listings, and as a datetime in the metadata of one object.
    is_moment = isinstance(value, datetime) and value.tzinfo is not None
    return str(value.timestamp() if is_moment else value)

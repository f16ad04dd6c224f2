"""Verification and eviction of a whole cache, for the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import lmdb
from fsspec.core import has_magic
from fsspec.utils import glob_translate

from dataload.cache import blob_file
from dataload.cache.local.directory import EXHAUSTED, CacheFolder
from dataload.cache.local.index import Row
from dataload.cache.local.read_only import is_read_only
from dataload.cache.local.registry import open_folder
from dataload.cache.local.setup.preflight import check_owner
from dataload.errors import ConfigError
from dataload.runtime.redact import redacted

EVICTED_BYTES = 1 << 30  # at once, between two calls of `progress`


@dataclass
class Report:
    """The result of `verify`.

    Attributes:
        blobs: Number of intact blobs.
        bytes: Bytes of the intact blobs on disk, checksums included.
        problems: One line per problem, with the name of the blob.
    """

    blobs: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


class NoCacheError(ConfigError):
    """A folder holds no cache."""


def open_existing(path: Path, *, allow_network_filesystem: bool = False) -> CacheFolder:
    """Open the cache at `path`, without creating one.

    Raises:
        NoCacheError: There is no cache at `path`.
        ConfigError: It cannot be opened.
    """
    try:
        if is_read_only(path):
            raise ConfigError(f"the cache at {path} is read-only: run this command where it can be written")
        if path.exists() and not allow_network_filesystem:
            check_owner(path)  # first: others may not even see whether a cache has a FORMAT
        if (path / "FORMAT").exists():
            return open_folder(path, allow_network_filesystem=allow_network_filesystem)
    except (OSError, lmdb.Error) as error:
        way = "end the processes that use it if they hang, or look at its disk, and try again"
        raise ConfigError(f"the cache at {path} cannot be opened just now ({error}): {way}") from error
    raise NoCacheError(f"no cache at {path}: pass the folder of a cache as path")


def verify(folder: CacheFolder, *, repair: bool = False, progress: Callable[[int], object] = lambda _: None) -> Report:
    """Verify every blob against its key and checksums, and the index against the files and its accounts.

    Blobs that are being filled are skipped.

    Args:
        folder: The cache.
        repair: Remove damaged blobs and correct the index. The blobs are fetched again on their next use.
        progress: Called with the bytes of each blob.

    Returns:
        The intact blobs and the problems.

    Raises:
        OSError: This process may have no further file or memory map.
    """
    report = Report()
    known = {row.digest: row for row in folder.index.rows()}
    for row in known.values():
        problem = _problem(folder, row)
        if problem is None:
            report.blobs += 1
            report.bytes += row.size
        elif _holds(folder, row.digest, partial(_damaged, folder, row), repair=repair):
            report.problems.append(f"{row.name}: {problem}")
        progress(row.size)
    for file in (folder.path / "blobs").glob("*/*"):
        digest = bytes.fromhex(file.name) if blob_file.FILE_NAME.fullmatch(file.name) else b""
        if digest in known:
            continue
        if not digest or _holds(folder, digest, partial(_unknown, folder, digest), repair=repair):
            report.problems.append(f"{file}: not in the index")
    owed = folder.index.owed_bytes(repair=repair)
    if owed:
        report.problems.append(f"{folder.path / 'index'}: its accounts are off by {owed} bytes")
    return report


def evict(
    folder: CacheFolder,
    *,
    path: str | None = None,
    keep_bytes: int = 0,
    progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Evict the blobs below a path, or the least recently used blobs.

    Args:
        folder: The cache.
        path: An object or a folder as the origin names it, such as "bucket/folder", or a glob of objects. None: evict
            the least recently used blobs.
        keep_bytes: Without `path`: most bytes that remain.
        progress: Called with the bytes of each blob checked, or of each batch evicted.

    Returns:
        The number of bytes evicted.

    Raises:
        ConfigError: `path` is not a valid glob.
    """
    evicted = 0
    if path is None:
        used = folder.index.used_bytes()
        while used > keep_bytes:
            folder.evict(max(keep_bytes, used - EVICTED_BYTES))
            left = folder.index.used_bytes()
            if left >= used:  # The rest is being filled, or other processes fill as fast.
                break
            progress(used - left)
            evicted += used - left
            used = left
    else:
        chosen = _named(path, folder)
        for row in folder.index.rows():
            if chosen(row.name):
                evicted += folder.remove([row.digest])
            progress(row.size)
    return evicted


def _named(path: str, folder: CacheFolder) -> Callable[[str], object]:
    """Return a predicate on blob names that matches the object or folder `path`; if neither is cached, the glob `path`.

    Raises:
        ConfigError: `path` is not a valid glob.
    """
    path = " ".join(path.split())  # as in `blob_name`
    named = redacted(path) if "://" in path else path  # likewise; a "?" elsewhere is of a glob
    below = (f"{named.rstrip('/')}/", f"{named}#")
    if not has_magic(path) or any(row.name.startswith(below) for row in folder.index.rows()):
        return lambda name: name.startswith(below)
    try:
        matches = re.compile(glob_translate(path)).match
    except ValueError as error:
        raise ConfigError(f"{path} is not a valid glob: {error}") from error
    return lambda name: matches(name.rpartition("#")[0])


def _problem(folder: CacheFolder, row: Row) -> str | None:
    path = folder.path_of(row.digest)
    try:
        footer, name, status = blob_file.read_footer(path)  # open_map does not verify the name of an empty blob.
        blob_file.open_map(path, row.digest, blob_file.VerifiedSegments())
    except FileNotFoundError:
        return "is in the index, but its file is missing"
    except OSError as error:
        if error.errno in EXHAUSTED:  # of this process: the blob may be intact
            raise
        return str(error)
    size = blob_file.allocated(status.st_size)
    if (footer.kind, name, size) != (row.kind, row.name, row.size):
        return f"is {name!r} ({footer.kind}) of {size} bytes, the index says {row.name!r} ({row.kind}) of {row.size}"
    return None


def _damaged(folder: CacheFolder, row: Row) -> bool:
    return folder.index.size_of(row.digest) is not None and _problem(folder, row) is not None


def _unknown(folder: CacheFolder, digest: bytes) -> bool:
    return folder.index.size_of(digest) is None and folder.path_of(digest).exists()


def _holds(folder: CacheFolder, digest: bytes, wrong: Callable[[], bool], *, repair: bool) -> bool:
    """Return whether a problem persists under the blob's lock, and repair it; False if the lock is taken."""
    with folder.locks.hold(digest, timeout=0) as held:
        found = held and wrong()
        if found and repair:
            folder.discard(digest)
        return found

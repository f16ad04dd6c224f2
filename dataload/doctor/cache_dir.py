"""Checks of the folder that is to hold the cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import lmdb
from rich.filesize import decimal

from dataload.cache.local.index import Index
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.setup import default_limit, preflight, recovery
from dataload.doctor.finding import Case, Finding, ok, problem, reason, warning
from dataload.errors import ConfigError
from dataload.loader.capacity import need_of

IN_MEMORY = frozenset({"ramfs", "rootfs", "tmpfs"})
SMALL_CACHE_BYTES = 10**9  # below this, a default limit is reported as too small


def filesystem(case: Case) -> Finding:
    kind = preflight.filesystem_of(case.existing, case.mounts)
    if kind not in preflight.LOCAL:
        message = preflight.not_local(case.folder, kind)
        advice = "name a folder on a local disk: --cache-dir /nvme/cache"
        return (warning if case.cache.allow_network_filesystem else problem)(message, advice)
    if kind in IN_MEMORY:
        return warning(
            f"{case.folder} is in memory ({kind}): the cache takes memory from the training and is lost at a restart",
            "name a folder on a local disk: --cache-dir /nvme/cache",
        )
    return ok(f"{case.folder} is on {kind}")


def read_only(case: Case) -> Finding:
    """Say what a cache that only others may write does."""
    return ok(f"{case.folder} is a read-only cache: it serves what it holds, and what it lacks is fetched each time")


def usable(case: Case) -> Finding:
    """Check that the folder is a cache, or is empty and writable."""
    try:
        if case.folder.exists():
            if not case.cache.allow_network_filesystem:
                preflight.check_owner(case.folder)
            preflight.check(case.folder, allow_network_filesystem=True)  # `filesystem` reports the filesystem.
            if (case.folder / "FORMAT").exists() and (found := preflight.open_to_others(case.folder)):
                return (warning if case.cache.allow_network_filesystem else problem)(*found)
    except ConfigError as error:
        what, _, advice = str(error).rpartition(": ")
        return problem(what, advice)
    except OSError as error:
        return problem(reason(error), "name a folder of your own: --cache-dir")
    try:
        tempfile.TemporaryDirectory(dir=case.existing, prefix="dataload-doctor-").cleanup()
    except OSError as error:  # os.access() tells it neither to root nor for /proc
        return problem(
            f"user {os.geteuid()} may not write to {case.existing}: {error.strerror}",
            "name a folder of your own: --cache-dir",
        )
    return ok("the folder is a cache or can become one")


def capacity(case: Case) -> Finding:
    """Check that the disk has space for the limit of the cache."""
    try:
        free, used = shutil.disk_usage(case.existing).free, _used(case.folder)
    except lmdb.Error as error:
        return problem(f"the index of {case.folder} cannot be read: {reason(error)}", "dataload cache verify --repair")
    limit = _limit(case, used)
    message = f"{decimal(free)} are free on the disk of {case.folder}"
    if limit > free + used:
        return problem(
            f"{message}, but the cache may grow by {decimal(limit - used)}",
            f"free some space, or lower cache_bytes to {decimal(free + used)}",
        )
    message += f"; the cache may use {decimal(limit)}"
    if case.cache.limit is None and limit < SMALL_CACHE_BYTES:
        return problem(message, "free some space, or name a folder on a larger disk: --cache-dir /nvme/cache")
    return ok(message)


def size(case: Case) -> Finding:
    """Check that a loader of the dataset accepts the limit of the cache."""
    if case.reads is None:
        if case.unreadable:
            return warning("not checked, because the dataset cannot be read", "see the checks of its store")
        return ok("not checked without the URL of a dataset")
    limit = _limit(case, _used(case.folder))
    try:
        disk = None if case.cache.limit else case.existing
        need_of([case.reads], limit, bytes(16), 1 / case.reads[0].num_streams, disk)
    except ConfigError as error:
        what, _, advice = str(error).partition("; ")
        return problem(what, advice)
    return ok(f"{decimal(limit)} hold what the loader reads at a time")


def _limit(case: Case, used: int) -> int:
    """Return the limit of a cache that holds `used` bytes."""
    return case.cache.limit or default_limit.stored(case.folder) or default_limit.proposed(case.existing, used)


def _used(folder: Path) -> int:
    """Return the bytes that the cache holds; 0 if there is none or it is not readable. Raise lmdb.Error."""
    with suppress(OSError):
        if not recovery.trusted(folder / "index"):  # LMDB could crash the process. The next job rebuilds the index.
            return sum(file.lstat().st_size for file in (folder / "blobs").glob("*/*"))
        with closing(Index(folder / "index")) as index:
            return index.used_bytes()
    return 0


def locks(case: Case) -> Finding:
    """Check that a lock held through one descriptor excludes a second one, as it must between processes."""
    try:
        with tempfile.NamedTemporaryFile(dir=case.existing, prefix="dataload-doctor-") as file:
            first, second = KeyLocks(file.name), KeyLocks(file.name)
            with first.hold(bytes(8), timeout=0) as held, second.hold(bytes(8), timeout=0) as held_twice:
                if held and not held_twice:
                    return ok(f"file locks work in {case.existing}")
        message = f"file locks in {case.existing} do not exclude other holders"
    except OSError as error:
        message = f"files in {case.existing} cannot be locked: {error.strerror}"
    return problem(message, "name a folder on a local disk, such as ext4 or xfs: --cache-dir /nvme/cache")

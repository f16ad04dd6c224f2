"""Whether a folder can hold a cache, and a good one."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import lmdb
from rich.filesize import decimal

from dataload.cache.local import default_limit, preflight
from dataload.cache.local.index import Index
from dataload.cache.local.key_locks import KeyLocks
from dataload.doctor.finding import Case, Finding, ok, problem, reason, warning
from dataload.errors import ConfigError

IN_MEMORY = frozenset({"ramfs", "rootfs", "tmpfs"})
LITTLE_BYTES = 10**9  # of a cache that nobody has limited


def filesystem(case: Case) -> Finding:
    kind = preflight.filesystem_of(case.existing, case.mounts)
    if kind not in preflight.LOCAL:
        said, advice = preflight.not_local(case.folder, kind), "name a folder on a local disk: --cache-dir /nvme/cache"
        return (warning if case.allow_network_filesystem else problem)(said, advice)
    if kind in IN_MEMORY:
        return warning(
            f"{case.folder} is in memory ({kind}): what it holds is taken from the training, and lost at a restart",
            "name a folder on a local disk: --cache-dir /nvme/cache",
        )
    return ok(f"{case.folder} is on {kind}")


def ours(case: Case) -> Finding:
    """Whether it may be made a cache."""
    try:
        if case.folder.exists():
            preflight.check(case.folder, allow_network_filesystem=True)  # That is what `filesystem` looks at.
    except ConfigError as error:
        what, _, advice = str(error).rpartition(": ")
        return problem(what, advice)
    except OSError as error:
        return problem(reason(error), "name a folder of your own: --cache-dir")
    if not os.access(case.existing, os.W_OK | os.X_OK, effective_ids=True):
        return problem(
            f"user {os.geteuid()} may not write to {case.existing}", "name a folder of your own: --cache-dir"
        )
    return ok("it is a cache, or may become one")


def room(case: Case) -> Finding:
    try:
        free, used = shutil.disk_usage(case.existing).free, _used(case.folder)
    except lmdb.Error as error:
        return problem(f"the index of {case.folder} cannot be read: {reason(error)}", "dataload cache verify --repair")
    limit = case.cache_bytes or default_limit.stored(case.folder) or default_limit.proposed(case.existing, used)
    said = f"{decimal(free)} are free on the disk of {case.folder}"
    if limit > free + used:
        return problem(
            f"{said}, {decimal(limit - used)} more may be asked of it",
            f"free some, or lower cache_bytes to {decimal(free + used)}",
        )
    said += f"; the cache may take {decimal(limit)}"
    if case.cache_bytes is None and limit < LITTLE_BYTES:
        return problem(said, "free some, or name a folder on a larger disk: --cache-dir /nvme/cache")
    return ok(said)


def _used(folder: Path) -> int:
    """Bytes that the cache there holds; 0 where there is none that we may look into. Raises lmdb.Error."""
    with closing(Index(folder / "index")) as index, suppress(OSError):
        return index.used_bytes()
    return 0


def locks(case: Case) -> Finding:
    """Two holders of one lock, by two descriptors, as two processes would be."""
    try:
        with tempfile.NamedTemporaryFile(dir=case.existing, prefix="dataload-doctor-") as file:
            first, second = KeyLocks(file.name), KeyLocks(file.name)
            with first.hold(bytes(8), timeout=0) as held, second.hold(bytes(8), timeout=0) as held_too:
                if held and not held_too:
                    return ok(f"they work in {case.existing}")
        what = f"locks in {case.existing} keep nobody out"
    except OSError as error:
        what = f"nothing can be locked in {case.existing}: {error.strerror}"
    return problem(what, "name a folder on a local disk, such as ext4 or xfs: --cache-dir /nvme/cache")

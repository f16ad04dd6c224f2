"""The input and the result of a check."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dataload.cache.config import CacheConfig
from dataload.runtime.redact import redacted

if TYPE_CHECKING:
    from dataload.rows.row_group_cache import RowGroupCache
    from dataload.samplers.order import Order

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_USERINFO = re.compile(r"[^\s/@]+:[^\s/]*@")  # of an address without "//", which `redacted` does not match


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Args:
        status: "ok", "warning" (it works, at a cost) or "problem".
        what: Description of the finding.
        advice: How to fix it, or "".
    """

    status: str
    what: str
    advice: str = ""


def ok(what: str) -> Finding:
    return Finding(OK, redacted(what))


def warning(what: str, advice: str) -> Finding:
    return Finding(WARNING, redacted(what), advice)


def problem(what: str, advice: str) -> Finding:
    return Finding(PROBLEM, redacted(what), advice)


@dataclass(frozen=True)
class Case:
    """The planned run that the checks examine: arguments of `make_loader`, and paths of this machine.

    Args:
        cache: The settings of the cache.
        batch_size: Rows of a rank's batch.
        local_world_size: Ranks on this host. None: as the launcher says.
        num_workers: Worker processes of a rank.
        prefetch: Batches that each worker prefetches.
        pin_memory: Whether batches are pinned.
        row_bytes: Size of a decoded row in bytes. None: unknown.
        reads: The order of a loader and the row groups that it reads. None: unknown.
        unreadable: Why the dataset cannot be read, or "".
        mounts: Where the kernel lists the mounts.
        shared_memory: Where shared memory is mounted.
    """

    cache: CacheConfig
    batch_size: int = 256
    local_world_size: int | None = None
    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    row_bytes: int | None = None
    reads: tuple[Order, RowGroupCache] | None = None
    unreadable: str = ""
    mounts: Path = Path("/proc/self/mountinfo")
    shared_memory: Path = Path("/dev/shm")  # noqa: S108 (torch's)

    @property
    def folder(self) -> Path:
        """The cache folder."""
        return self.cache.folder

    @property
    def existing(self) -> Path:
        """The cache folder, or its nearest parent that exists and is accessible."""
        return next(path for path in (self.folder, *self.folder.parents) if _exists(path))

    @property
    def in_flight(self) -> int | None:
        """Bytes of the batches in flight from the workers of a rank; None if unknown."""
        if self.row_bytes is None:
            return None
        return self.row_bytes * self.batch_size * self.num_workers * self.prefetch


def reason(error: BaseException) -> str:
    """Return the message of an error without credentials, or the name of its type."""
    return _USERINFO.sub("", str(error)) or type(error).__name__


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False

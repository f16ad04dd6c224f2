"""What a check is told, and what it finds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from dataload.runtime.redact import redacted

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_USERINFO = re.compile(r"[^\s/@]+:[^\s/@]*@")  # of an address without the // that `redacted` goes by


@dataclass(frozen=True)
class Finding:
    """status: "ok", "warning" (it works, at a price) or "problem"; what: what is so; advice: what to do, or ""."""

    status: str
    what: str
    advice: str = ""


def ok(what: str, advice: str = "") -> Finding:
    return Finding(OK, redacted(what), advice)


def warning(what: str, advice: str) -> Finding:
    return Finding(WARNING, redacted(what), advice)


def problem(what: str, advice: str) -> Finding:
    return Finding(PROBLEM, redacted(what), advice)


@dataclass(frozen=True)
class Case:
    """What is planned: as the arguments of `make_loader`.

    folder: of the cache; row_bytes: of a decoded row; None: not known. The last three are where this machine says how
    it is.
    """

    folder: Path
    cache_bytes: int | None = None
    batch_size: int = 256
    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    row_bytes: int | None = None
    cluster: str | None = field(default=None, repr=False)
    allow_network_filesystem: bool = False
    mounts: Path = Path("/proc/self/mountinfo")
    shared_memory: Path = Path("/dev/shm")  # noqa: S108 (torch's)
    max_map_count: Path = Path("/proc/sys/vm/max_map_count")

    @property
    def existing(self) -> Path:
        """The folder of the cache, or the one above it that is there, as far as we may look."""
        return next(path for path in (self.folder, *self.folder.parents) if _is_there(path))

    @property
    def in_flight(self) -> int | None:
        """Bytes of batches on their way from the worker processes of a rank; None: not known."""
        if self.row_bytes is None:
            return None
        return self.row_bytes * self.batch_size * self.num_workers * self.prefetch


def reason(error: BaseException) -> str:
    """What an error says, or what it is."""
    return _USERINFO.sub("", str(error)) or type(error).__name__


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False

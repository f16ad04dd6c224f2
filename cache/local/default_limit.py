"""The default limit of a cache: half of what its disk had for it when the cache was made.

All processes take it from one file, `LIMIT`. If each computed it anew, it would grow with the cache and follow the
free space of the disk, and processes would evict each other's blobs by different limits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dataload.cache.local.trust import write_durably

FILE = "LIMIT"


def stored(folder: Path) -> int | None:
    """Return the default limit of the cache at `folder` in bytes; None if there is none, or none that can be read."""
    try:
        limit = int((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return limit if limit > 0 else None


def proposed(folder: Path, used: int) -> int:
    """Return the limit of a cache made now. used: bytes that it holds already. Raises OSError."""
    return (used + shutil.disk_usage(folder).free) // 2


def fix(folder: Path, used_bytes: Callable[[], int | None]) -> int:
    """Return the default limit of the cache at `folder`, and store it if there is none yet.

    The caller holds the set-up lock, so all processes agree.

    Args:
        folder: The cache folder.
        used_bytes: Called only for a new limit. None: not known just now; then the limit is not stored.

    Raises:
        OSError: The disk cannot be asked for its free space.
    """
    limit = stored(folder)
    if limit is None:
        used = used_bytes()
        limit = proposed(folder, used or 0)
        if used is None:
            return limit
        with suppress(OSError):  # On a full disk a later process stores it.
            write_durably(folder / FILE, str(limit))
    return limit

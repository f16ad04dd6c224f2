"""The default limit of a cache: half of the disk space available to it when the cache was created.

All processes read it from one file, `LIMIT`. If each process computed it, the limit would grow with the cache and
follow the free space of the disk, and processes would evict each other's blobs by different limits.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from dataload.runtime.durable_file import write_durably

FILE = "LIMIT"


def stored(folder: Path) -> int | None:
    """Return the stored default limit of the cache at `folder` in bytes; None if it is missing or unreadable."""
    try:
        limit = int((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return limit if limit > 0 else None


def proposed(folder: Path, used: int) -> int:
    """Return the default limit in bytes of a cache that is created now.

    Args:
        folder: The cache folder.
        used: Bytes that the cache already holds.

    Raises:
        OSError: The free space of the disk is unknown.
    """
    return (used + shutil.disk_usage(folder).free) // 2


def fix(folder: Path, used: int | None) -> int:
    """Return the default limit of the cache at `folder`, and store it if there is none yet.

    The caller holds the set-up lock, so all processes agree.

    Args:
        folder: The cache folder.
        used: Bytes that the cache holds. None: unknown; the limit is not stored.

    Raises:
        OSError: The free space of the disk is unknown.
    """
    limit = stored(folder)
    if limit is None:
        limit = proposed(folder, used or 0)
        if used is not None:
            with suppress(OSError):  # On a full disk a later process stores it.
                write_durably(folder / FILE, str(limit))
    return limit

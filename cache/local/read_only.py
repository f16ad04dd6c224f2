"""A cache folder that this process may read but not write, such as on a read-only mount or in a container image."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from dataload.cache import blob_file
from dataload.cache.health import Health
from dataload.cache.local.setup import cache_format
from dataload.cache.memory import MemoryTier
from dataload.cache.tier import Allocate, BlobKey, Fill, Span
from dataload.errors import CorruptEntry

log = logging.getLogger(__name__)


class ReadOnlyTier(MemoryTier):
    """The blobs of a cache folder that this process cannot write, and the memory of this process for all others.

    Hits need no index, locks or staging folder, so nothing in the folder changes.

    Args:
        path: The cache folder.
        limit: Capacity of the memory in bytes.

    Raises:
        ConfigError: The cache has another format.
    """

    read_only = True

    def __init__(self, path: Path, limit: int) -> None:
        cache_format.check(path)
        self.path = path
        self._blobs_folder = str(path / "blobs")
        super().__init__(limit)

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._verified = blob_file.VerifiedSegments()
        self._health = Health(str(self.path), time.monotonic, self.counters)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyTier, (self.path, self.limit)

    @property
    def location(self) -> str:
        return str(self.path)

    def get(self, key: BlobKey, span: Span | None = None) -> memoryview | None:
        found, reads = self._in_memory(key, span), self._health.reads
        if found is None and reads.allows():
            try:
                file = blob_file.path_in(self._blobs_folder, key.digest)
                found = blob_file.open_map(file, key.digest, self._verified, span, key)
            except FileNotFoundError:
                reads.inconclusive()
            except CorruptEntry as error:  # It tells nothing about the disk.
                self._health.report("reading a blob", error)
                reads.inconclusive()
            except OSError as error:
                self._health.report("reading a blob", error)
                reads.failed()
            else:
                reads.worked()
                self.counters.add(hits=1, bytes=len(found))
        return found

    def get_or_fill(
        self, key: BlobKey, fill: Fill, span: Span | None = None, *, to_keep: int | None = None
    ) -> memoryview:
        def fill_lacking(allocate: Allocate) -> None:
            if self._health.is_new("missing"):
                log.warning(
                    "cache %s is read-only and lacks %s: what it lacks is read from the origin each time",
                    self.path,
                    key.name,
                )
            fill(allocate)

        return super().get_or_fill(key, fill_lacking, span, to_keep=to_keep)


def is_read_only(path: Path) -> bool:
    """Return whether a folder holds a cache for reading only: on a read-only mount, or one that only root may write."""
    if os.access(path, os.W_OK, effective_ids=True) or not os.access(path / "FORMAT", os.R_OK, effective_ids=True):
        return False
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY) or path.stat().st_uid in (0, os.geteuid())

"""What tells one version of an object from another."""

from __future__ import annotations

import hashlib
from typing import Any

CHANGED = "was replaced while it was being read: list the dataset anew (on a filesystem, invalidate_cache)"
VERSION_FIELDS = ("ETag", "etag", "generation", "sha256", "md5Hash", "checksum", "content_hash")
# No part of a version: what an object is called, and what Alluxio says that changes when somebody reads it.
PASSING = ("name", "completed", "in_alluxio_percentage", "last_access_time_ms", "persisted")


def version_of(info: dict[str, Any]) -> str:
    """The version of an object, from what its store says: the ETag verbatim, else a digest of all that is said."""
    for name in VERSION_FIELDS:
        if info.get(name):
            return str(info[name])
    said = sorted((name, str(value)) for name, value in info.items() if name not in PASSING)
    return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()

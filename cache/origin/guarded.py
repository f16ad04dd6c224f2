"""What some filesystems of fsspec lack: whole listings, and redirects that leak no credentials."""

from __future__ import annotations

from typing import Any

from dataload.cache.origin.guarded_http import guarded_http
from dataload.cache.origin.guarded_s3 import guarded_s3
from dataload.cache.origin.version import unwrapped


def guarded(filesystem: Any) -> Any:
    """Return a filesystem, after adding what it lacks."""
    inner, _ = unwrapped(filesystem)
    if hasattr(inner, "call_s3"):
        guarded_s3(inner)
    elif hasattr(inner, "encode_url") and hasattr(inner, "set_session"):
        guarded_http(inner)
    return filesystem

"""S3 as an fsspec filesystem that is created when it is needed: the import of s3fs takes longer than a listing."""

from __future__ import annotations

import os
import pickle
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.config import conf
from fsspec.registry import known_implementations, registry

from dataload.cache.origin.guarded import guarded
from dataload.cache.origin.known_s3 import known_s3
from dataload.cache.origin.s3_names import VERSION, S3Names


class DeferredS3(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The name of a store in S3, and the options with which s3fs opens it.

    Its arguments are those of s3fs. A copy in another process reads the environment of that process.

    Attributes:
        known: The settings of its buckets; None if s3fs is needed to find them.
        endpoint_url: The address of the store.
    """

    protocol = S3Names.protocol
    root_marker = S3Names.root_marker
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.known = known_s3(options, os.environ)
        self.endpoint_url = self.known and self.known.endpoint

    def __hash__(self) -> int:
        return hash((pickle.dumps(self.storage_options), self.known))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeferredS3)
            and (self.storage_options, self.known) == (other.storage_options, other.known)
        )  # fmt: skip

    def load(self) -> Any:
        """Return the s3fs filesystem."""
        return guarded(fsspec.filesystem("s3", **self.storage_options))


def deferred_s3(url: str, options: dict[str, Any] | None) -> DeferredS3 | None:
    """Return the store of a URL; None unless it is S3 and its settings are known without s3fs."""
    protocol, mark, path = url.partition("://")
    if not mark or protocol not in DeferredS3.protocol or "::" in url or VERSION in path:
        return None
    if not all(map(_is_usual, DeferredS3.protocol)) or known_s3(options or {}, os.environ) is None:
        return None
    return DeferredS3(**(options or {}))


def _is_usual(protocol: str) -> bool:
    """Return whether fsspec opens this protocol with s3fs, without options of its own configuration."""
    loaded = registry.get(protocol)
    if loaded is not None and f"{loaded.__module__}.{loaded.__name__}" != "s3fs.core.S3FileSystem":
        return False
    return protocol not in conf and known_implementations[protocol]["class"] == "s3fs.S3FileSystem"

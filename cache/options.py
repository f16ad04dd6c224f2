"""The settings of `CacheConfig` as keyword arguments, for type checkers. `make options` writes this file."""

from __future__ import annotations

import os
from typing import TypedDict


class CacheOptions(TypedDict, total=False):
    """Arguments of functions that take `**options: Unpack[CacheOptions]`."""

    cache_dir: str | os.PathLike[str] | None
    cache_bytes: int | str | None
    block_bytes: int | str
    policy: str
    consistency: str
    engine: str
    in_flight: int
    cluster: str | None
    cluster_key: str | None
    origin_id: str | None
    allow_network_filesystem: bool
    page_checksums: bool

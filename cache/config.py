"""What a cache is told: where, how much, and by which rules."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field
from pathlib import Path

import bitmath
import platformdirs

from dataload.cache.cluster.url import ClusterUrl
from dataload.errors import ConfigError

POLICIES = ("pin", "lru")
CONSISTENCIES = ("generation", "open", "immutable")
ENGINES = ("auto", "fsspec", "obstore")


@dataclass(frozen=True)
class CacheConfig:
    """A host's cache.

    cache_dir: folder on a local disk, shared by all processes of the host; default: the user's cache folder.
    cache_bytes: most the cache may hold, in bytes or as text ("500GB"); default: half of what
        the cache holds and its disk has free, fixed when the cache is made.
    block_bytes: unit in which objects are fetched and kept, in bytes or as text.
    policy: "pin" keeps what running jobs use, drops the rest, oldest first, for room, and then admits nothing; "lru"
        drops what was used longest ago.
    consistency: when an object's version is asked for: once per "generation" (listing), at every "open", or never
        again once known ("immutable").
    engine: who moves the bytes: "auto", "fsspec" or "obstore"; "auto" takes obstore for S3 where it can be told all
        that s3fs was told, and `stats()` says why where it does not.
    in_flight: most requests to the origin at a time: of this process, or of all ranks of this host together where
        `make_loader` reads for them.
    cluster: "valkey://host:port,host:port", or "valkeys://…" with TLS: a Valkey or Redis, one server or a cluster, in
        which hosts find what others have made. User and password in the URL, or in VALKEY_USERNAME, VALKEY_PASSWORD.
        None: each host fetches for itself.
    origin_id: name of the store inside cache keys; default: its protocol and endpoint. Give two addresses of one
        store (a VPC endpoint, a proxy) the same name to share what is cached.
    allow_network_filesystem: use `cache_dir` even if its filesystem is not known to be local to this host. Only one
        host may use such a folder at a time: locks and the index do not work across hosts.

    Raises ConfigError naming the argument.
    """

    cache_dir: str | None = None
    cache_bytes: int | str | None = None
    block_bytes: int | str = "4MiB"
    policy: str = "pin"
    consistency: str = "generation"
    engine: str = "auto"
    in_flight: int = 64
    cluster: str | None = field(default=None, repr=False)
    origin_id: str | None = None
    allow_network_filesystem: bool = False

    def __post_init__(self) -> None:
        if self.cache_bytes is not None:
            object.__setattr__(self, "cache_bytes", parse_bytes("cache_bytes", self.cache_bytes))
        object.__setattr__(self, "block_bytes", parse_bytes("block_bytes", self.block_bytes))
        if self.cluster is not None:
            ClusterUrl.parse(self.cluster)
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ConfigError(f"in_flight={self.in_flight!r} must be a number of requests, at least one")
        for name, allowed in (("policy", POLICIES), ("consistency", CONSISTENCIES), ("engine", ENGINES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(allowed)}")

    @property
    def folder(self) -> Path:
        """Where the cache lives."""
        return Path(self.cache_dir or platformdirs.user_cache_path("dataload")).expanduser().absolute()

    @property
    def limit(self) -> int | None:
        """Most bytes the cache may hold; None: by the room on its disk."""
        return None if self.cache_bytes is None else int(self.cache_bytes)

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return int(self.block_bytes)


def parse_bytes(name: str, size: int | str) -> int:
    """`size` in bytes, from a number or text such as "500GB" or "4 MiB". Raises ConfigError naming the argument."""
    try:
        is_number = isinstance(size, numbers.Real) or str(size).isdecimal()
        count = int(size) if is_number else int(bitmath.parse_string(size).bytes)
    except (ValueError, TypeError):
        raise ConfigError(f"{name}={size!r} is not a size: give bytes or text such as '500GB' or '4MiB'") from None
    if count <= 0:
        raise ConfigError(f"{name}={size!r} must be more than zero bytes")
    return count

"""The settings of a cache."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import bitmath
import platformdirs

from dataload.arguments import did_you_mean, local_folder
from dataload.cache.cluster.mac import check_key
from dataload.cache.cluster.url import ClusterUrl
from dataload.errors import ConfigError

POLICIES = ("pin", "lru")
CONSISTENCIES = ("generation", "open", "immutable")
ENGINES = ("auto", "fsspec", "obstore")
DEFAULT_DIR = "DATALOAD_CACHE_DIR"  # the environment variable that names the default folder
NEAR = 0.73  # "cache_size" is as near to a setting, "user" and "region" are less near
# Arguments of `open`, which `fsspec.open` passes to the filesystem, too.
OF_OPEN = frozenset({"block_size", "cache_options", "cache_type"})


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a host's cache.

    Args:
        cache_dir: Folder on a local disk, shared by all processes of the host; `~` and `$NAME` are expanded. Default:
            DATALOAD_CACHE_DIR, else the user's cache folder.
        cache_bytes: Capacity in bytes, or as text ("500GB"). Default: half of the cache's size plus the free space of
            its disk, fixed when the cache is created.
        block_bytes: Size of the blocks in which objects are fetched and cached, in bytes or as text.
        policy: "pin" keeps the data that running jobs use, evicts other data, oldest first, and then admits nothing
            more. "lru" evicts the least recently used data.
        consistency: When to check an object's version: once per "generation" (listing), at every "open", or never
            again once known ("immutable").
        engine: The client that fetches bytes: "auto", "fsspec" or "obstore". "auto" uses obstore for S3 if it supports
            all options of the s3fs filesystem; otherwise the log and `stats()` give the reason.
        in_flight: Limit on concurrent requests to the origin. It applies to each process. `make_loader` divides it
            equally among the ranks of a host and their background decoders. Workers, which seldom fetch, may have as
            many as their rank.
        cluster: "valkey://host:port,host:port", or "valkeys://…" with TLS: a Valkey or Redis, one server or a cluster,
            through which hosts share cached data. Give user and password in the URL, or in VALKEY_USERNAME and
            VALKEY_PASSWORD. None: each host fetches its own data.
        cluster_key: A secret of all hosts that share the cluster, from `openssl rand -hex 32`. Values that were written
            without it are not used. Default: DATALOAD_CLUSTER_KEY, where no list of processes shows it. None: whoever
            can write to the cluster can change the data.
        origin_id: Name of the store in cache keys. Default: its protocol and endpoint; all regions of Amazon have one.
            Give two addresses of one store (a VPC endpoint, a proxy) the same name to share their cached data.
        allow_network_filesystem: Use `cache_dir` even if its filesystem is not known to be local. Only one host may
            use such a folder at a time: locks and the index do not work across hosts. Blobs of any owner and mode are
            used, with one warning: many of these filesystems show the same ones for all files.
        page_checksums: Verify the checksums that pages of Parquet files may have before rows are cached. `False` saves
            up to a fifth of the CPU time of a cold epoch over such files, as Spark writes them.

    Raises:
        ConfigError: An argument is invalid. The message names it.

    Example:
        >>> CacheConfig("/nvme/cache", cache_bytes="500GB", block_bytes="8MiB").block
        8388608
    """

    cache_dir: str | None = None
    cache_bytes: int | str | None = None
    block_bytes: int | str = "4MiB"
    policy: str = "pin"
    consistency: str = "generation"
    engine: str = "auto"
    in_flight: int = 64
    cluster: str | None = field(default=None, repr=False)
    cluster_key: str | None = field(default=None, repr=False)
    origin_id: str | None = None
    allow_network_filesystem: bool = False
    page_checksums: bool = True

    def __post_init__(self) -> None:
        if self.cache_bytes is not None:
            object.__setattr__(self, "cache_bytes", parse_bytes("cache_bytes", self.cache_bytes))
        if self.cache_dir is not None:
            local_folder("cache_dir", self.cache_dir)
        object.__setattr__(self, "block_bytes", parse_bytes("block_bytes", self.block_bytes))
        if self.cluster is not None:
            ClusterUrl.parse(self.cluster)
        if self.cluster_key is not None:
            check_key("cluster_key", self.cluster_key)
            if self.cluster is None:
                raise ConfigError("cluster_key: needs cluster=, the address of the Valkey whose values it protects")
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ConfigError(f"in_flight={self.in_flight!r} must be an integer of at least 1")
        for name, allowed in (("policy", POLICIES), ("consistency", CONSISTENCIES), ("engine", ENGINES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(allowed)}")

    @property
    def folder(self) -> Path:
        """The absolute path of the cache folder.

        Raises:
            ConfigError: It is in the home of a user who has none, or names a variable that is not set.
        """
        if self.cache_dir:
            return local_folder("cache_dir", self.cache_dir).absolute()
        if default := os.environ.get(DEFAULT_DIR):
            return local_folder(DEFAULT_DIR, default).absolute()
        try:
            return platformdirs.user_cache_path("dataload").expanduser().absolute()
        except RuntimeError as error:
            way = f"set {DEFAULT_DIR} or HOME, pass cache_dir=, or read without a cache by cache=False"
            raise ConfigError(f"user {os.geteuid()} has no home folder for the cache: {way}") from error

    @property
    def limit(self) -> int | None:
        """The capacity in bytes; None: the default of the folder, which its first opening fixes."""
        return None if self.cache_bytes is None else int(self.cache_bytes)

    @property
    def block(self) -> int:
        """The size of a block in bytes."""
        return int(self.block_bytes)


def chosen(cache: CacheConfig | Literal[False] | None, **options: Any) -> CacheConfig | None:
    """Return the cache that a dataset's arguments choose; None: no cache.

    Args:
        cache: A `CacheConfig`; False: no cache; None: the default cache, with these options.
        **options: Arguments of `CacheConfig`. None is the same as not given.

    Raises:
        ConfigError: `cache` is of another type or comes with options, or an option is invalid.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if cache is None:
        return CacheConfig(**given)
    if given:
        advice = (
            "not allowed with cache=False, leave it out" if cache is False else "pass it inside cache=CacheConfig(...)"
        )
        raise ConfigError(f"{min(given)}: {advice}")  # without the value, which may contain a password
    if cache is False:
        return None
    if not isinstance(cache, CacheConfig):
        raise ConfigError(f"cache={cache!r} must be a CacheConfig, False for no cache, or None for the default cache")
    return cache


def check_names(given: Iterable[str]) -> None:
    """Raise ConfigError if one of these names is a misspelt setting. Libraries pass other names, which are allowed."""
    for name in {*given} - OF_OPEN:
        if near := did_you_mean(name, (setting.name for setting in fields(CacheConfig)), "", NEAR):
            raise ConfigError(f"{name}= is unknown: {near} Options of the origin go into target_options")


def parse_bytes(name: str, size: int | str) -> int:
    """Return `size` in bytes, from a number or text such as "500GB" or "4 MiB".

    Raises:
        ConfigError: The size is invalid. The message names the argument.
    """
    try:
        is_number = isinstance(size, numbers.Real) or str(size).isdecimal()
        count = int(size) if is_number else round(bitmath.parse_string(size).bytes)
    except (ValueError, TypeError, OverflowError):  # the last for an infinite number
        raise ConfigError(f"{name}={size!r} is not a size: give bytes or text such as '500GB' or '4MiB'") from None
    if count <= 0:
        raise ConfigError(f"{name}={size!r} must be at least one byte")
    return count

"""The settings of a cache. `CacheConfig` is the only list of them."""

from __future__ import annotations

import inspect
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import platformdirs

from dataload.arguments import did_you_mean, local_folder
from dataload.cache.cluster.mac import check_key
from dataload.cache.cluster.url import ClusterUrl
from dataload.cache.options import CacheOptions
from dataload.errors import ConfigError

POLICIES = ("pin", "lru")
CONSISTENCIES = ("generation", "open", "immutable")
ENGINES = ("auto", "fsspec", "obstore")
DEFAULT_DIR = "DATALOAD_CACHE_DIR"  # the environment variable that names the default folder
NEAR = 0.73  # "cache_size" is as near to a setting, "user" and "region" are less near
# Arguments of `open`, which `fsspec.open` passes to the filesystem, too.
OF_OPEN = frozenset({"block_size", "cache_options", "cache_type"})
OF_FOLDER = {"of": "folder"}  # metadata of the settings that commands on a folder take, such as `dataload cache stats`
OF_PYTHON = {"of": "python"}  # metadata of the settings that no command takes
SIZE = re.compile(r"(-?(?:\d+\.?\d*|\.\d+))\s*([KMGTPE]I?)?B?", re.IGNORECASE)
UNITS: dict[str, int] = {
    f"{prefix}{binary}": base**power
    for binary, base in (("", 1000), ("I", 1024))
    for power, prefix in enumerate(["", *"KMGTPE"])
}


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a host's cache.

    `make_dataset`, `make_loader`, `mix` and `tiercache` take each of them as an argument, commands as an option.

    Args:
        cache_dir: Folder on a local disk that all processes of the host share; default: DATALOAD_CACHE_DIR, else the
            user's cache folder. `~` and `$NAME` are expanded.
        cache_bytes: Limit of the cache, in bytes or as text ("500GB"); default: half of the bytes that it holds and its
            disk has free, fixed when it is created.
        block_bytes: Size of the blocks in which objects are fetched and cached, in bytes or as text.
        policy: "pin" keeps the data that running jobs use, evicts other data, oldest first, and then admits nothing
            more; "lru" evicts the least recently used data.
        consistency: When `tiercache` checks an object's version: once per "generation" (listing), at every "open", or
            never again once known ("immutable", for objects that nobody overwrites). A dataset reads the versions that
            it has listed.
        engine: The client that fetches bytes: "auto", "fsspec" or "obstore". "auto" is obstore for S3, Google Cloud
            Storage and Azure, and a client of its own for HTTP(S) and the Hugging Face Hub. For options that these
            don't support it falls back to fsspec, at three times the CPU time, and the log and `stats()` say why.
        in_flight: Limit on concurrent requests to the origin, per process. `make_loader` divides it among the
            ranks of a host and their background decoders. Lower it if the store answers SlowDown.
        cluster: "valkey://host:port,host:port", or "valkeys://…" for TLS: a Valkey or Redis, one server or a cluster,
            through which hosts share cached data. User and password are in the URL, or in VALKEY_USERNAME and
            VALKEY_PASSWORD.
        cluster_key: A secret of all hosts that share the cluster; default: DATALOAD_CLUSTER_KEY. Values that were
            written without it are not used. Without a key, whoever can write to the cluster can change the data.
        origin_id: Name of the store in cache keys; default: its protocol and endpoint, account or host. Two addresses
            of one store, such as a VPC endpoint and Amazon itself, share cached data under one name.
        allow_network_filesystem: Use `cache_dir` even if its filesystem is not known to be local. Only one host may use
            it at a time: locks and the index do not work across hosts. Blobs of any owner and mode are used.
        page_checksums: Verify the checksums that pages of Parquet files may have, as Spark writes them, before rows are
            cached. `False` saves up to a fifth of the CPU time of a cold epoch over such files.

    Raises:
        ConfigError: An argument is invalid. The message names it.

    Example:
        >>> CacheConfig("/nvme/cache", cache_bytes="500GB", block_bytes="8MiB").block
        8388608
    """

    cache_dir: str | os.PathLike[str] | None = field(default=None, metadata=OF_FOLDER)
    cache_bytes: int | str | None = None
    block_bytes: int | str = "4MiB"
    policy: str = "pin"
    consistency: str = field(default="generation", metadata=OF_PYTHON)
    engine: str = "auto"
    in_flight: int = 64
    cluster: str | None = field(default=None, repr=False)
    cluster_key: str | None = field(default=None, repr=False, metadata=OF_PYTHON)  # A list of processes shows options.
    origin_id: str | None = None
    allow_network_filesystem: bool = field(default=False, metadata=OF_FOLDER)
    page_checksums: bool = True

    def __post_init__(self) -> None:
        if self.cache_bytes is not None:
            object.__setattr__(self, "cache_bytes", parse_bytes("cache_bytes", self.cache_bytes))
        if self.cache_dir is not None:
            local_folder("cache_dir", self.cache_dir)
            object.__setattr__(self, "cache_dir", os.fspath(self.cache_dir))
        object.__setattr__(self, "block_bytes", parse_bytes("block_bytes", self.block_bytes))
        if self.cluster is not None:
            ClusterUrl.parse(self.cluster)
        if self.cluster_key is not None:
            check_key("cluster_key", self.cluster_key)
            if self.cluster is None:
                raise ConfigError("cluster_key: needs cluster=, the address of the Valkey whose values it protects")
        if type(self.in_flight) is not int or self.in_flight < 1:
            raise ConfigError(f"in_flight={self.in_flight!r} must be an integer of at least 1")
        for name, allowed in (
            *(("policy", POLICIES), ("consistency", CONSISTENCIES), ("engine", ENGINES)),
            *(("allow_network_filesystem", (False, True)), ("page_checksums", (False, True))),
        ):
            if getattr(self, name) not in allowed:
                known = ", ".join(map(str, allowed))
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: use one of {known}")

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


def described() -> dict[str, str]:
    """Return what each setting does, by name, as the docstring of `CacheConfig` says it."""
    texts = re.split(r"^    (\w+): ", inspect.getdoc(CacheConfig) or "", flags=re.MULTILINE)
    by_name = dict(zip(texts[1::2], texts[2::2], strict=True))
    names = (each.name for each in fields(CacheConfig))
    return {name: " ".join(by_name.get(name, "").partition("\n\n")[0].split()) for name in names}


def split_options(arguments: Mapping[str, Any]) -> tuple[CacheOptions, dict[str, Any]]:
    """Return the arguments that are settings of a cache, and the others. A setting that is None is not given."""
    names = {each.name for each in fields(CacheConfig)}
    options: Any = {name: value for name, value in arguments.items() if name in names and value is not None}
    return options, {name: value for name, value in arguments.items() if name not in names}


def chosen(cache: CacheConfig | Literal[False] | None, options: CacheOptions) -> CacheConfig | None:
    """Return the cache that a dataset's arguments choose; None: no cache.

    Args:
        cache: A `CacheConfig`; False: no cache; None: the default cache, with these options.
        options: Arguments of `CacheConfig`. None is the same as not given.

    Raises:
        ConfigError: `cache` is of another type or comes with options, or an option is invalid or of `tiercache` only.
    """
    given, _ = split_options(options)
    if cache is None:
        cache, given = CacheConfig(**given), {}
    if given:
        advice = (
            "not allowed with cache=False, leave it out" if cache is False else "pass it inside cache=CacheConfig(...)"
        )
        raise ConfigError(f"{min(given)}: {advice}")  # without the value, which may contain a password
    if cache is False:
        return None
    if not isinstance(cache, CacheConfig):
        raise ConfigError(f"cache={cache!r} must be a CacheConfig, False for no cache, or None for the default cache")
    if cache.consistency != CacheConfig.consistency:
        way = "which lists its objects once and reads those versions: leave it out"
        raise ConfigError(f"consistency={cache.consistency!r} is a setting of tiercache, not of a dataset, {way}")
    return cache


def check_names(given: Iterable[str]) -> None:
    """Raise ConfigError if one of these names is a misspelt setting. Libraries pass other names, which are allowed."""
    for name in {*given} - OF_OPEN:
        if near := did_you_mean(name, (setting.name for setting in fields(CacheConfig)), "", NEAR):
            raise ConfigError(f"{name}= is unknown: {near} Options of the origin go into target_options")


def parse_bytes(name: str, size: int | str) -> int:
    """Return `size` in bytes, from a number or text such as "500GB", "4 MiB" or "1.5T".

    Raises:
        ConfigError: The size is invalid. The message names the argument.
    """
    invalid = ConfigError(f"{name}={size!r} is not a size: give bytes or text such as '500GB' or '4MiB'")
    try:
        if isinstance(size, numbers.Real):
            exact, unit = size, ""
        else:
            number, unit = SIZE.fullmatch(str(size).strip()).groups(default="")  # type: ignore[union-attr]
            exact = Fraction(number) * UNITS[unit.upper()]
        count = round(exact)
    except (AttributeError, ValueError, OverflowError):  # no such text; not a number; infinite
        raise invalid from None
    if not unit and count != exact:  # Perhaps "0.5" was to be half of something.
        raise invalid
    if count <= 0:
        raise ConfigError(f"{name}={size!r} must be at least one byte")
    return count

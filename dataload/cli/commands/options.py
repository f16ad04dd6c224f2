"""The options that commands share, and what their texts mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataload.errors import ConfigError

if TYPE_CHECKING:
    from dataload.cache.blocks.reader import Blocks, Object
    from dataload.cache.config import CacheConfig
    from dataload.cache.local.directory import CacheFolder
    from dataload.formats.hive_partitions import Keys

AllowNetworkFilesystem = Annotated[
    bool, typer.Option("--allow-network-filesystem", help="Use --cache-dir on whatever filesystem it is.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a batch, of all ranks together.")]
CacheBytes = Annotated[str | None, typer.Option(help='Most bytes the cache may hold, such as "500GB".')]
CacheDir = Annotated[Path | None, typer.Option(help="Folder of the cache; default: the user's cache folder.")]
Cluster = Annotated[str | None, typer.Option(help="Valkey or Redis that hosts share: valkey://host:port,host:port.")]
Columns = Annotated[str | None, typer.Option(help="Names, comma-separated, or a JSON list; default: all.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
NumStreams = Annotated[int | None, typer.Option(min=1, help="As the loader's; default: the number of nodes.")]
Seed = Annotated[int, typer.Option(help="Of the shuffle, as the loader's.")]
StorageOptions = Annotated[str | None, typer.Option(help="For the filesystem of the URL, as fsspec takes them; JSON.")]
Window = Annotated[int | None, typer.Option(min=1, help="Row groups to shuffle together; default: the best.")]


def names(text: str | None) -> list[str] | None:
    """The columns of --columns. Raises ConfigError."""
    if not text:
        return None
    if not text.startswith("["):
        return [name.strip() for name in text.split(",")]
    try:
        columns: list[str] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--columns={text}: not a JSON list: {error}") from error
    if not all(isinstance(column, str) for column in columns):
        raise ConfigError(f"--columns={text}: all of them must be strings")
    return columns


def node_of(text: str | None) -> tuple[int, int]:
    """(i, n) of "i/n"; the only node where nothing is said. Raises ConfigError."""
    if text is None:
        return 0, 1
    node, _, nodes = text.partition("/")
    if not (node.isdecimal() and nodes.isdecimal()):
        raise ConfigError(f"--shard={text}: must be i/n, such as 0/4 for the first of four nodes")
    return int(node), int(nodes)


def mapping(text: str | None) -> dict[str, Any]:
    """What --storage-options says. Raises ConfigError, which does not repeat it: it may hold a password."""
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError("--storage-options must be a JSON object, such as '{\"anon\": true}'")
    return options


def config(
    cache_dir: Path | None,
    cache_bytes: str | None = None,
    cluster: str | None = None,
    *,
    allow_network_filesystem: bool = False,
) -> CacheConfig:
    from dataload.cache.config import CacheConfig

    return CacheConfig(
        cache_dir=str(cache_dir) if cache_dir else None,
        cache_bytes=cache_bytes,
        cluster=cluster,
        allow_network_filesystem=allow_network_filesystem,
    )


def existing(cache_dir: Path | None, *, allow_network_filesystem: bool) -> CacheFolder:
    """The cache there. Raises ConfigError when there is none."""
    from dataload.cache.local.fsck import open_existing

    return open_existing(config(cache_dir).folder, allow_network_filesystem=allow_network_filesystem)


def listed(url: str, storage_options: str | None, config: CacheConfig) -> tuple[Blocks, dict[Object, Keys]]:
    """The cache in front of `url`, and the objects there with their partition keys."""
    from dataload.cache.filesystem import open_source
    from dataload.catalog.manifest import list_objects

    blocks = open_source(url, mapping(storage_options), config)
    return blocks, list_objects(url, blocks)

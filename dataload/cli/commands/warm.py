"""`dataload warm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from dataload.cache.config import CacheConfig
from dataload.cli.commands.options import (
    Json,
    NumStreams,
    Reads,
    Seed,
    StorageOptions,
    Url,
    Window,
    node_of,
    open_row_groups,
    with_shared_options,
)
from dataload.cli.console import progress, show
from dataload.errors import ConfigError, DataError, DataloadError
from dataload.runtime.text import counted

if TYPE_CHECKING:
    from dataload.rows.row_group_cache import RowGroupCache


@with_shared_options()
def warm(
    url: Url,
    shard: Annotated[str | None, typer.Option(help="Fetch the part of node i of n, as i/n, from 0.")] = None,
    num_streams: NumStreams = None,
    epoch: Annotated[int, typer.Option(min=0, help="Fetch row groups in the order of this epoch.")] = 0,
    first: Annotated[int | None, typer.Option(min=1, help="Fetch only the first row groups of that order.")] = None,
    seed: Seed = 0,
    window: Window = None,
    *,
    reads: Reads,
    cache: CacheConfig,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset, or a node's part, into the cache.

    The cache holds the decoded rows. After an interrupt, the same command continues.
    """
    from dataload.cache.local.read_only import is_read_only
    from dataload.planning.orders import part_of
    from dataload.rows.known_nulls import ON_THE_COMMAND_LINE

    node, nodes = node_of(shard)
    if is_read_only(cache.folder):
        raise ConfigError(f"cache_dir {cache.folder} is read-only: warm it where it can be written")
    _must_answer(cache)
    blobs = open_row_groups(url, storage_options, cache, reads, quiet=as_json)
    if nulls := blobs.maker.known_nulls:
        raise DataError(f"{nulls}: {ON_THE_COMMAND_LINE}")
    manifest, blocks = blobs.manifest, blobs.blocks
    groups = part_of(manifest, node, nodes, num_streams, epoch=epoch, seed=seed, window=window)[:first]
    kept = _fetch(blobs, groups, quiet=as_json)
    stats, part = blocks.stats(), [manifest.row_groups[group] for group in groups]
    files = {group.file for group in part}
    rows = int(manifest.block_lengths[groups].sum())
    figures = {
        "objects": len(files),
        "bytes": sum(group.bytes for group in part),
        "rows": rows,
        "row_groups": len(part),
        "row_groups_kept": kept,
        "cache_bytes": blocks.tier.limit if blocks.tier.shared else None,
    }
    show(
        {**figures, **stats},
        f"{counted(len(files), 'object')}, {counted(rows, 'row')}; "
        f"{decimal(int(stats['bytes_origin']))} fetched in {counted(int(stats['requests_origin']), 'request')}"
        f"{'; the cache has all of it' if kept == len(groups) else ''}",
        as_json=as_json,
    )
    if kept < len(groups):
        raise DataloadError(f"{kept:,} of {len(groups):,} row groups are cached: {_reason(stats)}")
    if cache.cluster is not None:
        _check_cluster(stats["cluster"]["unkept"])


def _fetch(blobs: RowGroupCache, groups: list[int], *, quiet: bool) -> int:
    """Fetch row groups into the cache. Return how many of them are cached."""
    from dataload.planning.warm import warm
    from dataload.rows.row_groups import RowGroups

    blobs.measure()
    sizes = blobs.sizes[groups].tolist()
    with progress("warming", sum(sizes), quiet=quiet) as advance:
        remaining = iter(sizes)
        try:
            return warm(RowGroups([blobs]), groups, lambda _: advance(next(remaining)))
        except KeyboardInterrupt:
            raise typer.Abort(
                "interrupted: the cache keeps the fetched row groups; run the same command to continue"
            ) from None


def _reason(stats: dict[str, Any]) -> str:
    if stats["refused"]:
        return "the cache is full: raise --cache-bytes, or free space with dataload cache evict"
    if stats["health"]["state"] != "normal":
        return "the cache cannot be written (see the log above): fix that, or choose another --cache-dir"
    return "waiting for another process timed out: run the same command again"


def _check_cluster(unkept: int) -> None:
    if unkept:
        raise DataloadError(f"{unkept} blobs did not reach the cluster: check that it runs and has free memory")


def _must_answer(cache: CacheConfig) -> None:
    """Raise DataloadError before the fetch if the cluster does not answer. Training would continue without it."""
    from dataload.doctor.cluster import cluster
    from dataload.doctor.finding import OK, Case

    finding = cluster(Case(cache))
    if finding.status != OK:
        raise DataloadError(f"nothing was fetched: {finding.what}: {finding.advice}")

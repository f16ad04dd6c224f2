"""`dataload warm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from dataload.cli.commands.options import (
    AllowNetworkFilesystem,
    CacheBytes,
    CacheDir,
    Cluster,
    Columns,
    Json,
    NumStreams,
    Seed,
    StorageOptions,
    Window,
    config,
    listed,
    names,
    node_of,
)
from dataload.cli.console import progress, show
from dataload.errors import DataloadError

if TYPE_CHECKING:
    from dataload.rows.row_group_cache import RowGroupCache


def warm(
    url: str,
    shard: Annotated[str | None, typer.Option(help="Node i of n, i/n, counted from 0; default: everything.")] = None,
    num_streams: NumStreams = None,
    epoch: Annotated[int, typer.Option(min=0, help="In the order in which this epoch will need it.")] = 0,
    first: Annotated[int | None, typer.Option(min=1, help="Only so many row groups of that order.")] = None,
    seed: Seed = 0,
    window: Window = None,
    columns: Columns = None,
    cache_dir: CacheDir = None,
    cache_bytes: CacheBytes = None,
    allow_network_filesystem: AllowNetworkFilesystem = False,
    cluster: Cluster = None,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset, or a node's part, and keep its rows decoded.

    Stopped half-way, the same command goes on where it ended.
    """
    from dataload.catalog.manifest import pin
    from dataload.planning.warm import part_of
    from dataload.rows.row_group_cache import RowGroupCache

    node, nodes = node_of(shard)
    told = config(cache_dir, cache_bytes, cluster, allow_network_filesystem=allow_network_filesystem)
    blocks, objects = listed(url, storage_options, told)
    if cluster is not None:
        _must_answer(cluster)
    with progress("reading footers", len(objects), quiet=as_json, counted="files") as advance:
        manifest = pin(objects, blocks, lambda _: advance(1))
    blobs = RowGroupCache(manifest, manifest.select(names(columns)), blocks)
    groups = part_of(manifest, node, nodes, num_streams, epoch=epoch, seed=seed, window=window)[:first]
    kept = _fetch(blobs, groups, quiet=as_json)
    blocks.settle()
    stats, part = blocks.stats(), [manifest.row_groups[group] for group in groups]
    files = {group.file for group in part}
    figures = {
        "objects": len(files),
        "bytes": sum(file.size for file in files),
        "rows": sum(group.rows for group in part),
        "row_groups": len(part),
        "row_groups_kept": kept,
        "cache_bytes": blocks.tier.limit if blocks.tier.shared else None,
    }
    show(
        {**figures, **stats},
        f"{figures['objects']:,} objects, {figures['rows']:,} rows; {decimal(int(stats['bytes_origin']))} fetched in "
        f"{int(stats['requests_origin']):,} requests{', the rest was there' if kept == len(groups) else ''}",
        as_json=as_json,
    )
    if kept < len(groups):
        raise DataloadError(f"{kept:,} of {len(groups):,} row groups are there: {_why(stats)}")
    if cluster is not None and stats["cluster"]["unkept"]:
        raise DataloadError(f"{stats['cluster']['unkept']} blobs did not reach the cluster: is it full, or gone?")


def _fetch(blobs: RowGroupCache, groups: list[int], *, quiet: bool) -> int:
    """How many of these row groups are in the cache then."""
    from dataload.planning.warm import warm

    blobs.measure()
    sizes = [blobs.bytes_of(group) for group in groups]
    with progress("warming", sum(sizes), quiet=quiet) as advance:
        left = iter(sizes)
        try:
            return warm(blobs, groups, lambda _: advance(next(left)))
        except KeyboardInterrupt:
            raise typer.Abort("interrupted: what is there stays; the same command goes on from there") from None


def _why(stats: dict[str, Any]) -> str:
    if stats["refused"]:
        return "the cache is full: raise --cache-bytes, or free some with dataload cache evict"
    if stats["health"]["state"] != "normal":
        return "the cache cannot be written to, as was said above: mend that, or choose another --cache-dir"
    return "others were at the rest for too long: do it again"


def _must_answer(cluster: str) -> None:
    """Asked for by name, it is not done without, as a training would; and that is said before, not hours later."""
    from dataload.cache.cluster.client import connect
    from dataload.cache.cluster.url import ClusterUrl
    from dataload.runtime.redact import redacted

    address = ClusterUrl.parse(cluster)
    try:
        connect(address).close()
    except Exception as error:
        raise DataloadError(f"nothing was fetched: cluster {address} does not answer: {redacted(error)}") from error

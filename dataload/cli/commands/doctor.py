"""`dataload doctor`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataload.cache.config import CacheConfig
from dataload.cli.commands.options import (
    NODES,
    BatchSize,
    Json,
    Reads,
    ShuffleName,
    StorageOptions,
    Window,
    mapping,
    partitioning_of,
    row_groups_of,
    shuffle_of,
    with_shared_options,
)
from dataload.cli.console import FOUND_A_PROBLEM, progress, show, table

if TYPE_CHECKING:
    from dataload.doctor.finding import Finding
    from dataload.doctor.object_store import Store
    from dataload.planning.forecast import Host
    from dataload.rows.read_options import ReadOptions
    from dataload.rows.row_group_cache import RowGroupCache
    from dataload.samplers.order import Order


@with_shared_options()
def doctor(
    url: Annotated[str | None, typer.Argument(help="The dataset; default: check this machine only.")] = None,
    batch_size: BatchSize = 256,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; default: as the launcher says, or 1.")
    ] = None,
    num_streams: Annotated[
        int | None,
        typer.Option(min=1, help=f"{NODES} Default: as the launcher says."),
    ] = None,
    num_workers: Annotated[int, typer.Option(min=0, help="Worker processes of each rank's loader.")] = 0,
    prefetch: Annotated[int, typer.Option(min=1, help="Batches that each worker prefetches.")] = 2,
    pin_memory: Annotated[bool, typer.Option("--pin-memory", help="Check for pinned batches, as for a GPU.")] = False,
    *,
    reads: Reads,
    shuffle: ShuffleName = "block",
    window: Window = None,
    measure: Annotated[
        Path | None,
        typer.Option(help="Read 0.5 GB to measure this node's speed. Write it to this file, for `plan --measured`."),
    ] = None,
    cache: CacheConfig,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Check this machine and bucket for common problems."""
    from dataload.doctor.finding import PROBLEM, Case
    from dataload.doctor.registry import examine
    from dataload.errors import ConfigError

    if measure is not None and url is None:
        raise ConfigError(f"--measure={measure} is for a dataset: name its URL")
    options = reads.options
    store = None if url is None else _store(url, storage_options, cache, reads.partitioning)
    chosen = reads.chosen
    nodes = num_streams or _num_streams()
    order = {"shuffle": shuffle_of(shuffle), "window": window, "num_streams": nodes}
    found, unreadable = _reads(store, chosen, options, order, quiet=as_json) if store else (None, "")
    case = Case(
        cache,
        batch_size=batch_size,
        local_world_size=None if world_size is None else math.ceil(world_size / nodes),
        num_workers=num_workers,
        prefetch=prefetch,
        pin_memory=pin_memory,
        row_bytes=found[1].row_bytes if found else None,
        reads=found,
        unreadable=unreadable,
    )
    findings = {}
    for check, finding in examine(case, store):
        findings[check] = asdict(finding)
        if not as_json:
            typer.echo(_text(check, finding))  # at once: the next check may wait for the store
    problems = sum(finding["status"] == PROBLEM for finding in findings.values())
    measured = None
    if measure is not None and found:
        from dataload.planning.measure import measure as measured_speed

        arguments = {"columns": chosen[0], "filters": chosen[1], **asdict(options), "partitioning": reads.partitioning}
        arguments |= {"source": url, "storage_options": mapping(storage_options)}
        measured = measured_speed(case.existing, cache, batch_size, arguments)
        measure.write_text(json.dumps(asdict(measured), indent=1) + "\n")
        if not as_json:
            typer.echo(table([(f"{'speed':7}", _speed(measured))]))
    if as_json:
        figures = {"problems": problems, "checks": findings}
        show(figures if measured is None else {**figures, "measured": asdict(measured)}, "", as_json=True)
    if problems:
        raise typer.Exit(FOUND_A_PROBLEM)


def _speed(host: Host) -> str:
    origin = f"{host.gbps:.2g} Gbit/s and {host.latency_ms:.0f} ms a request from the origin"
    costs = f"a start takes {host.start_seconds:.1f} s, and 1 GB {host.cpu_seconds_per_gb:.1f} s of a core"
    return f"{origin}; {costs} of {host.cores}; {host.rows_per_second:,.0f} rows/s from the cache"


def _text(check: str, finding: Finding) -> str:
    lines = [(f"{finding.status:7}", f"{check}: {finding.what}")]
    if finding.advice:
        lines.append(("", f"-> {finding.advice}"))
    return table(lines)


def _store(url: str, storage_options: str | None, cache: CacheConfig, partitioning: str) -> Store:
    from dataload.cache.blocks.reader import Blocks
    from dataload.cache.origin.limiter import limiter_of
    from dataload.cache.origin.origin import Origin
    from dataload.cache.origin.source import open_source
    from dataload.catalog.tables import is_table
    from dataload.doctor.object_store import Store
    from dataload.errors import ConfigError

    if is_table(url):
        raise ConfigError("doctor checks no tables: name a file of the table, and look at the rows by `dataload head`")
    source = open_source(url, mapping(storage_options))
    if isinstance(own := getattr(source, "blocks", None), Blocks):  # It is tiercache, whose cache is bypassed.
        origin = own.origin
    else:
        origin = Origin(source, cache.origin_id, cache.engine, limiter_of(url, cache.in_flight))
    return Store(url, Blocks.uncached(origin), partitioning_of(partitioning))


def _reads(
    store: Store, chosen: tuple[list[str] | None, Any], options: ReadOptions, order: dict[str, Any], *, quiet: bool
) -> tuple[tuple[Order, RowGroupCache] | None, str]:
    """Return the order of a loader of this host and the row groups that it reads, or else why they cannot be read.

    Args:
        store: Where the dataset is.
        chosen: The loader's columns and filters.
        options: How it reads values.
        order: The loader's shuffle, window and num_streams.
        quiet: Whether to show no progress.

    Raises:
        ConfigError: An argument does not fit the dataset.
    """
    from dataload.catalog.resolve import manifest_of
    from dataload.doctor.finding import OK, reason
    from dataload.doctor.object_store import endpoint
    from dataload.errors import ConfigError
    from dataload.planning.orders import order_of

    if (found := endpoint(store)).status != OK:
        return None, found.what
    manifest = None
    try:
        with progress("reading footers", len(store.objects), quiet=quiet, unit="files") as advance:
            manifest = manifest_of(store.objects, store.blocks, lambda _: advance(1), options.errors)
        blobs = row_groups_of(manifest, store.blocks, *chosen, options)
        blobs.measure()
    except Exception as error:
        if manifest is not None and isinstance(error, ConfigError):  # of an argument, and not of the files
            raise
        return None, reason(error)
    return (order_of(blobs.manifest, **order), blobs), ""


def _num_streams() -> int:
    """Return the streams of the ranks' order; 1 if the ranks contradict each other, which a check reports."""
    from dataload.errors import ConfigError
    from dataload.world import World

    try:
        return World.detect().num_streams
    except ConfigError:
        return 1

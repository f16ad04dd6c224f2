"""`dataload doctor`."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from dataload.commands.options import CacheBytes, CacheDir, Cluster, Json, StorageOptions, config, mapping
from dataload.commands.terminal import FOUND_A_PROBLEM, show, table

if TYPE_CHECKING:
    from dataload.doctor.store import Store


def doctor(
    url: Annotated[str | None, typer.Argument(help="What is to be read; left out: this machine alone.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch, of one rank.")] = 256,
    num_workers: Annotated[int, typer.Option(min=0, help="Processes of each rank's loader.")] = 0,
    prefetch: Annotated[int, typer.Option(min=1, help="Batches that each of them makes ahead.")] = 2,
    cache_dir: CacheDir = None,
    cache_bytes: CacheBytes = None,
    cluster: Cluster = None,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Look for what bites people: limits, locks, ranks, the origin."""
    from dataload.doctor.checks import examine
    from dataload.doctor.finding import PROBLEM, Case

    told = config(cache_dir, cache_bytes)
    store = _store(url, storage_options) if url else None
    case = Case(
        told.folder,
        told.limit,
        batch_size=batch_size,
        num_workers=num_workers,
        prefetch=prefetch,
        row_bytes=_row_bytes(store) if store else None,
        cluster=cluster,
    )
    findings = dict(examine(case, store))
    lines = []
    for check, found in findings.items():
        lines.append((found.status, f"{check}: {found.what}"))
        if found.advice:
            lines.append(("", f"-> {found.advice}"))
    problems = sum(found.status == PROBLEM for found in findings.values())
    figures = {"problems": problems, "checks": {check: asdict(found) for check, found in findings.items()}}
    show(figures, table(lines), as_json=as_json)
    if problems:
        raise typer.Exit(FOUND_A_PROBLEM)


def _store(url: str, storage_options: str | None) -> Store:
    from dataload.cache.filesystem import open_source
    from dataload.doctor.store import Store

    return Store(url, open_source(url, mapping(storage_options), None))


def _row_bytes(store: Store) -> int | None:
    """Bytes of a decoded row of the first file; None when it cannot be read, which the checks will tell of."""
    from dataload.doctor.finding import OK
    from dataload.doctor.store import endpoint
    from dataload.errors import DataloadError
    from dataload.manifest import pin
    from dataload.rowblobs import RowBlobs

    if endpoint(store).status != OK:
        return None
    try:
        manifest = pin(dict(islice(store.objects.items(), 1)), store.blocks)
        return RowBlobs(manifest, manifest.schema.names, store.blocks).num_bytes // max(1, manifest.num_rows)
    except DataloadError:
        return None

"""`dataload plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from dataload.commands.options import (
    BatchSize,
    CacheBytes,
    CacheDir,
    Columns,
    Json,
    NumStreams,
    Seed,
    StorageOptions,
    Window,
    config,
    listed,
    names,
)
from dataload.commands.terminal import FOUND_A_PROBLEM, duration, progress, show, table

if TYPE_CHECKING:
    from dataload.forecast import Fetched
    from dataload.plan import Plan


def plan(
    url: str,
    window: Window = None,
    batch_size: BatchSize = 256,
    seed: Seed = 0,
    num_streams: NumStreams = None,
    columns: Columns = None,
    bandwidth: Annotated[str, typer.Option(help="Bytes a second from the origin.")] = "1GB",
    price: Annotated[float | None, typer.Option(min=0, help="Of 1 GB from the origin, such as 0.09.")] = None,
    cache_dir: CacheDir = None,
    cache_bytes: CacheBytes = None,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """What reading a dataset will take, from its footers alone."""
    from dataload.cache.config import parse_bytes
    from dataload.manifest import pin
    from dataload.plan import plan as foretell
    from dataload.rowblobs import RowBlobs
    from dataload.warm import order_of

    rate = parse_bytes("bandwidth", bandwidth)
    blocks, objects = listed(url, storage_options, config(cache_dir, cache_bytes))
    with progress("reading footers", len(objects), quiet=as_json, counted="files") as advance:
        manifest = pin(objects, blocks, lambda _: advance(1))
    blobs = RowBlobs(manifest, manifest.select(names(columns)), blocks)
    order = order_of(manifest, seed=seed, window=window, num_streams=num_streams or 1)
    found = foretell(manifest, blobs, blocks, order, batch_size, bandwidth=rate, price=price)
    show(found.to_json(), table(_lines(found)), as_json=as_json)
    if found.first_epoch is None:
        raise typer.Exit(FOUND_A_PROBLEM)


def _lines(plan: Plan) -> list[tuple[str, str]]:
    trade, rate = plan.trade, f"{decimal(plan.bandwidth)}/s"
    first, later = (
        _fetched(fetched, cost)
        for fetched, cost in (
            (plan.first_epoch, plan.first_epoch_cost),
            (plan.later_epoch, plan.later_epoch_cost),
        )
    )
    about = "about " if plan.is_estimate else ""
    seconds = f"; {duration(plan.first_epoch_seconds)} at {rate}" if plan.first_epoch_seconds is not None else ""
    return [
        (
            "dataset",
            f"{plan.objects:,} objects, {decimal(plan.bytes)}; {plan.rows:,} rows in {plan.row_groups:,} row groups",
        ),
        ("decoded", f"{about}{decimal(plan.decoded_bytes)}, once the columns are rows"),
        ("cache", f"{about}{decimal(plan.cache_bytes_needed)} hold all of it; it may have {decimal(plan.cache_bytes)}"),
        ("first batch", f"waits for {_fetched(plan.first_batch)}, {duration(plan.first_batch_seconds)} at {rate}"),
        ("first epoch", f"{first}{seconds}"),
        ("later epochs", later),
        (
            "window",
            f"of {trade.window:,} row groups; two of them, {decimal(trade.bytes)} as stored, are there at a time",
        ),
        ("shuffle", f"variance ratio {trade.variance_ratio:.2f} if rows are sorted by label (1 is uniform)"),
        *(("advice" if not number else "", line) for number, line in enumerate(plan.advice)),
    ]


def _fetched(fetched: Fetched | None, cost: float | None = None) -> str:
    if fetched is None:
        return "none: this cache is too small"
    if not fetched.bytes:
        return "fetch nothing"
    costs = "" if cost is None else f" for {cost:,.2f}" if cost >= 1 else f" for {cost:.2g}"
    return f"{decimal(fetched.bytes)} in {fetched.requests:,} request{'s' * (fetched.requests != 1)}{costs}"

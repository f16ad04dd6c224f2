"""What reading a dataset will take, from its footers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.filesize import decimal

from dataload.cache.blocks import Blocks
from dataload.cache.local import LocalTier
from dataload.errors import ConfigError
from dataload.footer import SHARED_BYTES
from dataload.forecast import Costs, Fetched, Reader
from dataload.manifest import Manifest
from dataload.room import FITS
from dataload.rowblobs import RowBlobs
from dataload.samplers.order import Order
from dataload.samplers.trade import GOAL, WindowTrade, default_window, weigh_window

BANDWIDTH = 10**9  # bytes a second
LONG_SECONDS = 600.0  # of fetching, while GPUs wait
LARGE_BYTES = 1 << 30  # of a row group
ENDLESS = 1 << 62  # bytes of a cache
TWICE = 2.0  # what is said to be much


@dataclass(frozen=True)
class Plan:
    """bytes: of the objects; decoded_bytes: of their rows as records; cache_bytes_needed: with so many, epochs but the
    first fetch nothing; cache_bytes: those it may have. is_estimate: whether these are known of some row groups only,
    because files have codes of values.

    first_epoch, later_epoch: what they fetch through a cache of `cache_bytes`, beside the footers; None where that is
    too small for the window. first_batch: what is fetched before it is there.
    Seconds are those on the way at `bandwidth` bytes a second; costs are in the currency of the price of 10**9 bytes,
    None where there is none.
    trade: what the window of a "block" shuffle buys and costs. advice: what to do, a line each.
    """

    objects: int
    bytes: int
    rows: int
    row_groups: int
    decoded_bytes: int
    is_estimate: bool
    cache_bytes_needed: int
    cache_bytes: int
    first_epoch: Fetched | None
    later_epoch: Fetched | None
    first_batch: Fetched
    bandwidth: int
    first_batch_seconds: float
    first_epoch_seconds: float | None
    first_epoch_cost: float | None
    later_epoch_cost: float | None
    trade: WindowTrade
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    manifest: Manifest,
    blobs: RowBlobs,
    blocks: Blocks,
    order: Order,
    batch_size: int,
    *,
    bandwidth: int = BANDWIDTH,
    price: float | None = None,
) -> Plan:
    """The plan for epochs of this order in batches of `batch_size` rows, of all ranks together.

    bandwidth: bytes a second from the origin; price: of 10**9 bytes.
    """
    lengths = [group.rows for group in manifest.row_groups]
    sizes = [group.bytes for group in manifest.row_groups]
    files = {group.file for group in manifest.row_groups}
    limit = blocks.tier.limit if isinstance(blocks.tier, LocalTier) else 0
    blobs.measure()
    costs = Costs(manifest, blobs, blocks)
    whole = Reader(costs, order, ENDLESS)
    all_of_it = whole.all_rows()
    needed = max(whole.kept_bytes, math.ceil(blobs.num_bytes / FITS))
    first: Fetched | None = None
    later: Fetched | None = None
    refusal = ""
    try:
        if limit >= needed:
            first, later = all_of_it, Fetched()
        else:
            first, later = Reader(costs, order, limit).first_and_later(batch_size)
    except ConfigError as error:
        refusal = str(error)
    first_batch = Reader(costs, order, ENDLESS).first_rows(batch_size)
    found = Plan(
        objects=len(files),
        bytes=sum(file.size for file in files),
        rows=manifest.num_rows,
        row_groups=len(lengths),
        decoded_bytes=blobs.num_bytes,
        is_estimate=bool(blobs.samples.coded),
        cache_bytes_needed=needed,
        cache_bytes=limit,
        first_epoch=first,
        later_epoch=later,
        first_batch=first_batch,
        bandwidth=bandwidth,
        first_batch_seconds=first_batch.bytes / bandwidth,
        first_epoch_seconds=None if first is None else first.bytes / bandwidth,
        first_epoch_cost=_cost(first, price),
        later_epoch_cost=_cost(later, price),
        trade=weigh_window(order.window, lengths, sizes, batch_size),
    )
    advice = [refusal] if refusal else []
    return replace(found, advice=(*advice, *_advice(found, sizes, default_window(lengths, sizes))))


def _advice(plan: Plan, sizes: list[int], default: int) -> Iterator[str]:
    if plan.later_epoch and plan.later_epoch.bytes:
        yield f"with cache_bytes={decimal(plan.cache_bytes_needed)} or more, later epochs fetch nothing"
    if len(sizes) > 1 and (typical := sorted(sizes)[len(sizes) // 2]) < SHARED_BYTES:
        yield f"row groups of {decimal(typical)} are small: write them of 1 MB or more, so that each is a request"
    if max(sizes, default=0) > LARGE_BYTES:
        yield f"a row group of {decimal(max(sizes))} makes what needs it wait: write them of about 128 MB"
    if plan.trade.window != default:
        yield f"window={default} is the default, and costs least for what it buys"
    elif plan.trade.variance_ratio > TWICE * GOAL:
        yield "are the rows sorted by label? Then shuffle them once when they are written: no window mixes these well"
    if plan.first_epoch_seconds and plan.first_epoch_seconds > LONG_SECONDS:
        yield "fetch it before the GPUs are there: dataload warm"


def _cost(fetched: Fetched | None, price: float | None) -> float | None:
    return None if fetched is None or price is None else fetched.bytes / 10**9 * price

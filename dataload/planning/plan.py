"""What reading a dataset will take, from its footers, and a look at text that files have codes of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from rich.filesize import decimal

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks
from dataload.cache.config import CacheConfig
from dataload.catalog.footer_cache import FOOTERS_IN_FLIGHT
from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.formats.base import SHARED_BYTES
from dataload.loader.capacity import FITS, needed
from dataload.planning.simulate import Costs, Fetched, Reader, footers
from dataload.rows.row_group_cache import RowGroupCache
from dataload.samplers.order import Order
from dataload.samplers.window_size import GOAL, WindowTrade, default_window, weigh_window

BANDWIDTH = 10**9  # bytes a second
# Seconds to the first byte. "Roughly 100-200 milliseconds" for small objects, says Amazon:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
LATENCY = 0.1
FOOTERS_AT_ONCE = min(FOOTERS_IN_FLIGHT, CacheConfig().in_flight)
EPOCHS = 3  # after the first, of which the mean is what a later one takes
LONG_SECONDS = 600.0  # of fetching, while GPUs wait
LARGE_BYTES = 1 << 30  # of a row group
ENDLESS = 1 << 62  # bytes of a cache
TWICE = 2.0  # what is said to be much


@dataclass(frozen=True)
class Plan:
    """bytes: of the objects; decoded_bytes: of their rows as records; cache_bytes_needed: with so many, epochs but the
    first fetch nothing; cache_bytes: those it may have. is_estimate: whether these are known of some row groups only,
    because files have codes of values.

    footers: what is fetched to know all this, and once a host; first_batch: beside that, before it is there.
    first_epoch, later_epoch: what they fetch through a cache of `cache_bytes`, beside the footers, the later ones on
    average; later_epochs: some of those, one by one. None where the cache is too small for the window.
    Seconds are those on the way, footers included: as many requests wait `latency` seconds at a time as are under way,
    and all bytes share `bandwidth`, in bytes a second. Costs, of the first epoch with the footers, are in the currency
    of the price of 10**9 bytes; None where there is none.
    trade: what the window of a "block" shuffle buys and costs, in bytes as they are stored; held_bytes: decoded, of the
    two windows that are held at a time. advice: what to do, a line each.
    """

    objects: int
    bytes: int
    rows: int
    row_groups: int
    decoded_bytes: int
    is_estimate: bool
    cache_bytes_needed: int
    cache_bytes: int
    footers: Fetched
    first_epoch: Fetched | None
    later_epoch: Fetched | None
    later_epochs: tuple[Fetched, ...]
    first_batch: Fetched
    bandwidth: int
    latency: float
    first_batch_seconds: float
    first_epoch_seconds: float | None
    first_epoch_cost: float | None
    later_epoch_cost: float | None
    trade: WindowTrade
    held_bytes: int
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    manifest: Manifest,
    blobs: RowGroupCache,
    blocks: Blocks,
    order: Order,
    batch_size: int,
    *,
    bandwidth: int = BANDWIDTH,
    latency: float = LATENCY,
    price: float | None = None,
) -> Plan:
    """The plan for epochs of this order in batches of `batch_size` rows, of all ranks together.

    bandwidth: bytes a second from the origin; latency: seconds that a request waits; price: of 10**9 bytes.
    """
    lengths = [group.rows for group in manifest.row_groups]
    sizes = [group.bytes for group in manifest.row_groups]
    files = {group.file for group in manifest.row_groups}
    limit = blocks.tier.limit if blocks.tier.shared else 0
    blobs.measure()
    costs = Costs(manifest, blobs, blocks)
    whole = Reader(costs, order, ENDLESS)
    all_of_it = whole.all_rows()
    needed_bytes = max(whole.kept_bytes, math.ceil(blobs.num_bytes / FITS))
    first, later, refusal = all_of_it, [Fetched()], ""
    if limit < needed_bytes:
        try:
            first, *later = islice(Reader(costs, order, limit).epochs(batch_size), 1 + EPOCHS)
        except ConfigError as error:
            refusal = str(error)
    before, first_batch = footers(manifest, blobs, blocks), Reader(costs, order, ENDLESS).first_rows(batch_size)

    def seconds(fetched: Fetched) -> float:
        waits = math.ceil(before.requests / FOOTERS_AT_ONCE) + math.ceil(fetched.requests / IN_FLIGHT)
        return (before + fetched).bytes / bandwidth + waits * latency

    fits = not refusal
    found = Plan(
        objects=len(files),
        bytes=sum(file.size for file in files),
        rows=manifest.num_rows,
        row_groups=len(lengths),
        decoded_bytes=blobs.num_bytes,
        is_estimate=bool(blobs.value_sizes.coded),
        cache_bytes_needed=needed_bytes,
        cache_bytes=limit,
        footers=before,
        first_epoch=first if fits else None,
        later_epoch=_mean(later) if fits else None,
        later_epochs=tuple(later) if fits else (),
        first_batch=first_batch,
        bandwidth=bandwidth,
        latency=latency,
        first_batch_seconds=seconds(first_batch),
        first_epoch_seconds=seconds(first) if fits else None,
        first_epoch_cost=_cost(before + first, price) if fits else None,
        later_epoch_cost=_cost(_mean(later), price) if fits else None,
        trade=weigh_window(order.window, lengths, sizes, batch_size),
        held_bytes=needed(order, blobs)[1],
    )
    usual = weigh_window(default_window(lengths, sizes), lengths, sizes, batch_size)
    return replace(found, advice=(*([refusal] if refusal else []), *advice(found, sizes, usual)))


def advice(plan: Plan, sizes: list[int], usual: WindowTrade) -> Iterator[str]:
    """What to do, a line each. sizes: bytes of the row groups; usual: what the default window buys and costs."""
    if plan.later_epoch and plan.later_epoch.bytes:
        yield f"with cache_bytes={decimal(plan.cache_bytes_needed)} or more, later epochs fetch nothing"
    if len(sizes) > 1 and (typical := sorted(sizes)[len(sizes) // 2]) < SHARED_BYTES:
        yield f"row groups of {decimal(typical)} are small: write them of 1 MB or more, so that each is a request"
    if max(sizes, default=0) > LARGE_BYTES:
        yield f"a row group of {decimal(max(sizes))} makes what needs it wait: write them of about 128 MB"
    if plan.trade != replace(usual, window=plan.trade.window):
        yield f"window={usual.window} is the default, and costs least for what it buys"
    elif plan.trade.variance_ratio > TWICE * GOAL:
        yield "are the rows sorted by label? Then shuffle them once when they are written: no window mixes these well"
    if plan.first_epoch_seconds and plan.first_epoch_seconds > LONG_SECONDS:
        yield "fetch it before the GPUs are there: dataload warm"


def _mean(epochs: Sequence[Fetched]) -> Fetched:
    total = sum(epochs, Fetched())
    return Fetched(round(total.bytes / len(epochs)), round(total.requests / len(epochs)))


def _cost(fetched: Fetched, price: float | None) -> float | None:
    return None if price is None else fetched.bytes / 10**9 * price

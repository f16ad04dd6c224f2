"""A plan of what reading a dataset costs, from its footers and from samples of dictionary-encoded text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from itertools import islice
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.cache.config import CacheConfig
from dataload.cache.division import FITS
from dataload.catalog.footer_cache import FOOTERS_IN_FLIGHT
from dataload.errors import ConfigError
from dataload.formats.base import SHARED_BYTES
from dataload.loader.capacity import needed
from dataload.planning.forecast import TYPICAL, Forecast, Host, Job, forecast, with_change
from dataload.planning.orders import usual_window
from dataload.planning.simulate import Costs, Epoch, Fetched, Reader, footers
from dataload.rows.making.row_group_memory import RankShare
from dataload.rows.row_group_cache import RowGroupCache
from dataload.runtime.text import at_least
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.weights import changes_of
from dataload.samplers.order import Order, Shuffle
from dataload.samplers.window_size import GOAL, WindowTrade, weigh_window

FOOTERS_AT_ONCE = min(FOOTERS_IN_FLIGHT, CacheConfig().in_flight)
EPOCHS = 3  # simulated after the first one; their mean is reported
LONG_SECONDS = 600.0  # a first epoch that fetches for longer should be warmed
LARGE_BYTES = 1 << 30  # a row group with more bytes is too large
UNLIMITED = 1 << 62  # bytes of a cache that holds everything
TWICE = 2.0  # a variance ratio this many times the goal is bad


@dataclass(frozen=True)
class Plan:
    """The predicted cost of reading a dataset, or a mixture of several.

    Epochs are None if the cache is too small for the window. Bytes, requests, cache and memory are those of one node,
    costs those of all. Seconds include the footers: concurrent requests wait `latency_ms` together, and all bytes
    share `gbps`. Costs are in the currency of the prices, or None without any.

    Args:
        nodes: Nodes that share the dataset; in file order, each reads all of it.
        objects: Number of objects.
        bytes: Bytes of the objects.
        rows: Number of rows, without those that filters leave out.
        epoch_rows: Rows of an epoch. In a mixture, the weights determine it.
        row_groups: Number of row groups.
        decoded_bytes: Bytes of the rows as records.
        is_estimate: Whether decoded_bytes and cache_bytes_needed come from sampled row groups, because values are
            dictionary-encoded.
        cache_bytes_needed: With a cache of this size, only the first epoch fetches. It counts the blocks of small row
            groups, which are discarded after their rows are cached.
        cache_bytes: Size limit of the cache.
        footers: Fetched once per host to read the footers.
        first_epoch: Fetched in the first epoch, without the footers.
        later_epoch: Fetched in a later epoch, on average.
        later_epochs: Fetched in each simulated later epoch.
        first_batch: Fetched before the first batch, without the footers.
        gbps: Gigabits a second from the origin.
        latency_ms: Milliseconds that a request waits.
        first_batch_seconds: Seconds until the first batch has arrived.
        first_epoch_seconds: Seconds that the first epoch fetches.
        first_epoch_cost: Cost of the first epoch, footers included.
        later_epoch_cost: Cost of a later epoch, on average.
        shuffle: "block", "full", or False for file order. In file order, each node reads the whole dataset.
        trade: Quality of the window of a "block" shuffle; None with another order.
        held_bytes: Decoded bytes of the row groups that are in use at a time: of two windows, or all of them.
        stored_bytes: Stored bytes of these row groups.
        memory_bytes: Most bytes of row groups that are in flight, held or being decoded, of all ranks of a host.
        tokens: Values of an epoch's packed documents, about if filters leave some out, or tokens of the rows of a token
            budget; None: there are neither.
        padding_share: Fraction of padding beside them, in [0, 1].
        reads_lengths: Whether the lengths of all documents, or rows, are read once before the first batch.
        batches: Batches of a token budget on each rank, in epoch 0; None: there is none.
        weights: Where the weights of a mixture change within an epoch, as text; None: nowhere.
        forecast: How busy a job would keep its accelerators; None: no job is given.
        advice: Recommendations, a line each.
    """

    nodes: int
    objects: int
    bytes: int
    rows: int
    epoch_rows: int
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
    gbps: float
    latency_ms: float
    first_batch_seconds: float
    first_epoch_seconds: float | None
    first_epoch_cost: float | None
    later_epoch_cost: float | None
    shuffle: Shuffle
    trade: WindowTrade | None
    held_bytes: int
    stored_bytes: int
    memory_bytes: int
    weights: str | None = None
    tokens: int | None = None
    padding_share: float = 0.0
    reads_lengths: bool = False
    batches: int | None = None
    forecast: Forecast | None = None
    advice: tuple[str, ...] = ()


def plan(
    sources: Sequence[RowGroupCache],
    order: Order | MixtureOrder,
    batch_size: int,
    *,
    host: Host = TYPICAL,
    price_gb: float | None = None,
    price_get: float | None = None,
    local_world_size: int = 1,
    nodes: int | None = None,
    cache_bytes: int | None = None,
    job: Job | None = None,
) -> Plan:
    """Return the plan for epochs of this order.

    Args:
        sources: The row groups of the dataset, or of each dataset of a mixture.
        order: The order of the epochs.
        batch_size: Rows of one batch of all ranks together.
        host: Each node, of which the link to the origin counts.
        price_gb: Price of 10**9 bytes.
        price_get: Price of 1,000 requests.
        local_world_size: Ranks of a host, which share its memory.
        nodes: Nodes, each of which fetches; None: one for each stream of the order.
        cache_bytes: Size limit of the cache of each node; None: that of the cache of the sources.
        job: The job to forecast.
    """
    nodes = nodes or order.num_streams
    for blobs in sources:
        blobs.memory.use(RankShare.of(local_world_size, 1))
    row_groups = [group for blobs in sources for group in blobs.manifest.row_groups]
    lengths = [rows for each in order.orders for rows in each.block_lengths.tolist()]
    objects = {group.file for group in row_groups}
    limit = cache_bytes or (sources[0].tier.limit if sources[0].shared else 0)
    disk = None if cache_bytes else sources[0].tier.limiting_disk
    costs = Costs(sources)
    unlimited = Reader(costs, order, UNLIMITED)
    everything = unlimited.all_rows()
    decoded = sum(blobs.num_bytes for blobs in sources)
    needed_bytes = max(unlimited.kept_bytes, math.ceil(decoded / FITS / order.num_streams))
    fits = limit >= needed_bytes and _reads_everything(order)
    first, later, too_small = (everything, [Fetched()], []) if fits else _epochs(costs, order, limit, disk, batch_size)
    first_batch, all_footers = Reader(costs, order, UNLIMITED).first_rows(batch_size), footers(sources)
    weigh = partial(_weighed, order.num_streams, lengths, batch_size)
    cost = partial(cost_of, nodes=nodes, price_gb=price_gb, price_get=price_get)
    held, stored = map(sum, zip(*map(_in_use, order.orders, sources), strict=True))
    result = Plan(
        nodes=nodes,
        objects=len(objects),
        bytes=sum(file.size for file in objects),
        rows=sum(lengths),
        epoch_rows=order.n,
        row_groups=len(lengths),
        decoded_bytes=decoded,
        is_estimate=any(blobs.is_estimate for blobs in sources),
        cache_bytes_needed=needed_bytes,
        cache_bytes=limit,
        footers=all_footers,
        first_epoch=first,
        later_epoch=_mean(later),
        later_epochs=tuple(later),
        first_batch=first_batch,
        gbps=host.gbps,
        latency_ms=host.latency_ms,
        first_batch_seconds=_seconds(all_footers, first_batch, host),
        first_epoch_seconds=None if first is None else _seconds(all_footers, first, host),
        first_epoch_cost=None if first is None else cost(all_footers + first),
        later_epoch_cost=cost(_mean(later)),
        shuffle=order.shuffle,
        trade=weigh(each.window for each in order.orders) if order.shuffle == "block" else None,
        held_bytes=held,
        stored_bytes=stored,
        memory_bytes=local_world_size * max(blobs.memory.limit for blobs in sources),
        weights=changes_of(order.weights) if isinstance(order, MixtureOrder) else None,
    )
    usual = weigh(
        usual_window(blobs.manifest, each.block_lengths) for each, blobs in zip(order.orders, sources, strict=True)
    )
    read = [group.bytes for group in row_groups if group.rows]
    if job is not None and not too_small:
        reader = Reader(costs, order, UNLIMITED) if fits else Reader(costs, order, limit, disk)
        result = replace(result, forecast=_forecast(reader, batch_size, job, result, cost))
    return replace(result, advice=(*too_small, *advice(result, read, usual, is_mixture=len(sources) > 1)))


def _forecast(
    reader: Reader, batch_size: int, job: Job, plan: Plan, cost: Callable[[Fetched | None], float | None]
) -> Forecast:
    """Return the forecast of a job. After some simulated epochs, the others are taken to be like the last one."""
    fits = plan.later_epoch == Fetched()
    epochs = list(islice(reader.epochs(batch_size), min(job.epochs, 1 if fits else 1 + EPOCHS)))
    epochs += [Epoch() if fits else epochs[-1]] * (job.epochs - len(epochs))
    found = with_change(forecast(epochs, job), epochs, job, at_least(plan.cache_bytes_needed))
    return replace(found, cost=cost(sum(found.epochs, plan.footers)))


def _in_use(order: Order, blobs: RowGroupCache) -> tuple[int, int]:
    """Return the decoded and the stored bytes of the row groups that a node needs at a time, the largest ones."""
    groups, decoded = needed(order, blobs, 1 / order.num_streams)
    return decoded, sum(nlargest(groups, (group.bytes for group in blobs.manifest.row_groups)))


def _weighed(num_streams: int, lengths: Sequence[int], batch_size: int, windows: Iterable[int]) -> WindowTrade:
    """Return what `weigh_window` does for the windows of all sources, of which each stream shuffles its part."""
    window = sum(num_streams * max(1, window // num_streams) for window in windows)
    return weigh_window(window, lengths, batch_size)


def _reads_everything(order: Order | MixtureOrder) -> bool:
    """Return whether an epoch needs all row groups. An epoch of a mixture may leave some out."""
    if isinstance(order, Order):
        return True
    return len({group for _, group in order.needs_from(0)}) == np.count_nonzero(order.block_lengths)


def _epochs(
    costs: Costs, order: Order | MixtureOrder, limit: int, disk: Path | None, batch_size: int
) -> tuple[Fetched | None, list[Fetched], list[str]]:
    """Return what the first epoch and later ones fetch; or None, no later ones, and why the cache is too small."""
    try:
        epochs = islice(Reader(costs, order, limit, disk).epochs(batch_size), 1 + EPOCHS)
        first, *later = (epoch.fetched for epoch in epochs)
    except ConfigError as error:
        return None, [], [str(error)]
    return first, later, []


def advice(plan: Plan, sizes: list[int], usual: WindowTrade, *, is_mixture: bool = False) -> Iterator[str]:
    """Yield recommendations, a line each.

    Args:
        plan: The plan without advice.
        sizes: Stored bytes of the row groups that have rows.
        usual: Quality of the default window.
        is_mixture: Whether each of several sources has a window of its own.
    """
    if plan.later_epoch and plan.later_epoch.bytes:
        yield f"with cache_bytes='{at_least(plan.cache_bytes_needed)}' or more, epochs fetch no row group twice"
    if len(sizes) > 1 and (typical := sorted(sizes)[len(sizes) // 2]) < SHARED_BYTES:
        yield f"row groups of {decimal(typical)} are small: write them of 1 MB or more, so that each is a request"
    if max(sizes, default=0) > LARGE_BYTES:
        yield f"a row group of {decimal(max(sizes))} delays every batch that needs it: write row groups of 10 to 100 MB"
    if plan.trade and plan.trade.variance_ratio != usual.variance_ratio:
        default = "no --window, so that each source has its own," if is_mixture else f"window={usual.window}"
        yield f"{default} is the default, and the cheapest window with good shuffle quality"
    elif plan.trade and plan.trade.variance_ratio > TWICE * GOAL:
        yield 'if the rows are sorted by label, no window mixes them well: use shuffle="full", or shuffle while writing'
    if plan.first_epoch_seconds and plan.first_epoch_seconds > LONG_SECONDS:
        yield "fetch the dataset before the GPUs start: dataload warm"


def _seconds(footers: Fetched, fetched: Fetched, host: Host) -> float:
    waits = math.ceil(footers.requests / FOOTERS_AT_ONCE) + math.ceil(fetched.requests / IN_FLIGHT)
    return (footers + fetched).bytes * 8 / host.gbps / 1e9 + waits * host.latency_ms / 1e3


def _mean(epochs: Sequence[Fetched]) -> Fetched | None:
    if not epochs:
        return None
    total = sum(epochs, Fetched())
    return Fetched(round(total.bytes / len(epochs)), round(total.requests / len(epochs)))


def cost_of(fetched: Fetched | None, nodes: int, price_gb: float | None, price_get: float | None) -> float | None:
    """Return what it costs if each node fetches this; None if unknown, or without prices."""
    if fetched is None or (price_gb is None and price_get is None):
        return None
    return nodes * (fetched.bytes / 1e9 * (price_gb or 0) + fetched.requests / 1e3 * (price_get or 0))

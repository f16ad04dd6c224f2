"""Capacity for the row groups that are needed at a time: open row groups, the cache, shared memory of workers."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataload.errors import ConfigError, DataError, OriginError
from dataload.rows.row_group_cache import RowGroupCache
from dataload.samplers.order import Order

if TYPE_CHECKING:
    from dataload.map_style import MapStyle
    from dataload.samplers.rank_sampler import RankSampler

FITS = 0.95  # usable part of a cache; the rest is footers and the padding of files to whole pages
AHEAD_BYTES = 512 << 20  # objects to prefetch: more than the bytes that are in flight at a time
MAX_TRANSIENT = 16  # row groups: longer runs of missing ones are rare, and few threads load them
NEGLIGIBLE = 0.01  # of the bytes that are fetched in each epoch
DICTIONARY_RATIO = 64  # values may be this much larger than their dictionary codes; measured where it matters

MAX_BATCHES_PER_GATHER = 64
RUN_BYTES = 2 << 20  # per gather; more would not stay in the processor's cache

log = logging.getLogger(__name__)


def reserve_capacity(dataset: MapStyle, sampler: RankSampler) -> None:
    """Set how many row groups the dataset keeps open and prefetches, and the transient region of its cache.

    If the dataset exceeds the cache, the part that fits stays, and the rest passes through the region. The sources of a
    mixture share one cache. If they have several, the smallest counts for all.

    Raises:
        ConfigError: The cache is smaller than the row groups that the order needs at a time.
    """
    order, caches, groups = sampler.order, dataset.rowstore.blobs.caches, dataset.row_groups
    shared = [(each, blobs) for each, blobs in zip(order.orders, caches, strict=True) if blobs.shared]
    limit = min((blobs.tier.limit for _, blobs in shared), default=0)
    if _num_bytes(shared) * sampler.node_share * DICTIONARY_RATIO > limit * FITS:
        for _, blobs in shared:
            _measure(blobs)
    at_once = gathered_at_once(dataset.rowstore.row_bytes * sampler.batch_size)
    most = order.most_rows(sampler.global_batch_size * at_once)
    drawn_on = ahead = sum(map(drawn_on_at_a_time, order.orders, most))
    further = 0
    if shared:
        region, further = region_of(shared, limit, sampler.node_share)
        if region:
            for _, blobs in shared:
                blobs.tier.region = max(blobs.tier.region, region)
        elif groups:
            mean = sum(group.bytes for group in groups) // len(groups)
            ahead = min(len(groups), max(drawn_on, AHEAD_BYTES // max(1, mean)))
    dataset.rowstore.serve(drawn_on, ahead, further)


def _num_bytes(sources: Sequence[tuple[Order, RowGroupCache]]) -> int:
    return sum(blobs.num_bytes for _, blobs in sources)


def _measure(blobs: RowGroupCache) -> None:
    try:
        blobs.measure()
    except (OriginError, DataError) as error:  # The rows may all be cached, and the footers have an estimate.
        log.warning("cannot measure the size of decoded rows, going by the footers: %s", error)


def region_of(sources: Sequence[tuple[Order, RowGroupCache]], limit: int, node_share: float = 1.0) -> tuple[int, int]:
    """Return the size of the cache's transient region: its bytes, and the row groups to prefetch into it.

    The region has space for two windows. It grows to at most `MAX_TRANSIENT` row groups if that is negligible beside
    the bytes that are fetched in each epoch.

    Args:
        sources: The order and the row groups of each dataset that is read at the same time.
        limit: Size of the cache in bytes.
        node_share: Part of the datasets that this node reads.

    Returns:
        (bytes, row groups); (0, 0) if all datasets fit into the cache together.

    Raises:
        ConfigError: The cache is smaller than the row groups that the order needs at a time.
    """
    needs = [needed(order, blobs, node_share) for order, blobs in sources]
    groups, need = map(sum, zip(*needs, strict=True))
    _check_fits(sources[0][0], limit, groups, need)
    total = _num_bytes(sources) * node_share
    if total <= limit * FITS:
        return 0, 0
    mean = _num_bytes(sources) / sum(len(order.block_lengths) for order, _ in sources)
    spare = min((total - limit) * NEGLIGIBLE, limit - need)
    more = max(0, min(MAX_TRANSIENT - groups, int(spare / mean)))
    return need + math.ceil(more * mean), min(MAX_TRANSIENT, groups + more)


def gathered_at_once(batch_bytes: int) -> int:
    """Return how many batches of `batch_bytes` bytes to gather at once: a power of two, as the sampler's runs are."""
    return 1 << (max(1, min(MAX_BATCHES_PER_GATHER, RUN_BYTES // max(1, batch_bytes))).bit_length() - 1)


def check_shared_memory(size: int, folder: str = "/dev/shm") -> None:  # noqa: S108 (torch's)
    """Warn if `size` bytes of batches of workers do not fit into shared memory.

    A worker would die of SIGBUS then, unless the transform makes batches smaller.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if size > free:
        log.warning(
            "workers hold %d bytes of batches in %s, which has %d free: lower batch_size, num_workers or prefetch, or "
            "give it more (docker run --shm-size), unless the transform makes them smaller",
            size,
            folder,
            free,
        )


def drawn_on_at_a_time(order: Order, rows: int) -> int:
    """Return how many row groups are read at a time: a window in each stream, and the row groups that `rows` span.

    Args:
        order: The order of the rows.
        rows: Rows that all ranks together gather at once.
    """
    every = len(order.block_lengths)
    spanned = -(-rows * every // max(1, order.n))
    return every if order.shuffle == "full" else min(every, max(order.window, order.num_streams) + spanned)


def needed(order: Order, blobs: RowGroupCache, node_share: float = 1.0) -> tuple[int, int]:
    """Return (row groups, approximate bytes) that the order needs at a time: two windows, or the whole dataset."""
    every = len(order.block_lengths)
    groups = every if order.shuffle == "full" else 2 * max(order.window, order.num_streams)
    groups = math.ceil(groups * node_share)
    return groups, sum(sorted(map(blobs.bytes_of, range(every)), reverse=True)[:groups])


def _check_fits(order: Order, limit: int, groups: int, need: int) -> None:
    """Raise ConfigError if `need` bytes, of `groups` row groups, exceed a cache of `limit` bytes."""
    if limit >= need:
        return
    if order.shuffle == "full":
        raise ConfigError(
            f"cache_bytes={limit} is too small: shuffle='full' needs the whole dataset decoded, {need} bytes; "
            f"raise cache_bytes to {need} or more, choose fewer columns, or shuffle='block'"
        )
    raise ConfigError(
        f"cache_bytes={limit} is too small: two windows of {groups // 2} row groups, {need} bytes decoded, are needed; "
        f"raise cache_bytes to {need} or more, choose fewer columns, or lower window"
    )

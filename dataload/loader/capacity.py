"""Room for what is needed at a time: open row groups, the cache, the memory that workers share."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING

from dataload.errors import ConfigError, DataError, OriginError
from dataload.rows.row_group_cache import RowGroupCache
from dataload.samplers.order import Order

if TYPE_CHECKING:
    from dataload.dataset import Dataset
    from dataload.samplers.sharded import ShardedSampler

FITS = 0.95  # of a cache is rows; the rest is footers, and what fills a file's last page
AHEAD_BYTES = 256 << 20  # of objects, loaded before they are needed: more than is on its way at a time
PASSING = 16  # row groups: clumps of more that have to be fetched are seldom, and threads that load them are few
NEXT_TO_NOTHING = 0.01  # of what has to be fetched each epoch
CODES = 64  # times as large as their codes values may be, perhaps: where that matters, they are measured

GATHERED, RUN_BYTES = 64, 2 << 20  # batches at once, at most; bytes of them, that stay in a cache on their way

log = logging.getLogger(__name__)


def provide(dataset: Dataset, sampler: ShardedSampler) -> None:
    """Room for what the order needs at a time, and what is to be there before it is needed.

    Where not all fits into the cache, some of it passes through, and the rest stays there. Raises ConfigError when the
    cache is too small for what the order needs at a time.
    """
    tier, blobs, groups = dataset.blocks.tier, dataset.rowstore.blobs, dataset.row_groups
    if tier.shared and blobs.num_bytes * sampler.node_share * CODES > tier.limit * FITS:
        _measure(blobs)
    at_once = gathered_at_once(dataset.rowstore.row_bytes * sampler.batch_size)
    drawn_on = ahead = drawn_on_at_a_time(sampler.order, sampler.global_batch_size * at_once)
    further = 0
    if tier.shared:
        region, further = region_of(sampler.order, blobs, tier.limit, sampler.node_share)
        if region:
            tier.region = max(tier.region, region)
        elif groups:
            mean = sum(group.bytes for group in groups) // len(groups)
            ahead = min(len(groups), max(drawn_on, AHEAD_BYTES // max(1, mean)))
    dataset.rowstore.serve(drawn_on, ahead, further)


def _measure(blobs: RowGroupCache) -> None:
    try:
        blobs.measure()
    except (OriginError, DataError) as error:  # All rows may be there, and this only makes a guess better.
        log.warning("how large decoded rows are was not found out, going by the footers: %s", error)


def region_of(order: Order, blobs: RowGroupCache, limit: int, node_share: float = 1.0) -> tuple[int, int]:
    """Bytes of a cache of `limit` bytes that row groups pass through, and how many at a time; 0 where all of them stay.

    Room for two windows; or for `PASSING` row groups, where it makes next to no difference to what stays, and for no
    more at a time. Raises ConfigError when the cache is too small for what the order needs at a time.
    """
    groups, need = needed(order, blobs, node_share)
    _check_room(order, limit, groups, need)
    total = blobs.num_bytes * node_share
    if total <= limit * FITS:
        return 0, 0
    mean = blobs.num_bytes / len(order.block_lengths)
    spare = min((total - limit) * NEXT_TO_NOTHING, limit - need)
    more = max(0, min(PASSING - groups, int(spare / mean)))
    return need + math.ceil(more * mean), min(PASSING, groups + more)


def gathered_at_once(batch_bytes: int) -> int:
    """How many batches of so many bytes are gathered at once: a power of two, as runs are."""
    return 1 << (max(1, min(GATHERED, RUN_BYTES // max(1, batch_bytes))).bit_length() - 1)


def check_shared_memory(size: int, folder: str = "/dev/shm") -> None:  # noqa: S108 (torch's)
    """Warn when `size` bytes of batches, on their way from workers, do not fit into shared memory.

    A worker would die of SIGBUS there; a transform that makes batches smaller would save it.
    """
    try:
        status = os.statvfs(folder)
    except OSError:
        return
    free = status.f_bavail * status.f_frsize
    if size > free:
        log.warning(
            "workers hold %d bytes of batches in %s, which has %d free: lower batch_size, num_workers or prefetch, or "
            "give it more (docker run --shm-size), unless the transform makes them smaller",
            size,
            folder,
            free,
        )


def drawn_on_at_a_time(order: Order, rows: int) -> int:
    """Row groups that are drawn on at a time: a window in every stream and what so many rows span, or all of them.

    rows: gathered at once, of all ranks together.
    """
    every = len(order.block_lengths)
    spanned = -(-rows * every // max(1, order.n))
    return every if order.shuffle == "full" else min(every, max(order.window, order.num_streams) + spanned)


def needed(order: Order, blobs: RowGroupCache, node_share: float = 1.0) -> tuple[int, int]:
    """Row groups that the order needs at a time, and about how many bytes of rows they are: two windows, or all."""
    every = len(order.block_lengths)
    groups = every if order.shuffle == "full" else 2 * max(order.window, order.num_streams)
    groups = math.ceil(groups * node_share)
    return groups, sum(sorted(map(blobs.bytes_of, range(every)), reverse=True)[:groups])


def _check_room(order: Order, limit: int, groups: int, need: int) -> None:
    """Raises ConfigError when a cache of `limit` bytes has no room for `need` bytes, of so many row groups."""
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

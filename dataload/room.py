"""Room for what is needed at a time: open row groups, the cache, the memory that workers share."""

from __future__ import annotations

import logging
import math
import os

from dataload.cache.local import LocalTier
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.samplers.sharded import ShardedSampler

FITS = 0.95  # of a cache is rows; the rest is footers, and what fills a file's last page
AHEAD_BYTES = 256 << 20  # of objects, loaded before they are needed: more than is on its way at a time

log = logging.getLogger(__name__)


def provide(dataset: Dataset, sampler: ShardedSampler) -> None:
    """Room for what the order needs at a time, and what is to be there before it is needed.

    Where not all fits into the cache, two windows pass through, and the rest of it stays there. Raises ConfigError when
    the cache is too small for what the order needs at a time.
    """
    drawn_on = ahead = _drawn_on(sampler)
    tier, blobs = dataset.blocks.tier, dataset.rowstore.blobs
    if isinstance(tier, LocalTier):
        need, groups = _needed(dataset, sampler, tier.limit), dataset.row_groups
        if blobs.num_bytes * sampler.node_share > tier.limit * FITS:
            tier.region = max(tier.region, need)
        elif groups:
            mean = sum(group.bytes for group in groups) // len(groups)
            ahead = min(len(groups), max(drawn_on, AHEAD_BYTES // max(1, mean)))
    dataset.rowstore.serve(drawn_on, ahead)


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


def _drawn_on(sampler: ShardedSampler) -> int:
    """Row groups that batches draw on at a time: a window in every stream and what one batch spans, or all of them."""
    order = sampler.order
    every = len(order.block_lengths)
    spanned = -(-sampler.global_batch_size * every // max(1, order.n))
    return every if order.shuffle == "full" else min(every, max(order.window, order.num_streams) + spanned)


def _needed(dataset: Dataset, sampler: ShardedSampler, limit: int) -> int:
    """Bytes of rows that the order needs at a time. Raises ConfigError when `limit` is less."""
    order = sampler.order
    groups = len(dataset.row_groups) if order.shuffle == "full" else 2 * max(order.window, order.num_streams)
    groups = math.ceil(groups * sampler.node_share)
    need = sum(sorted(map(dataset.rowstore.blobs.bytes_of, range(len(dataset.row_groups))), reverse=True)[:groups])
    if limit >= need:
        return need
    if order.shuffle == "full":
        raise ConfigError(
            f"cache_bytes={limit} is too small: shuffle='full' needs the whole dataset decoded, {need} bytes; "
            f"raise cache_bytes to {need} or more, choose fewer columns, or shuffle='block'"
        )
    raise ConfigError(
        f"cache_bytes={limit} is too small: two windows of {groups // 2} row groups, {need} bytes decoded, are needed; "
        f"raise cache_bytes to {need} or more, choose fewer columns, or lower window"
    )

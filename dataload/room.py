"""Room for the row groups that an order needs at a time: in memory, and in the cache."""

from __future__ import annotations

from dataload.cache.local import LocalTier
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.samplers.sharded import ShardedSampler


def provide(dataset: Dataset, sampler: ShardedSampler) -> None:
    """Room in memory for what the order needs at a time. Raises ConfigError when the cache has less."""
    _check_cache(dataset, sampler)
    dataset.rowstore.capacity = max(dataset.rowstore.capacity, 2 * _drawn_on(sampler))


def _drawn_on(sampler: ShardedSampler) -> int:
    """Row groups that batches draw on at a time: a window in every stream and what one batch spans, or all of them."""
    order = sampler.order
    every = len(order.block_lengths)
    spanned = -(-sampler.global_batch_size * every // max(1, order.n))
    return every if order.shuffle == "full" else min(every, max(order.window, order.num_streams) + spanned)


def _check_cache(dataset: Dataset, sampler: ShardedSampler) -> None:
    """Raises ConfigError when the cache is too small for what the order needs at a time."""
    tier = dataset.blocks.tier
    if not isinstance(tier, LocalTier):
        return
    order, limit = sampler.order, tier.limit
    groups = len(dataset.row_groups) if order.shuffle == "full" else 2 * max(order.window, order.num_streams)
    need = sum(sorted(map(dataset.rowstore.blobs.bytes_of, range(len(dataset.row_groups))), reverse=True)[:groups])
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

"""Capacity for the row groups that are needed at a time: open row groups, the cache, shared memory of workers."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.filesize import decimal

from dataload.cache.division import FITS, Need
from dataload.errors import ConfigError, DataError, OriginError
from dataload.rows.row_group_cache import RowGroupCache
from dataload.runtime.text import at_least
from dataload.samplers.order import Order

if TYPE_CHECKING:
    from dataload.cache.tier import Tier
    from dataload.map_style import MapStyle
    from dataload.samplers.rank_sampler import RankSampler
    from dataload.samplers.steps import PositionOrder

AHEAD_BYTES = 512 << 20  # objects to prefetch: more than the bytes that are in flight at a time
DICTIONARY_RATIO = 64  # values may be this much larger than their dictionary codes; measured where it matters

MAX_BATCHES_PER_GATHER = 64
RUN_BYTES = 8 << 20  # per gather; more would not stay in the processor's cache, and fewer batches would share a request

log = logging.getLogger(__name__)


class Capacity:
    """The capacity that a loader reserves for row groups: open ones, those to prefetch, and its share of the cache.

    The loaders of all processes of a host share a cache (`dataload.cache.division`). The share of this one lasts as
    long as this object.

    Args:
        dataset: The dataset of the loader.
        sampler: Its order.

    Attributes:
        transient_ahead: Row groups to prefetch that do not stay in the cache; 0 if it holds all, or there is none.

    Raises:
        ConfigError: The cache is smaller than the row groups that the order needs at a time.
    """

    def __init__(self, dataset: MapStyle, sampler: RankSampler) -> None:
        self._dataset, self._sampler = dataset, sampler
        self._order: PositionOrder | None = None  # for which the capacity is reserved
        self._needs: list[tuple[Tier, Need]] = []
        self._leases: list[object] = []  # of the needs; each lasts as long as its object
        self._owner = os.getpid()  # of the leases
        self.transient_ahead = 0
        self._working_set = self._in_full = 0  # row groups: needed at a time, and to prefetch if the cache holds all
        self.ahead()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is reserved, which belongs to this process. A copy reserves its own on first use."""
        return {**vars(self), "_order": None, "_needs": [], "_leases": []}

    def _reserve(self) -> None:
        sampler, rowstore, row_groups = self._sampler, self._dataset.rowstore, self._dataset.row_groups
        order = sampler.order
        caches: dict[str, list[tuple[Order, RowGroupCache]]] = {}
        for each, blobs in zip(order.orders, rowstore.row_groups.caches, strict=True):
            if blobs.shared:
                caches.setdefault(blobs.tier.location, []).append((each, blobs))
        needs: list[tuple[Tier, Need]] = []
        for sources in caches.values():
            tier = sources[0][1].tier
            if sum(blobs.num_bytes for _, blobs in sources) * sampler.node_share * DICTIONARY_RATIO > tier.limit * FITS:
                for _, blobs in sources:
                    _measure(blobs)
            name = _name_of(order, sources)
            needs.append((tier, need_of(sources, tier.limit, name, sampler.node_share, tier.limiting_disk)))
        self._needs = needs
        self._lease()
        at_once = gathered_at_once(rowstore.row_bytes * sampler.batch_size)
        most = order.most_rows(sampler.global_batch_size * at_once)
        self._working_set = self._in_full = sum(map(working_set, order.orders, most))
        if needs and row_groups:
            mean = sum(group.bytes for group in row_groups) // len(row_groups)
            self._in_full = min(len(row_groups), max(self._working_set, AHEAD_BYTES // max(1, mean)))

    def ahead(self) -> tuple[int, int]:
        """Return how many row groups to prefetch, and how many of those that do not stay in the cache besides.

        Both depend on what the other loaders of the host need at the moment. If the sampler has another order, such as
        with other weights of a mixture, reserve the capacity for it first. Raises as the class does.
        """
        if self._sampler.order is not self._order:
            try:
                self._reserve()
            except ConfigError as error:
                if not self._sampler.cursor:
                    raise
                raise ConfigError(
                    f"{error} (a restored epoch keeps the shuffle and window of its state: set_epoch begins another)"
                ) from None
            self._order = self._sampler.order  # not after an error: the next iteration raises it again
        if self._owner != os.getpid():  # This is a forked child. The loader of its parent may end before this one.
            self._lease()
        regions = [need.transient_share(tier.limit, tier.division().total) for tier, need in self._needs]
        self.transient_ahead = sum(groups for _, groups in regions)
        ahead = self._working_set if self.transient_ahead else self._in_full
        return self._dataset.rowstore.serve(self, self._working_set, ahead, self.transient_ahead)

    def _lease(self) -> None:
        self._leases, self._owner = [tier.lease(need) for tier, need in self._needs], os.getpid()


def _name_of(order: PositionOrder, sources: Sequence[tuple[Order, RowGroupCache]]) -> bytes:
    """Return a digest of the data, their order and the groups in the cache. The groups depend on the columns."""
    content = json.dumps([order.digest, order.options], default=str, sort_keys=True)
    digest = hashlib.blake2b(content.encode(), digest_size=16)
    for _, blobs in sources:
        digest.update(blobs.group_numbers.data)
    return digest.digest()


def _measure(blobs: RowGroupCache) -> None:
    try:
        blobs.measure()
    except (OriginError, DataError) as error:  # The rows may all be cached, and the footers have an estimate.
        log.warning("cannot measure the size of decoded rows, going by the footers: %s", error)


def need_of(
    sources: Sequence[tuple[Order, RowGroupCache]],
    limit: int,
    name: bytes,
    node_share: float = 1.0,
    disk: Path | None = None,
) -> Need:
    """Return what the datasets that a loader reads need of one cache. Row groups that they share count once.

    Args:
        sources: The order and the row groups of each dataset that is read at the same time.
        limit: Size of the cache in bytes.
        name: Identifies the groups and their order, 16 bytes.
        node_share: Part of the datasets that this node reads.
        disk: A folder on the disk that the limit depends on; None: the user gave the limit.

    Raises:
        ConfigError: The cache is smaller than the row groups that the order needs at a time.
    """
    groups = np.concatenate([blobs.group_numbers for _, blobs in sources])
    sizes = np.concatenate([blobs.sizes for _, blobs in sources])
    at_once, window = map(sum, zip(*(needed(order, blobs, node_share) for order, blobs in sources), strict=True))
    need = Need.of(name, groups, sizes.astype(np.float64), window, at_once, node_share)
    if limit < need.window:
        whole = sum(blobs.whole_on_disk() for _, blobs in sources) * node_share
        sizes_in_all = need.window, math.ceil(max(whole, need.window) / FITS)
        raise _too_small(sources[0][0], limit, disk, at_once, *sizes_in_all)
    return replace(need, window=min(limit, math.ceil(need.window / FITS)))  # on disk


def gathered_at_once(batch_bytes: int) -> int:
    """Return how many batches of `batch_bytes` bytes to gather at once: a power of two, as the sampler's runs are."""
    return 1 << (max(1, min(MAX_BATCHES_PER_GATHER, RUN_BYTES // max(1, batch_bytes))).bit_length() - 1)


def check_workers(dataset: MapStyle, workers: int, rows: int) -> None:
    """Warn if batches may not fit into shared memory, or if each worker fetches what the others do.

    Args:
        dataset: The dataset.
        workers: Worker processes of a rank.
        rows: Rows of all batches that the workers of this host hold.
    """
    check_shared_memory(dataset.rowstore.row_bytes * rows)
    row_groups = dataset.rowstore.row_groups
    if workers > 1 and not row_groups.shared and not any(cache.tier.read_only for cache in row_groups.caches):
        log.warning(
            "without a cache, each of the %d workers fetches and decodes every row group: give the loader a cache, or "
            "use num_threads instead of num_workers",
            workers,
        )


def check_shared_memory(size: int, folder: str = "/dev/shm") -> None:  # noqa: S108 (torch's)
    """Warn if `size` bytes of batches of workers do not fit into shared memory.

    A worker would raise an error then, unless the transform makes batches smaller.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if size > free:
        log.warning(
            "the workers of this host hold %d bytes of batches in %s, which has %d free: lower batch_size, num_workers "
            "or prefetch, or give it more (docker run --shm-size), unless the transform makes them smaller",
            size,
            folder,
            free,
        )


def working_set(order: Order, rows: int) -> int:
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
    return groups, int(np.sort(blobs.sizes)[::-1][:groups].sum())


def _too_small(order: Order, limit: int, disk: Path | None, groups: int, need: int, whole: int) -> ConfigError:
    """Return the error for `need` bytes, of `groups` row groups, in a cache of `limit` bytes. whole: for all rows."""
    if order.shuffle == "full":
        what, least, more = "shuffle='full' needs the whole dataset", whole, ""
        other = "choose fewer columns, or shuffle='block'"
    else:
        what, least = f"two windows of {groups // 2} row groups must fit", math.ceil(need / FITS)
        more, other = f" ('{at_least(whole)}' for the whole dataset)", "choose fewer columns, or lower window"
    cause, fix = f"cache_bytes={limit} is too small", f"raise cache_bytes to '{at_least(least)}' or more{more}"
    if disk is not None:
        free = shutil.disk_usage(disk).free
        cause = (
            f"the disk of {disk} has {decimal(free)} free, and the default cache of {decimal(limit)} on it is too small"
        )
        fix = f"pass cache_bytes='{at_least(least)}' or more{more}"
        if least > free:
            fix = "name a cache_dir on a larger disk"
    return ConfigError(f"{cause}: {what}, {decimal(need)} decoded; {fix}, {other}")

"""Fetching and decoding a dataset before the training that needs it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import takewhile

import numpy as np

from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.rows.row_group_cache import RowGroupCache
from dataload.runtime.executor import DaemonExecutor
from dataload.samplers.order import Order
from dataload.samplers.partition import stream_owners
from dataload.samplers.window_size import default_window

AT_ONCE = 16  # row groups; `RowBlobs` bounds their memory
AHEAD = 64


def part_of(
    manifest: Manifest,
    node: int,
    num_nodes: int,
    num_streams: int | None = None,
    *,
    epoch: int = 0,
    seed: int = 0,
    window: int | None = None,
) -> list[int]:
    """The row groups that one node of several will read, every epoch, whatever the seed: those of its streams.

    num_streams: as the loader will have it; None: as many as there are nodes. epoch, seed, window: of the loader; they
    decide the order, which is that in which this epoch needs them.
    Raises ConfigError when there is no such node, or the streams cannot be shared out evenly.
    """
    streams = num_nodes if num_streams is None else num_streams
    if not 0 <= node < num_nodes:
        raise ConfigError(f"node {node} of {num_nodes}: nodes count from 0")
    if streams % num_nodes:
        raise ConfigError(f"num_streams={streams} is no multiple of {num_nodes} nodes")
    order = order_of(manifest, seed=seed, window=window, num_streams=streams)
    own = np.flatnonzero(stream_owners(streams, num_nodes) == node)
    return list(order.blocks_from(epoch, 0, own.tolist()))


def order_of(manifest: Manifest, *, seed: int = 0, window: int | None = None, num_streams: int = 1) -> Order:
    """The order that a loader has of a dataset. window: None: its default."""
    lengths = [group.rows for group in manifest.row_groups]
    if window is None:
        window = default_window(lengths, [group.bytes for group in manifest.row_groups])
    key = manifest.fingerprint.encode()
    return Order(lengths, seed=seed, window=window, num_streams=num_streams, dataset_key=key)


def warm(blobs: RowGroupCache, groups: Iterable[int], progress: Callable[[int], object] = lambda _: None) -> int:
    """Have these row groups kept as records, those that are not yet; how many of them are there then.

    It stops when the cache is full or failing: what comes after that would be fetched in vain.

    progress: called with each row group that is there. Stopped half-way, the next call goes on where this one ended.
    Raises OriginError, DataError.
    """
    pending: deque[tuple[int, Future[bool]]] = deque()
    stopped = threading.Event()
    kept = 0

    def make(group: int) -> bool:
        is_kept = not stopped.is_set() and blobs.make(group)
        if not is_kept and not blobs.keeps:
            stopped.set()
        return is_kept

    def settle(at_most: int) -> None:
        nonlocal kept
        while len(pending) > at_most:
            group, made = pending.popleft()
            if made.result():
                progress(group)
                kept += 1

    threads = DaemonExecutor(AT_ONCE, "dataload-warm")
    try:
        for group in takewhile(lambda _: not stopped.is_set(), groups):
            pending.append((group, threads.submit(make, group)))
            settle(AHEAD)
        settle(0)
    finally:
        stopped.set()
    return kept

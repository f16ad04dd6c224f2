"""A local tier backed by a store that all hosts share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from dataload.cache.cluster.store import Cluster
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, Fill, Span


class ClusterTier(LocalTier):
    """A local tier that fetches missing blobs from the cluster, and writes the blobs it makes to the cluster.

    Args:
        path: As for `LocalTier`.
        limit: As for `LocalTier`.
        policy: As for `LocalTier`.
        cluster: URL of the cluster; see `ClusterUrl.parse`.
        clock: Monotonic time in seconds; schedules retries.

    Raises:
        ConfigError: The URL is invalid, or the package valkey is missing.

    Notes:
        As for `LocalTier`. Errors of the cluster are never raised; `stats()["cluster"]` counts them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit: int | None,
        policy: str,
        cluster: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = Cluster(cluster, clock)
        super().__init__(path, limit, policy, clock)

    def __reduce__(self) -> tuple[Any, ...]:
        _, settings, state = super().__reduce__()
        return ClusterTier, (*settings, self.cluster.url), state

    def get_or_fill(
        self, key: BlobKey, fill: Fill, span: Span | None = None, *, to_keep: int | None = None
    ) -> memoryview:
        shared = partial(self._fill, key, fill)
        if to_keep is not None:
            shared = partial(_fill_allocated, shared, to_keep)
        return super().get_or_fill(key, shared, span, to_keep=to_keep)

    @contextmanager
    def key_lock(self, key: BlobKey, *, elect: bool = True) -> Iterator[Any]:
        """Lock the key; see `Tier.key_lock`. Call the yielded function after the block, to wait without the lock."""
        with super().key_lock(key) as wait_for_process:
            elected = nullcontext() if wait_for_process or not elect else self.cluster.key_lease(key)
            with elected as wait_for_host:
                yield wait_for_process or wait_for_host

    def fetch_from_cluster(self, keys: Iterable[BlobKey]) -> list[memoryview] | None:
        found = []
        for key in keys:
            blob = self.get(key)
            if blob is None:
                shared = self.cluster.get(key)
                if shared is None:
                    return None
                blob = super().get_or_fill(key, partial(_copy, shared))
            found.append(blob)
        return found

    def settle(self) -> None:
        self.cluster.settle()

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "cluster": self.cluster.stats()}

    def _fill(self, key: BlobKey, fill: Fill, allocate: Allocate) -> None:
        shared = self.cluster.get(key)
        if shared is None:
            with self.cluster.key_lease(key) as wait_for_other:
                if wait_for_other is not None:
                    wait_for_other()
                shared = self.cluster.get(key)  # Another host may have made the blob meanwhile.
                if shared is None:
                    self.cluster.put(key, _filled(fill, allocate))
                    return
        _copy(shared, allocate)


def _fill_allocated(fill: Fill, size: int, allocate: Allocate) -> None:
    """Allocate before `fill` runs, so that the cluster is not read for a blob that cannot be cached."""
    payload = allocate(size)
    fill(lambda _: payload)


def _filled(fill: Fill, allocate: Allocate) -> memoryview:
    """Run `fill` and return the memory that it has filled."""
    payloads = []

    def record(size: int) -> memoryview:
        payloads.append(allocate(size))
        return payloads[-1]

    fill(record)
    if not payloads:
        raise RuntimeError("the fill allocated nothing")
    return payloads[0]


def _copy(shared: memoryview, allocate: Allocate) -> None:
    allocate(len(shared))[:] = shared

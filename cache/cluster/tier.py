"""The local tier of one of many hosts, and behind it the cluster that they share."""

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
    """The local tier of one of many hosts: what it lacks is taken from the cluster, or made and given to it.

    cluster: URL, as `Address.parse` reads it; clock: seconds, monotonic; by it what fails is tried again.

    Notes: as for `LocalTier`. Nothing that the cluster does wrong is raised; `stats()["cluster"]` tells of it.
    Raises ConfigError for a URL that cannot work, and where the package valkey is missing.
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
        """Gives, where another host is at it, what to call to wait for that one, holding nothing meanwhile."""
        with super().key_lock(key), self.cluster.key_lease(key) if elect else nullcontext() as other:
            yield other

    def fetch_from_cluster(self, keys: Iterable[BlobKey]) -> list[memoryview] | None:
        found = []
        for key in keys:
            kept = self.get(key)
            if kept is None:
                shared = self.cluster.get(key)
                if shared is None:
                    return None
                kept = super().get_or_fill(key, partial(_copy, shared))
            found.append(kept)
        return found

    def settle(self) -> None:
        self.cluster.settle()

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "cluster": self.cluster.stats()}

    def _fill(self, key: BlobKey, fill: Fill, allocate: Allocate) -> None:
        shared = self.cluster.get(key)
        if shared is None:
            with self.cluster.key_lease(key) as other:
                if other is not None:
                    other()
                shared = self.cluster.get(key)  # Another host may have made it since.
                if shared is None:
                    self.cluster.put(key, _made(fill, allocate))
                    return
        _copy(shared, allocate)


def _fill_allocated(fill: Fill, size: int, allocate: Allocate) -> None:
    """Run `fill` after `size` bytes are allocated for it: the cluster is not read for a blob that has no room."""
    room = allocate(size)
    fill(lambda _: room)


def _made(fill: Fill, allocate: Allocate) -> memoryview:
    """What `fill` has written, in the memory that it asked for."""
    rooms = []

    def keep(size: int) -> memoryview:
        rooms.append(allocate(size))
        return rooms[-1]

    fill(keep)
    if not rooms:
        raise RuntimeError("the fill allocated nothing")
    return rooms[0]


def _copy(shared: memoryview, allocate: Allocate) -> None:
    allocate(len(shared))[:] = shared

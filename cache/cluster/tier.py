"""A tier backed by a store that all hosts share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from dataload.cache.cluster.store import Cluster, shared_cluster
from dataload.cache.division import Division, Need
from dataload.cache.tier import Allocate, BlobKey, Fill, Kind, Notes, Span, Tier, copy_into


class ClusterTier(Tier):
    """A tier that fetches missing blobs from the cluster, and writes the blobs it makes to the cluster.

    Args:
        local: Caches the blobs on this host.
        cluster: Shares the blobs with other hosts.

    Notes:
        Errors of the cluster are never raised; `stats()["cluster"]` counts them.
    """

    clustered = True

    def __init__(self, local: Tier, cluster: Cluster) -> None:
        self.local = local
        self.cluster = cluster

    @classmethod
    def of(cls, local: Tier, url: str, key: str | None = None) -> ClusterTier:
        """Return a tier with the shared view that this process has of the store at a URL, and with a key for values.

        Raises:
            ConfigError: As for `Cluster`.
        """
        return cls(local, shared_cluster(url, local.location, key))

    def __reduce__(self) -> tuple[Any, tuple[Tier, str, str | None]]:
        return ClusterTier.of, (self.local, self.cluster.url, self.cluster.key)

    @property
    def shared(self) -> bool:
        return self.local.shared

    @property
    def read_only(self) -> bool:
        return self.local.read_only

    @property
    def limit(self) -> int:
        return self.local.limit

    @property
    def used_bytes(self) -> int | None:
        return self.local.used_bytes

    def holder(self, key: BlobKey) -> int | None:
        return self.local.holder(key)

    @property
    def limiting_disk(self) -> Path | None:
        return self.local.limiting_disk

    @property
    def location(self) -> str:
        return self.local.location

    @property
    def retains_blobs(self) -> bool:
        return self.local.retains_blobs

    def get(self, key: BlobKey, span: Span | None = None) -> memoryview | None:
        return self.local.get(key, span)

    def get_or_fill(
        self, key: BlobKey, fill: Fill, span: Span | None = None, *, to_keep: int | None = None
    ) -> memoryview:
        kind = Kind.of(key.what)
        if kind is Kind.INFO:
            return self.local.get_or_fill(key, fill, span, to_keep=to_keep)
        # The process that makes a row group has looked for its blobs, and holds a lease for all of them.
        shared = partial(self._fill_and_share if kind is Kind.RECORDS else self._fill, key, fill)
        if to_keep is not None:
            shared = partial(_fill_allocated, shared, to_keep)
        return self.local.get_or_fill(key, shared, span, to_keep=to_keep)

    @contextmanager
    def key_lock(self, key: BlobKey, *, elect: bool = True) -> Iterator[Any]:
        """Lock the key; see `Tier.key_lock`. Call the yielded function after the block, to wait without the lock."""
        with self.local.key_lock(key) as wait_for_process:
            elected = nullcontext() if wait_for_process or not elect else self.cluster.key_lease(key)
            with elected as wait_for_host:
                yield wait_for_process or wait_for_host

    def fetch_from_cluster(self, keys: Iterable[BlobKey]) -> list[memoryview] | None:
        *first, last = keys = list(keys)
        # A host writes the last one once it has found no damage in the bytes of all. Earlier ones without it may be
        # damaged, those of this host, too.
        found = {}
        for key in (last, *first):
            shared = self.cluster.get(key)
            if shared is None:
                return None
            if key is last:
                self.local.retract(keys)
            found[key] = self.local.get_or_fill(key, partial(copy_into, shared))
        return [found[key] for key in keys]

    def touch(self, keys: Iterable[BlobKey]) -> None:
        self.local.touch(keys)

    def is_transient(self, keys: Iterable[BlobKey]) -> bool:
        return self.local.is_transient(keys)

    def discard(self, keys: Iterable[BlobKey], made: Iterable[BlobKey]) -> None:
        self.local.discard(keys, made)

    def retract(self, keys: Iterable[BlobKey]) -> None:
        keys = list(keys)
        self.local.retract(keys)
        for key in keys:
            self.cluster.remove(key)

    @property
    def notes(self) -> Notes | None:
        return self.local.notes

    def lease(self, need: Need) -> object:
        return self.local.lease(need)

    def division(self) -> Division:
        return self.local.division()

    def stored_bytes(self, key: BlobKey) -> int:
        return self.local.stored_bytes(key)

    def settle(self) -> None:
        self.cluster.settle()

    def stats(self) -> dict[str, Any]:
        return {**self.local.stats(), "cluster": self.cluster.stats()}

    def _fill(self, key: BlobKey, fill: Fill, allocate: Allocate) -> None:
        shared = self.cluster.get(key)
        if shared is None:
            with self.cluster.key_lease(key) as wait_for_other:
                if wait_for_other is not None:
                    wait_for_other()
                shared = self.cluster.get(key)  # Another host may have made the blob meanwhile.
                if shared is None:
                    self._fill_and_share(key, fill, allocate)
                    return
        copy_into(shared, allocate)

    def _fill_and_share(self, key: BlobKey, fill: Fill, allocate: Allocate) -> None:
        payloads: list[memoryview] = []

        def record(size: int) -> memoryview:
            payloads.append(allocate(size))
            return payloads[-1]

        fill(record)
        for payload in payloads:
            self.cluster.put(key, payload)


def _fill_allocated(fill: Fill, size: int, allocate: Allocate) -> None:
    """Allocate before `fill` runs, so that the cluster is not read for a blob that cannot be cached."""
    payload = allocate(size)
    fill(lambda _: payload)

"""Objects as blocks: any range of an object, from the blocks that a tier keeps, fetching those it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.config import CacheConfig
from dataload.cache.local.tier import LocalTier
from dataload.cache.memory import MemoryTier
from dataload.cache.origin.limiter import limiter_of
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import version_of
from dataload.cache.tier import Allocate, BlobKey, NoRoomError, Span, Tier
from dataload.errors import ConfigError
from dataload.runtime.executor import DaemonExecutor, awaited
from dataload.runtime.forks import ForkAware
from dataload.telemetry.wait_timeline import doing

IN_FLIGHT = 16  # requests for reads, and as many ahead of them
AHEAD_THREADS = 24  # some write to the disk while the origin sends to others
RUN_BYTES, RUN_BLOCKS = 8 << 20, 16  # at most, that are fetched ahead in one request
UNCACHED_BYTES = 256 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Object:
    """One version of one object: path at the origin, bytes, and the version as the origin names it."""

    path: str
    size: int
    version: str

    @classmethod
    def of(cls, info: dict[str, Any]) -> Object:
        """From what an fsspec filesystem says of it. Raises ConfigError when the size is not said."""
        if info.get("size") is None:
            raise ConfigError(f"{info['name']}: the origin does not tell its size, which caching needs")
        return cls(info["name"], int(info["size"]), version_of(info))


class Blocks(ForkAware):
    """Reads objects through a tier in blocks of `block_bytes`, many at a time."""

    def __init__(self, origin: Origin, tier: Tier, block_bytes: int) -> None:
        self.origin = origin
        self.tier = tier
        self.block_bytes = block_bytes
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._pools: dict[str, DaemonExecutor] = {}
        self._ahead = threading.BoundedSemaphore(IN_FLIGHT)

    @classmethod
    def open(cls, origin: Origin, config: CacheConfig | None) -> Blocks:
        """Blocks kept as `config` says; None: in this process's memory, the last `UNCACHED_BYTES` of them."""
        if config is None:
            return cls(origin, MemoryTier(UNCACHED_BYTES), CacheConfig().block)
        place = config.folder, config.limit, config.policy
        tier = LocalTier(*place) if config.cluster is None else ClusterTier(*place, config.cluster)
        tier.allow_network_filesystem = config.allow_network_filesystem
        origin.limiter = limiter_of(str(config.folder), config.in_flight)
        return cls(origin, tier, config.block)

    def __reduce__(self) -> tuple[type[Blocks], tuple[Origin, Tier, int]]:
        return Blocks, (self.origin, self.tier, self.block_bytes)

    def key(self, obj: Object, what: str) -> BlobKey:
        return BlobKey(self.origin.identity, obj.path, obj.version, what)

    @property
    def retains_blocks(self) -> bool:
        """Whether blocks are still there when their neighbours are needed: not where data passes through a cache."""
        return not self.tier.region

    def read(self, obj: Object, start: int, stop: int) -> memoryview:
        """The bytes [start, stop) of an object, cut to its size; without a copy where one block holds them."""
        start, stop = max(0, index(start)), min(index(stop), obj.size)  # of numpy, too
        if stop <= start:
            return memoryview(b"")
        numbers = self._numbers(start, stop)
        if len(numbers) == 1:
            first = numbers[0] * self.block_bytes
            return self._interruptibly(obj, numbers[0], (start - first, stop - first))
        whole = memoryview(bytearray(stop - start))

        def copy(number: int) -> None:
            # One block after the other, not all at once: each that is held takes a descriptor and a map.
            first = number * self.block_bytes
            low, high = max(start, first), min(stop, first + self.block_bytes)
            whole[low - start : high - start] = self._block(obj, number, (low - first, high - first))

        pending = [self.submit(copy, number) for number in numbers]
        with doing("origin"):
            wait(pending)
        for one in pending:
            one.result()
        return whole.toreadonly()

    def _interruptibly(self, obj: Object, number: int, span: Span) -> memoryview:
        """In the main thread a missing block is fetched by another, so that Ctrl-C is heard meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return self._block(obj, number, span)
        found = self.tier.get(self._key_of(obj, number), span)
        return awaited(self.submit(self._block, obj, number, span)) if found is None else found

    def fetch(self, obj: Object, start: int, stop: int) -> memoryview:
        """The bytes [start, stop) of an object, in one request, and kept nowhere; from blocks where these are kept."""
        kept = []
        for number in self._numbers(start, stop):
            first, last = self._bounds(obj, number)
            found = self.tier.get(self._key_of(obj, number), (max(start, first) - first, min(stop, last) - first))
            if found is None:
                return self.origin.read(obj.path, start, stop, obj.version)
            kept.append(found)
        return memoryview(b"".join(kept))

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run `call` in a thread of those that blocks are read in; it reads no more than one block at once."""
        return self._pool("read").submit(call, *args)

    def fill(self, obj: Object) -> list[Future[None]]:
        """Start fetching the blocks of an object that are not kept yet; what the tier has no room for is not fetched.

        Reads do not wait behind it, nor does the end of the program.
        """
        numbers, together = self._numbers(0, obj.size), max(1, min(RUN_BLOCKS, RUN_BYTES // self.block_bytes))
        runs = [numbers[first : first + together] for first in range(0, len(numbers), together)]
        return [self._pool("fill").submit(self._fill, obj, run) for run in runs]

    def settle(self) -> None:
        """What was to be shared with other hosts is there when this returns, or given up."""
        self.tier.settle()

    def stats(self) -> dict[str, Any]:
        """Totals of this process; see `TierCacheFileSystem.stats`."""
        engine = self.origin.engine
        return {**self.counts(), "engine": engine.name, "engine_reason": engine.reason}

    def counts(self) -> dict[str, Any]:
        """What `stats` says, but for the engine: where nothing has been fetched there need be none."""
        tier, origin = self.tier.stats(), self.origin.stats()
        cluster = tier.get("cluster", {})
        return {
            "hits": tier.get("hits", 0),
            "misses": tier.get("misses", 0),
            "waits": tier.get("waits", 0),
            "refused": tier.get("refused", 0),
            "bytes_local": tier.get("bytes", 0),
            "bytes_cluster": cluster.get("bytes", 0),
            "bytes_origin": origin.get("bytes", 0),
            "requests_origin": origin.get("requests", 0),
            "errors": {
                "local": tier.get("errors", 0) + tier.get("unkept", 0),
                "cluster": cluster.get("errors", 0),
                "origin": origin.get("errors", 0),
            },
            "health": tier.get("health"),
            "cluster": cluster or None,
        }

    def _numbers(self, start: int, stop: int) -> range:
        return range(start // self.block_bytes, -(-stop // self.block_bytes))

    def _bounds(self, obj: Object, number: int) -> tuple[int, int]:
        start = number * self.block_bytes
        return start, min(start + self.block_bytes, obj.size)

    def _key_of(self, obj: Object, number: int) -> BlobKey:
        start, stop = self._bounds(obj, number)
        return self.key(obj, f"{start}-{stop}")

    def _block(self, obj: Object, number: int, span: Span | None = None) -> memoryview:
        start, stop = self._bounds(obj, number)

        def fetch(allocate: Allocate) -> None:
            self.origin.read_into([allocate(stop - start)], obj.path, start, obj.version)

        return self.tier.get_or_fill(self._key_of(obj, number), fetch, span)

    def _fill(self, obj: Object, numbers: range) -> None:
        with suppress(NoRoomError):
            self._fill_together(obj, numbers, [])

    def _fill_together(self, obj: Object, numbers: range, rooms: list[tuple[int, memoryview]]) -> None:
        """Fetch those of these blocks that are not kept, in one request where they are neighbours.

        Each block's filling holds that of the next within it, so that all are locked until the bytes are there. The
        locks are taken in the blocks' order by everybody. rooms: first byte of, and memory for, each one so far.
        """
        if not numbers:
            self._fetch_into(obj, rooms)
            return
        start, stop = self._bounds(obj, numbers[0])
        kept = True

        def fill(allocate: Allocate) -> None:
            nonlocal kept
            kept = False
            rooms.append((start, allocate(stop - start)))
            try:
                self._fill_together(obj, numbers[1:], rooms)
            except NoRoomError:
                self._fetch_into(obj, rooms)

        self.tier.get_or_fill(self._key_of(obj, numbers[0]), fill, (0, 0), to_keep=stop - start)
        if kept:
            self._fill_together(obj, numbers[1:], rooms)

    def _fetch_into(self, obj: Object, rooms: list[tuple[int, memoryview]]) -> None:
        while rooms:
            start, stop, together = rooms[0][0], rooms[0][0], []
            while rooms and rooms[0][0] == stop:
                together.append(rooms.pop(0)[1])
                stop += len(together[-1])
            with self._ahead:
                self.origin.read_into(together, obj.path, start, obj.version)

    def _pool(self, use: str) -> DaemonExecutor:
        pool = self._pools.get(use)
        if pool is None:
            threads = IN_FLIGHT if use == "read" else AHEAD_THREADS
            made = DaemonExecutor(threads, f"dataload-blocks-{use}")
            pool = self._pools.setdefault(use, made)  # Another thread may have come first.
        return pool

"""Byte ranges of objects, from cached blocks. Missing blocks are fetched from the origin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.config import CacheConfig
from dataload.cache.local.read_only import ReadOnlyTier, is_read_only
from dataload.cache.local.tier import LocalTier
from dataload.cache.memory import MemoryTier
from dataload.cache.origin.hub import without_commit
from dataload.cache.origin.limiter import limiter_of
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import version_of
from dataload.cache.tier import Allocate, BlobKey, CacheFullError, Check, Span, Tier
from dataload.errors import ConfigError, DamagedError
from dataload.runtime.executor import LOOK_SECONDS, awaited, shared_executor
from dataload.runtime.forks import ForkAware
from dataload.runtime.redact import redacted, without_signature
from dataload.telemetry.wait_timeline import doing

IN_FLIGHT = 32  # concurrent requests of a process for reads, and as many for prefetching
UNCACHED_BYTES = 256 << 20

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Object:
    """One version of one object.

    Attributes:
        path: Path at the origin.
        size: Size in bytes.
        version: The origin's version, such as an ETag.
    """

    path: str
    size: int
    version: str

    def __repr__(self) -> str:
        return f"Object({self.name!r}, {self.size}, {self.version!r})"

    @property
    def name(self) -> str:
        """The path for messages: without credentials, which the path has if it is a URL."""
        return redacted(self.path)

    @property
    def stable_path(self) -> str:
        """The path that identifies the object: without signature, and without commit on the Hub."""
        return without_commit(without_signature(self.path))

    @classmethod
    def of(cls, info: dict[str, Any]) -> Object:
        """Create an object from its fsspec info.

        Raises:
            ConfigError: The info has no size.
        """
        if info.get("size") is None:
            raise ConfigError(
                f"{redacted(info['name'])}: the origin does not report its size, which caching needs: read it through "
                "a store that does"
            )
        return cls(info["name"], int(info["size"]), version_of(info))


class Blocks(ForkAware):
    """A concurrent reader of objects, in blocks of `block_bytes`, through a tier.

    Args:
        origin: The store of the objects.
        tier: Caches the blocks.
        config: The settings of the cache.
        bypasses_cache: Whether no blocks of row groups are cached, because no neighbours are needed in time.
        uses_cache: False: no bytes are read that this cache, or a caller, has kept of an object.

    Attributes:
        block_bytes: Size of a block; the last block of an object may be shorter.
    """

    def __init__(
        self,
        origin: Origin,
        tier: Tier,
        config: CacheConfig,
        bypasses_cache: bool = False,
        uses_cache: bool = True,
    ) -> None:
        self.origin = origin
        self.uses_cache = uses_cache
        self.tier = tier
        self.config = config
        self.block_bytes = config.block
        self._bypasses_cache = bypasses_cache
        if isinstance(tier, ClusterTier):
            origin.took = tier.cluster.origin_took
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._reads = shared_executor(IN_FLIGHT, "dataload-blocks-read")
        self._prefetches = shared_executor(IN_FLIGHT, "dataload-blocks-prefetch")

    @classmethod
    def open(cls, filesystem: Any, config: CacheConfig | None) -> Blocks:
        """Return a reader of an fsspec filesystem with the cache that `config` describes; None: see `uncached`.

        A `tiercache` filesystem brings its own cache.

        Raises:
            ConfigError: It does, and `config` describes another one.
        """
        if isinstance(own := getattr(filesystem, "blocks", None), Blocks):
            if config != CacheConfig():
                fix = "give its settings in storage_options={'tiercache': {...}}, or leave out tiercache::"
                raise ConfigError(f"tiercache:: has a cache of its own: {fix}")
            return own
        if config is None:
            return cls.uncached(Origin(filesystem))
        folder = config.folder
        local: Tier
        if is_read_only(folder):
            local = ReadOnlyTier(folder, UNCACHED_BYTES)
        else:
            network = config.allow_network_filesystem
            local = LocalTier(folder, config.limit, config.policy, allow_network_filesystem=network)
        tier = local if config.cluster is None else ClusterTier.of(local, config.cluster, config.cluster_key)
        limiter = limiter_of(str(folder), config.in_flight)
        return cls(Origin(filesystem, config.origin_id, config.engine, limiter), tier, config)

    @classmethod
    def uncached(cls, origin: Origin) -> Blocks:
        """Return a reader that caches `UNCACHED_BYTES` in the memory of this process, and nothing on disk."""
        return cls(origin, MemoryTier(UNCACHED_BYTES), CacheConfig())

    def __reduce__(self) -> tuple[type[Blocks], tuple[Origin, Tier, CacheConfig, bool, bool]]:
        return Blocks, (self.origin, self.tier, self.config, self._bypasses_cache, self.uses_cache)

    def key(
        self, obj: Object, what: str, group: str = "", check: Check | None = None, size: int | None = None
    ) -> BlobKey:
        """Return the cache key of a part or derivative of an object; other arguments as for `BlobKey`."""
        return BlobKey(self.origin.identity, obj.stable_path, obj.version, what, group, check, size)

    @property
    def retains_blocks(self) -> bool:
        """Whether a block stays cached until its neighbours are needed. See `Tier.retains_blobs`."""
        return not self._bypasses_cache and self.tier.retains_blobs

    def bypassing(self) -> Blocks:
        """Return a reader of the same objects whose row groups cache no blocks, such as of data not needed yet."""
        return Blocks(self.origin, self.tier, self.config, bypasses_cache=True)

    def read(self, obj: Object, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of an object, clipped to its size, without a copy if they are in one block."""
        start, stop = max(0, index(start)), min(index(stop), obj.size)  # accepts NumPy integers
        if stop <= start:
            return memoryview(b"")
        numbers = self._numbers(start, stop)
        if len(numbers) == 1:
            first = numbers[0] * self.block_bytes
            return self._interruptibly(obj, numbers[0], (start - first, stop - first))
        whole = memoryview(bytearray(stop - start))

        def copy(number: int) -> None:
            # Copy and release each block at once: a held block needs a file descriptor and a memory map.
            first = number * self.block_bytes
            low, high = max(start, first), min(stop, first + self.block_bytes)
            whole[low - start : high - start] = self._block(obj, number, (low - first, high - first))

        pending: list[Future[None]] = []
        try:
            pending.extend(self.submit(copy, number) for number in numbers)
            wait_for_origin(pending)
        finally:
            for future in pending:  # Ctrl-C also stops the fetches that have not begun.
                future.cancel()
        return whole.toreadonly()

    def _interruptibly(self, obj: Object, number: int, span: Span) -> memoryview:
        """Read one block. The main thread fetches it in another thread, so that Ctrl-C can interrupt it."""
        if threading.current_thread() is not threading.main_thread():
            return self._block(obj, number, span)
        found = self.tier.get(self._key_of(obj, number), span)
        return awaited(self.submit(self._block, obj, number, span)) if found is None else found

    def fetch(self, obj: Object, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of an object, from cached blocks or with one uncached request."""
        cached = self._cached(obj, start, stop)
        return self.origin.read(obj.path, start, stop, obj.version) if cached is None else memoryview(b"".join(cached))

    def fetch_into(self, obj: Object, start: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of an object from `start` on, as `fetch` does."""
        cached = self._cached(obj, start, start + len(memory))
        if cached is None:
            self.origin.read_into(memory, obj.path, start, obj.version)
            return
        copied = 0
        for part in cached:
            memory[copied : copied + len(part)] = part
            copied += len(part)

    def _cached(self, obj: Object, start: int, stop: int) -> list[memoryview] | None:
        """Return the bytes [start, stop) of an object as parts of cached blocks, or None if a block is missing."""
        cached = []
        for number in self._numbers(start, stop):
            first, last = self._bounds(obj, number)
            found = self.tier.get(self._key_of(obj, number), (max(start, first) - first, min(stop, last) - first))
            if found is None:
                return None
            cached.append(found)
        return cached

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run `call` in the pool for reads. It must not read more than one block at a time."""
        return self._reads.submit(call, *args)

    def map(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """Call `call(item)` for each item in the pool for reads; see `DaemonExecutor.map`."""
        return self._reads.map(call, items)

    @property
    def free_requests(self) -> int:
        """Requests that would all start at once; 0 if others are under way, or if the origin is local."""
        limiter = self.origin.limiter
        most = IN_FLIGHT if limiter is None else min(IN_FLIGHT, limiter.limit)
        return most if self._reads.idle and not self.origin.is_local else 0

    def prefetch(self, obj: Object) -> list[Future[None]]:
        """Start to fetch the uncached blocks of an object, as far as the tier has capacity.

        Reads do not queue behind prefetches, and the program's exit does not wait for them.
        """
        return [self._prefetches.submit(self._prefetch, obj, number) for number in self._numbers(0, obj.size)]

    def numbers(self, spans: Iterable[Span]) -> set[int]:
        """Return the numbers of the blocks that have bytes of these ranges [start, stop)."""
        return {number for start, stop in spans for number in self._numbers(start, stop)}

    def discard(self, obj: Object, number: int, made: Iterable[BlobKey]) -> None:
        """Remove a block of an object from the cache if the blobs that were made of it are cached. Best effort."""
        self.tier.discard([self._key_of(obj, number)], made)

    def undamaged(self, read: Callable[[Blocks], T], obj: Object, spans: Callable[[], Iterable[Span]]) -> T:
        """Return `read(self)`. If the bytes that it reads are damaged, fetch them once more, past the cache.

        A store or a proxy may have sent zeros or a page of HTML, of the right length.

        Args:
            read: Reads the object with the given reader.
            obj: The object.
            spans: Returns the byte ranges [start, stop) that `read` reads. Their blocks are removed from the cache.

        Raises:
            DamagedError: They are damaged at the store, too.
        """
        try:
            return read(self)
        except DamagedError:
            self.remove_damaged(obj, spans())
        return read(self.past_the_cache())

    def remove_damaged(self, obj: Object, spans: Iterable[Span]) -> None:
        """Remove the blocks of these byte ranges from the cache, for all hosts. Best effort."""
        keys = (self._key_of(obj, number) for number in self.numbers(spans))
        self.tier.retract([key for key in keys if self.tier.clustered or self.tier.stored_bytes(key)])

    def past_the_cache(self) -> Blocks:
        """Return a reader of the same objects that reads nothing from the cache."""
        return Blocks(self.origin, MemoryTier(UNCACHED_BYTES), self.config, uses_cache=False)

    def settle(self) -> None:
        """Wait until blobs that other hosts will read are written, or given up."""
        self.tier.settle()

    def stats(self) -> dict[str, Any]:
        """Return the totals of this process; see `TierCacheFileSystem.stats`."""
        engine = self.origin.engine
        return {**self.counts(), "engine": engine.name, "engine_reason": engine.reason}

    def counts(self) -> dict[str, Any]:
        """Return `stats` without the engine, so that no engine is created before the first request."""
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
            "retries_origin": origin.get("retries", 0),
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
        return self.key(obj, f"{start}-{stop}", size=stop - start)

    def _block(self, obj: Object, number: int, span: Span | None = None, *, keep: bool = False) -> memoryview:
        start, stop = self._bounds(obj, number)

        def fetch(allocate: Allocate) -> None:
            self.origin.read_into(allocate(stop - start), obj.path, start, obj.version)

        return self.tier.get_or_fill(self._key_of(obj, number), fetch, span, to_keep=stop - start if keep else None)

    def _prefetch(self, obj: Object, number: int) -> None:
        with suppress(CacheFullError):
            self._block(obj, number, (0, 0), keep=True)


def wait_for_origin(pending: Sequence[Future[Any]]) -> None:
    """Wait until all of these fetches are done or cancelled. Raise the exception of the first that failed.

    The wait is cut into short ones, as that of `awaited`, so that Ctrl-C interrupts it.
    """
    if not all(future.done() for future in pending):
        with doing("origin"):
            while wait(pending, LOOK_SECONDS, FIRST_EXCEPTION).not_done and not _failed(pending):
                pass
            cancel_if_failed(pending)
            while wait([future for future in pending if not future.cancelled()], LOOK_SECONDS).not_done:
                pass
    for future in _failed(pending) or pending:
        future.result()


def cancel_if_failed(pending: Sequence[Future[Any]]) -> None:
    """Cancel the fetches that have not begun, if one has failed: each might take as long to fail."""
    if _failed(pending):
        for future in pending:
            future.cancel()


def _failed(pending: Sequence[Future[Any]]) -> list[Future[Any]]:
    return [each for each in pending if each.done() and not each.cancelled() and each.exception() is not None]

"""Objects as blocks: any range of an object, from the blocks that a tier keeps, fetching those it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from dataload.cache.config import CacheConfig
from dataload.cache.forks import ForkAware
from dataload.cache.local import LocalTier
from dataload.cache.memory import MemoryTier
from dataload.cache.origin import Origin
from dataload.cache.tier import Allocate, BlobKey, Span, Tier
from dataload.cache.version import version_of
from dataload.errors import ConfigError

IN_FLIGHT = 16
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
        self._pools: dict[str, ThreadPoolExecutor] = {}

    @classmethod
    def open(cls, origin: Origin, config: CacheConfig | None) -> Blocks:
        """Blocks kept as `config` says; None: in this process's memory, the last `UNCACHED_BYTES` of them."""
        if config is None:
            return cls(origin, MemoryTier(UNCACHED_BYTES), CacheConfig().block)
        return cls(origin, LocalTier(config.folder, config.limit, config.policy), config.block)

    def __reduce__(self) -> tuple[type[Blocks], tuple[Origin, Tier, int]]:
        return Blocks, (self.origin, self.tier, self.block_bytes)

    def key(self, obj: Object, what: str) -> BlobKey:
        return BlobKey(self.origin.identity, obj.path, obj.version, what)

    def read(self, obj: Object, start: int, stop: int) -> memoryview:
        """The bytes [start, stop) of an object, cut to its size; without a copy where one block holds them."""
        start, stop = max(0, start), min(stop, obj.size)
        if stop <= start:
            return memoryview(b"")
        numbers = self._numbers(start, stop)
        if len(numbers) == 1:
            first = numbers[0] * self.block_bytes
            return self._block(obj, numbers[0], (start - first, stop - first))
        whole = memoryview(bytearray(stop - start))

        def copy(number: int) -> None:
            # One block after the other, not all at once: each that is held takes a descriptor and a map.
            first = number * self.block_bytes
            low, high = max(start, first), min(stop, first + self.block_bytes)
            whole[low - start : high - start] = self._block(obj, number, (low - first, high - first))

        pending = [self._pool("read").submit(copy, number) for number in numbers]
        wait(pending)
        for one in pending:
            one.result()
        return whole.toreadonly()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run `call` in a thread of those that blocks are read in; it reads no more than one block at once."""
        return self._pool("read").submit(call, *args)

    def fill(self, obj: Object) -> list[Future[int]]:
        """Start fetching the blocks of an object that are not kept yet; the bytes of each, when it is there.

        Reads do not wait behind it, nor does the end of the program.
        """
        return [self._pool("fill").submit(self._fill, obj, number) for number in self._numbers(0, obj.size)]

    def stats(self) -> dict[str, Any]:
        """Totals of this process; see `TierCacheFileSystem.stats`."""
        tier, origin = self.tier.stats(), self.origin.stats()
        return {
            "hits": tier.get("hits", 0),
            "misses": tier.get("misses", 0),
            "waits": tier.get("waits", 0),
            "refused": tier.get("refused", 0),
            "bytes_local": tier.get("bytes", 0),
            "bytes_cluster": 0,
            "bytes_origin": origin.get("bytes", 0),
            "requests_origin": origin.get("requests", 0),
            "errors": {"local": tier.get("errors", 0) + tier.get("unkept", 0), "origin": origin.get("errors", 0)},
            "health": tier.get("health"),
            "engine": self.origin.engine.name,
            "engine_reason": self.origin.engine.reason,
        }

    def _numbers(self, start: int, stop: int) -> range:
        return range(start // self.block_bytes, -(-stop // self.block_bytes))

    def _block(self, obj: Object, number: int, span: Span | None = None) -> memoryview:
        start = number * self.block_bytes
        stop = min(start + self.block_bytes, obj.size)

        def fetch(allocate: Allocate) -> None:
            data = self.origin.read(obj.path, start, stop, obj.version)
            allocate(len(data))[:] = data

        return self.tier.get_or_fill(self.key(obj, f"{start}-{stop}"), fetch, span)

    def _fill(self, obj: Object, number: int) -> int:
        return len(self._block(obj, number)) if threading.main_thread().is_alive() else 0

    def _pool(self, use: str) -> ThreadPoolExecutor:
        pool = self._pools.get(use)
        if pool is None:
            made = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix=f"dataload-blocks-{use}")
            pool = self._pools.setdefault(use, made)  # Another thread may have come first.
        return pool

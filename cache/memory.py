"""An LRU tier in the memory of one process, for datasets without a cache on disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dataload.cache.local.key_locks import ThreadLocks
from dataload.cache.tier import MAKE_SECONDS, BlobKey, Fill, Span, Tier, Waited, cut, fill_in_memory
from dataload.runtime.counters import Counters
from dataload.runtime.forks import ForkAware


class MemoryTier(ForkAware, Tier):
    """An LRU cache of blobs in memory. Each process has its own; a pickled copy starts empty.

    Args:
        limit: Capacity in bytes.
    """

    shared = False

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._locks = ThreadLocks()
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self._mutex = threading.Lock()
        self._blobs: OrderedDict[bytes, memoryview] = OrderedDict()
        self._used = 0

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def location(self) -> str:
        return str(id(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryTier, (self.limit,)

    def get(self, key: BlobKey, span: Span | None = None) -> memoryview | None:
        return self._in_memory(key, span)

    def get_or_fill(
        self,
        key: BlobKey,
        fill: Fill,
        span: Span | None = None,
        *,
        to_keep: int | None = None,  # noqa: ARG002 (every blob that fits is cached)
    ) -> memoryview:
        found = self.get(key, span)
        if found is not None:
            return found
        with self._locks.hold(key.digest):
            found = self._in_memory(key, span)
            if found is not None:
                self.counters.add(waits=1)
                return found
            self.counters.add(misses=1)
            blob = fill_in_memory(key, fill)
            self._keep(key, blob)
            return cut(blob, span)

    @contextmanager
    def key_lock(self, key: BlobKey, *, elect: bool = True) -> Iterator[Callable[[], Waited] | None]:  # noqa: ARG002 (no other hosts)
        with self._locks.hold(key.digest, timeout=0) as held:
            yield None if held else partial(self._wait_for, key)

    def _wait_for(self, key: BlobKey) -> Waited:
        """Wait until no other thread holds the lock of a key."""
        with self._locks.hold(key.digest, MAKE_SECONDS) as held:
            return Waited.FOR_PROCESS if held else Waited.IN_VAIN

    def discard(self, keys: Iterable[BlobKey], made: Iterable[BlobKey]) -> None:
        with self._mutex:
            if all(key.digest in self._blobs for key in made):
                for key in keys:
                    self._used -= len(self._blobs.pop(key.digest, b""))

    def stored_bytes(self, key: BlobKey) -> int:
        with self._mutex:
            return len(self._blobs.get(key.digest, b""))

    @property
    def used_bytes(self) -> int:
        return self._used

    def holder(self, key: BlobKey) -> int | None:  # noqa: ARG002 (no other process has a part in it)
        return None

    def stats(self) -> dict[str, float]:
        return self.counters.snapshot()

    def _in_memory(self, key: BlobKey, span: Span | None) -> memoryview | None:
        with self._mutex:
            whole = self._blobs.get(key.digest)
            if whole is None:
                return None
            self._blobs.move_to_end(key.digest)
            found = cut(whole, span)
            self.counters.add(hits=1, bytes=len(found))
            return found

    def _keep(self, key: BlobKey, blob: memoryview) -> None:
        with self._mutex:
            if len(blob) > self.limit:
                return
            self._blobs[key.digest] = blob
            self._used += len(blob)
            while self._used > self.limit:
                _, evicted = self._blobs.popitem(last=False)
                self._used -= len(evicted)

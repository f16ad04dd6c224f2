"""One process makes or fetches a result, and all others wait for it ("single flight")."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from dataload.cache.tier import BlobKey, Tier, Waited
from dataload.telemetry.wait_timeline import ELSEWHERE, doing

T = TypeVar("T")


def fetch_lock(lock: BlobKey) -> BlobKey:
    """Return the key to lock while a result is fetched, given the one to lock while it is made."""
    return replace(lock, what=f"fetch {lock.what}", check=None)


def make_once(
    tier: Tier,
    lock: BlobKey,
    find: Callable[[], T | None],
    make: Callable[[], T],
    reserve: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> T:
    """Make a result that is not cached, unless another process or host makes it.

    A wait for another maker holds neither the lock nor the reservation, so this process can make other results.

    Args:
        tier: The cache of the result.
        lock: The key to lock while the result is made.
        find: Returns the cached result, or None.
        make: Makes and caches the result.
        reserve: Holds resources for `make`, such as memory.
    """
    waited_for: Waited | None = None
    while True:
        if waited_for is Waited.IN_VAIN:  # The lock's holder was stopped, so this process goes on without it.
            locked: AbstractContextManager[Any] = nullcontext()
        else:
            locked = tier.key_lock(lock, elect=waited_for is not Waited.FOR_HOST)
        with reserve(), locked as wait_for_other:
            if wait_for_other is None:
                found = find()
                return make() if found is None else found
        with doing(ELSEWHERE):
            waited_for = wait_for_other()
        found = find()
        if found is not None:
            return found


def fetch_once(
    tier: Tier,
    lock: BlobKey,
    find: Callable[[], T | None],
    fetch: Callable[[], T | None],
    reserve: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    alone: bool = False,
) -> T | None:
    """Fetch a result from the cluster, unless another process of this host does. Return None if no host has made it.

    A wait for another process holds neither the lock nor the reservation, and no other host waits.

    Args:
        tier: The cache of the result.
        lock: The key that `make_once` locks. Here `fetch_lock` of it is locked.
        find: Returns the result if this host has cached it, or None.
        fetch: Fetches and caches the result, or returns None.
        reserve: Holds resources for `fetch`, such as memory.
        alone: Fetch it whatever others do, because the cache will not keep their result.
    """
    if not tier.clustered:
        return None
    locked: AbstractContextManager[Any] = nullcontext() if alone else tier.key_lock(fetch_lock(lock), elect=False)
    with reserve(), locked as wait_for_other:
        if wait_for_other is None:
            found = find()
            return fetch() if found is None else found
    with doing(ELSEWHERE):
        wait_for_other()
    return find()

"""One process of one host makes a result, and all others wait for it ("single flight")."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from dataload.cache.tier import BlobKey, Tier, Waited
from dataload.telemetry.wait_timeline import ELSEWHERE, doing

T = TypeVar("T")


def find_or_make(
    tier: Tier,
    lock: BlobKey,
    find: Callable[[], T | None],
    make: Callable[[], T],
    reserve: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    elect: bool = True,
) -> T:
    """Return what `find` finds, or make it unless another process or host does.

    A wait for another one holds neither the lock nor what `reserve` holds, so this process can make other things.

    Args:
        tier: The cache of the result.
        lock: Key to lock while it is made.
        find: Returns the cached result, or None.
        make: Makes and caches the result.
        reserve: Holds what `make` needs, such as memory.
        elect: Wait for other hosts, too.
    """
    waited_for: Waited | None = None
    found = find()  # Without the lock: a transfer from another host blocks no other.
    while found is None:
        if waited_for is Waited.IN_VAIN:  # The lock's holder was stopped, so this process goes on without it.
            locked: AbstractContextManager[Any] = nullcontext()
        else:
            locked = tier.key_lock(lock, elect=elect and waited_for is not Waited.FOR_HOST)
        with reserve(), locked as wait_for_other:
            if wait_for_other is None:
                found = find()
                return make() if found is None else found
        with doing(ELSEWHERE):
            waited_for = wait_for_other()
        found = find()
    return found

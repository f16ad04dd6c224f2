"""Fetching a dataset before the training that needs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from dataload.cache.blocks import Blocks, Object

BLOCKS_AHEAD = 64


def warm(blocks: Blocks, objects: Iterable[Object], progress: Callable[[int], object] = lambda _: None) -> int:
    """Fetch the blocks of these objects that are not kept yet; the bytes that are there now.

    progress: called with the bytes of each block. Stopped half-way, the next call goes on where this one ended.
    Raises OriginError.
    """
    pending: deque[Future[int]] = deque()

    def settle(at_most: int) -> int:
        settled = 0
        while len(pending) > at_most:
            size = pending.popleft().result()
            progress(size)
            settled += size
        return settled

    try:
        total = 0
        for obj in objects:
            pending.extend(blocks.fill(obj))
            total += settle(BLOCKS_AHEAD)
        return total + settle(0)
    finally:
        for future in pending:
            future.cancel()

"""Python's garbage collector while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 100_000  # made between two collections; Python's own number is 700


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage seldom during the block: else most of the time goes into searches of what stays, for nothing."""
    before = gc.get_threshold()
    if not 0 < before[0] < OBJECTS:  # Another thread is in such a block, or the program has its own rule.
        yield
        return
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

"""Search for an element that makes a call fail."""

from __future__ import annotations

from collections.abc import Callable


def bisected(count: int, fails: Callable[[slice], object]) -> int | None:
    """Return the position of an element with which a call fails, by bisection; None if it fails with several only.

    It takes log2(count) calls, which together have about `count` elements.

    Args:
        count: Number of elements. The call fails with all of them together.
        fails: Whether the call fails with some consecutive elements.
    """
    start, stop = 0, count
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (start, middle) if fails(slice(start, middle)) else (middle, stop)
    return start if count == 1 or fails(slice(start, stop)) else None

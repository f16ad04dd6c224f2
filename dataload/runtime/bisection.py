"""Search for an element that makes a call fail."""

from __future__ import annotations

from collections.abc import Callable


def bisected(count: int, fails: Callable[[slice], object]) -> int:
    """Return the position of an element with which a call fails, by bisection.

    Args:
        count: Number of elements. The call fails with all of them together.
        fails: Whether the call fails with some consecutive elements. If no half fails, the result may be any element.
    """
    start, stop = 0, count
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (start, middle) if fails(slice(start, middle)) else (middle, stop)
    return start

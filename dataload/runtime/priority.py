"""The priority of calls that wait for a thread of a pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_priority: ContextVar[int] = ContextVar("priority", default=0)
_priorities = itertools.count(1)


@contextmanager
def priority(value: int) -> Iterator[None]:
    """Give the calls that the block submits a priority. A pool runs the waiting call of the lowest value first."""
    token = _priority.set(value)
    try:
        yield
    finally:
        _priority.reset(token)


def next_priority() -> AbstractContextManager[None]:
    """Give the calls that the block submits the next priority of this process, after those of all earlier blocks.

    Row groups are loaded in such a block: all their byte ranges come before those of later ones, of whatever dataset.
    """
    return priority(next(_priorities))


def current_priority() -> int:
    """Return the priority of this thread's work; 0 outside of every `priority`."""
    return _priority.get()

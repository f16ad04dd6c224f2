"""Turns: which of the calls that wait for a thread of a pool runs first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_turn: ContextVar[int] = ContextVar("turn", default=0)
_turns = itertools.count(1)


@contextmanager
def in_turn(turn: int) -> Iterator[None]:
    """Give the calls that the block submits a turn. A pool runs waiting calls of a lower turn first."""
    token = _turn.set(turn)
    try:
        yield
    finally:
        _turn.reset(token)


def next_turn() -> AbstractContextManager[None]:
    """Give the calls that the block submits the next turn of this process, after those of all earlier blocks.

    A row group is loaded in such a block: all its byte ranges come before those of later ones, of whatever dataset.
    """
    return in_turn(next(_turns))


def current_turn() -> int:
    """Return the turn of this thread's work; 0 outside of every `in_turn`."""
    return _turn.get()

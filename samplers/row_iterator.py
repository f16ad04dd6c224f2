"""The rows of one iteration of a sampler, with a position that torchdata saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class RowIterator(Iterator[int]):
    """The rows of one iteration of a sampler.

    torchdata's StatefulDataLoader saves and restores the sampler and then this iterator. The cursor of the sampler does
    not count the rows of an iteration, so the iterator counts them.

    Args:
        begin: Returns the epoch and the cursor of the first row. The iterator calls it at the first `next`.
        rows_from: Yields the rows of an epoch from a cursor on, except the first ones: (epoch, cursor, rows to skip).
    """

    def __init__(
        self, begin: Callable[[], tuple[int, int]], rows_from: Callable[[int, int, int], Iterator[int]]
    ) -> None:
        self._begin, self._rows_from = begin, rows_from
        self._start: tuple[int, int] | None = None
        self._yielded = 0
        self._rows: Iterator[int] | None = None

    def __next__(self) -> int:
        if self._rows is None:
            self._start = self._start or self._begin()
            self._rows = self._rows_from(*self._start, self._yielded)
        row = next(self._rows)
        self._yielded += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a small JSON-able dict."""
        return {"start": self._start, "yielded": self._yielded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows that the iterator of `state` had yielded."""
        self._start, self._yielded, self._rows = state["start"], state["yielded"], None

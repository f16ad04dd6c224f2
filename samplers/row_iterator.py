"""The rows of one iteration of a sampler, with a position that torchdata saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dataload.errors import ConfigError


class RowIterator(Iterator[int]):
    """The rows of one iteration of a sampler.

    torchdata's StatefulDataLoader saves and restores the sampler and then this iterator. The cursor of the sampler does
    not count the rows of an iteration, so the iterator counts them.

    Args:
        begin: Returns the epoch and the cursor of the first row. The iterator calls it at the first `next`.
        rows_from: Yields the rows of an epoch from a cursor on, except the first ones: (epoch, cursor, rows to skip).
        world: [number of ranks, rows of one batch of one rank]. An iteration goes on with the same ones only.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[int, int]],
        rows_from: Callable[[int, int, int], Iterator[int]],
        world: list[int],
    ) -> None:
        self._begin, self._rows_from, self._world = begin, rows_from, world
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
        return {"start": self._start, "yielded": self._yielded, "world": self._world}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows that the iterator of `state` had yielded.

        Raises:
            ConfigError: It had yielded rows of a rank of another world.
        """
        if state["yielded"] and state.get("world") != self._world:
            raise ConfigError(
                f"the iteration of the state has num_replicas, batch_size = {state.get('world')}, this one "
                f"{self._world}: resume it with those"
            )
        self._start, self._yielded, self._rows = state["start"], state["yielded"], None

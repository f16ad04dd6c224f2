"""Requests for batches, in the order of the sampler, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dataload.rows.columns import Array
from dataload.rows.row_store import Draw
from dataload.samplers.rank_sampler import RankSampler
from dataload.telemetry.wait_timeline import Timeline


@dataclass(frozen=True)
class Request:
    """Consecutive batches of one rank that are made together.

    Attributes:
        rows: Row numbers of all batches, int64 [n].
        size: Rows per batch. The last one may be shorter.
        cursor: Rows of the epoch before the global batch of the first one.
        step: Rows per global batch.
        end: Rows of the epoch up to the end of the global batch of the last one.
        stream: (seed, epoch, rank), the key of the transforms' random numbers. Together with its cursor it determines
            the random numbers of a batch, in any process.
        draw: The order of the epoch, which decides the documents of packed sequences.
        is_even: Whether global batches have `step` rows each.
        filled: Tokens, and places of padding beside them, of a batch of a token budget; None: of another batch.
    """

    rows: Array
    size: int
    cursor: int
    step: int
    end: int
    stream: tuple[int, ...]
    draw: Draw = None
    is_even: bool = True
    filled: tuple[int, int] | None = None

    def name(self, cursor: int) -> str:
        """Return the name of a batch in messages, given its cursor."""
        return f"batch {cursor // self.step}" if self.is_even else f"the batch at row {cursor:,}"

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch."""
        whole, rest = divmod(len(self.rows), self.size)
        return [self.size] * whole + [rest] * (rest > 0)


@dataclass(slots=True)
class Answer:
    """A batch, and the cost of making it.

    Attributes:
        cursor: Rows of the epoch before its global batch.
        end: Rows of the epoch up to the end of its global batch.
        rows: Rows of the batch.
        by_source: The number of rows of each source of a mixture, by name.
        batch: The batch; packed, if a worker sends it.
        row_groups: The row groups of all rows of the request, in its first answer only. Each has an account, see
            `Accounts`, or None if it was open already. Only the accounts of a worker have entries.
        loading: Seconds that the request waited for row groups of each source of a mixture, in its first answer only.
        making: The activities of the worker, if one made the batch.
        skipped: The rows that raised and were replaced, by their positions in the batch.
        tokens: Values of packed documents in it.
        padding: Places of padding beside them.
        request: The request that it is the first answer to; None: it is a later one.
        left_out: Documents that a function of `map` failed with, and that it counts.
    """

    cursor: int
    end: int
    rows: int
    by_source: Mapping[str, int]
    batch: Any = None
    row_groups: Mapping[int, Mapping[str, float] | None] = field(default_factory=dict)
    loading: Mapping[str, float] = field(default_factory=dict)
    making: Timeline | None = None
    skipped: Mapping[int, int] = field(default_factory=dict)
    tokens: int = 0
    padding: int = 0
    request: Request | None = None
    left_out: int = 0

    def pin_memory(self) -> Answer:
        """Return a worker's answer with its batch in pinned memory. torch calls this on its pinning thread."""
        return replace(self, batch=self.batch.pin_memory())


class Requests(Iterable[Request]):
    """The requests of one rank, from a start position.

    Args:
        sampler: The order of the rows.
        batches: Row numbers of each batch of the epoch. None: the sampler's own batches, from its position on.
    """

    def __init__(self, sampler: RankSampler, batches: Iterable[Sequence[int]] | None = None) -> None:
        self._sampler = sampler
        self._batches = batches
        self.start_at(0, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return Requests, (self._sampler, self._batches)

    def start_at(
        self, epoch: int, cursor: int, at_once: int = 1, on_request: Callable[[int], object] = lambda _: None
    ) -> Requests:
        """Set the start of the next iteration. Return self.

        Args:
            epoch: The epoch.
            cursor: Rows of the epoch before the first global batch.
            at_once: Most batches per request.
            on_request: Called with the `end` of each request before it is yielded.
        """
        self._start = epoch, cursor, at_once, on_request
        return self

    def __iter__(self) -> Iterator[Request]:
        return self._from(*self._start)

    def _from(self, epoch: int, cursor: int, at_once: int, on_request: Callable[[int], object]) -> Iterator[Request]:
        sampler = self._sampler
        steps, most = sampler.steps, sampler.num_rows
        stream, draw = steps.seeds(epoch)
        for run, before, step in self._runs(epoch, cursor):
            for first in range(0, len(run), at_once):
                batches = run[first : first + at_once]
                begin = before + first * step
                end = min(begin + len(batches) * step, most)
                on_request(end)
                how = stream, draw, steps.is_even, steps.tokens_of(batches[0])
                yield Request(batches.ravel(), batches.shape[1], begin, step, end, *how)

    def _runs(self, epoch: int, cursor: int) -> Iterable[tuple[Array, int, int]]:
        sampler = self._sampler
        if self._batches is None:
            return sampler.runs(epoch, cursor)
        runs = (np.asarray(rows, np.int64)[None] for rows in self._batches)
        step = sampler.global_batch_size
        return ((run, cursor + number * step, step) for number, run in enumerate(runs))

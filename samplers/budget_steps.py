"""The steps of an epoch whose batches have as many rows as a token budget allows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dataload.samplers.steps import Steps
from dataload.samplers.token_batches import TokenOrder, halved

Int64 = npt.NDArray[np.int64]


class BudgetSteps(Steps):
    """Steps with the next batch of the epoch for each rank. Their units are batches.

    If fewer are left at the end of the epoch, the last step cuts them into one for each rank. So no row comes twice,
    unless fewer rows than ranks are left.
    """

    order: TokenOrder
    is_even: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """The size of a batch in words."""
        return f"{self.order.batch_tokens:,} tokens a batch"

    @property
    def units(self) -> int:
        """Batches of a step."""
        return self.share.num_replicas

    def runs(self, epoch: int, cursor: int) -> Iterator[tuple[Int64, int, int]]:
        """Yield the rank's batches from a cursor on, as in `Steps`, one by one."""
        ends, ranks = self.order.ends_from(epoch, cursor), self.units
        while step := list(islice(ends, ranks)):
            if len(step) < ranks and self.share.drop_last:
                return
            first, end = self._part(step, cursor)
            yield self.order.rows(epoch, np.arange(first, end))[None], cursor, step[-1] - cursor
            cursor = step[-1]

    def units_between(self, epoch: int, start: int, end: int) -> int:
        """Return the batches that end after the cursor `start` and not after `end`."""
        return sum(1 for _ in takewhile(end.__ge__, self.order.ends_from(epoch, start)))

    def after_units(self, epoch: int, cursor: int, units: int) -> int:
        """Return the cursor after so many more batches, at most the end of the epoch."""
        return max(islice(self.order.ends_from(epoch, cursor), units), default=cursor)

    def left(self, epoch: int, cursor: int) -> int:
        """Return the steps of the rest of an epoch, for which all its batches are planned."""
        whole = cursor == 0  # whose number is kept
        batches = self.order.batches(epoch) if whole else self.units_between(epoch, cursor, self.order.n)
        steps, rest = divmod(batches, self.units)
        return steps + (1 if rest and not self.share.drop_last else 0)

    def is_over(self, epoch: int, cursor: int) -> bool:
        """Return whether no step is left."""
        if not self.share.drop_last:
            return cursor >= self.order.n
        return len(list(islice(self.order.ends_from(epoch, cursor), self.units))) < self.units

    def padding(self, epoch: int, cursor: int) -> int:
        """Return the number of this rank's rows that repeat others in the rest of an epoch."""
        order, ranks, start = self.order, self.units, cursor
        if self.share.drop_last or cursor >= order.n:
            return 0
        last = order.plan(epoch, len(order.borders(epoch)) - 2).ends
        if last[-1] - (last[-2] if len(last) > 1 else 0) >= ranks:
            return 0  # The last batch is one of the last step, which needs no more rows.
        ends, step = order.ends_from(epoch, cursor), [cursor]
        while following := list(islice(ends, ranks)):
            start, step = step[-1], following
        return int(self.share.rank >= len(halved(step, ranks, start)))

    def remainder(self, cursor: int) -> int:  # noqa: ARG002
        """Return 0: the last batches of the ranks may differ in size, so that nothing can be cut off them together."""
        return 0

    def tokens_of(self, rows: Int64) -> tuple[int, int]:
        """Return the tokens, and the places of padding beside them, of a batch of these rows."""
        budget = self.order.budget
        lengths = budget.lengths(rows)
        tokens = int(lengths.sum())
        return tokens, int(budget.padded(lengths).max()) * len(rows) - tokens

    def check(self, epoch: int, cursor: int) -> None:
        """Raise ConfigError unless a step may begin here: not outside the epoch, and not inside a batch."""
        super().check(epoch, cursor)
        next(self.order.ends_from(epoch, cursor), None)

    def _part(self, step: list[int], start: int) -> tuple[int, int]:
        """Return the first position and the end of this rank's batch in a step, whose batches end there."""
        if len(step) < self.units:
            step = halved(step, self.units, start)
        number = self.share.rank % len(step)
        return step[number - 1] if number else start, step[number]

"""The share of one rank in the batches of a token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from dataload.samplers.position import Position
from dataload.samplers.rank_sampler import PositionOrder, RankSampler
from dataload.samplers.token_batches import OPTIONS, TokenBudget, TokenOrder, halved

Int64 = npt.NDArray[np.int64]


class TokenSampler(RankSampler):
    """A sampler whose batches have as many rows as a token budget allows. Classes derive from it and another sampler.

    A step has the next batch of the epoch for each rank. If fewer are left at its end, the last step cuts them into one
    for each rank. So no row comes twice, unless fewer rows than ranks are left.

    Args:
        budget: What batches are cut by.
        *args: Arguments of the other sampler.
        **options: The same. `batch_size` is the expected number of rows of a batch.

    Attributes:
        order: A `TokenOrder`.
    """

    order: Any  # a `TokenOrder`
    is_even: ClassVar[bool] = False
    _differences: ClassVar[str] = (
        "other files or filters, row groups of other sizes, another length=, or batch_size in place of batch_tokens"
    )

    def __init__(self, budget: TokenBudget, *args: Any, **options: Any) -> None:
        self._budget = budget
        super().__init__(*args, **options)

    def runs(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[Int64]:
        """Yield the rank's batches: int64 [1, rows]."""
        return (rows for rows, _, _ in self.steps(epoch, cursor))

    def steps(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[tuple[Int64, int, int]]:
        """Yield the rank's batches one by one, and where they are, as in `RankSampler`."""
        order, (epoch, cursor) = self.order, self._position(epoch, cursor)
        ends, start = order.ends_from(epoch, cursor), cursor
        while step := list(islice(ends, self.num_replicas)):
            if len(step) < self.num_replicas and self.drop_last:
                return
            first, end = self._part(step, start)
            yield order.rows(epoch, np.arange(first, end))[None], start, step[-1] - start
            start = step[-1]

    @property
    def batch_text(self) -> str:
        """The size of a batch in words."""
        return f"{self.order.batch_tokens:,} tokens a batch"

    def filled(self, rows: Int64) -> tuple[int, int]:
        """Return the tokens, and the places of padding beside them, of a batch of these rows."""
        lengths = self._budget.lengths(rows)
        tokens = int(lengths.sum())
        return tokens, int(self._budget.padded(lengths).max()) * len(rows) - tokens

    def num_batches(self, by_rows: Callable[[], int]) -> int:  # noqa: ARG002
        """Return the batches of each rank in a whole epoch, for which all of them are planned, once an epoch."""
        order: TokenOrder = self.order
        whole, rest = divmod(order.batches(self.epoch), self.num_replicas)
        return whole + (1 if rest and not self.drop_last else 0)

    def in_batches(self, by_rows: Callable[[], Iterator[list[int]]]) -> Iterator[tuple[list[int], int]]:  # noqa: ARG002
        """Yield the rows of `iter(self)`, which begins with the epoch, in batches, each with its cursor."""
        rows = iter(self)
        for batch, cursor, _ in self.steps(self.epoch, 0):
            yield list(islice(rows, batch.shape[1])), cursor
        next(rows, None)  # This ends the epoch.

    def remainder_from(self, cursor: int) -> int:  # noqa: ARG002
        """Return 0: the last batches of the ranks may differ in size, so that nothing can be cut off them together."""
        return 0

    def padding_of_loop(self, cursor: int) -> int | Callable[[], int]:
        """Return a function that finds the padding of an iteration: it may have to plan all batches."""
        return partial(self.padding_from, cursor, self.epoch)

    def padding_from(self, cursor: int, epoch: int | None = None) -> int:
        """Return the number of this rank's rows that repeat others in the rest of an epoch from `cursor` on."""
        order, start, epoch = self.order, cursor, self.epoch if epoch is None else epoch
        if self.drop_last or cursor >= order.n:
            return 0
        last = order.plan(epoch, len(order.borders(epoch)) - 2).ends
        if last[-1] - (last[-2] if len(last) > 1 else 0) >= self.num_replicas:
            return 0  # The last batch is one of the last step, which needs no more rows.
        ends, step = order.ends_from(epoch, cursor), [cursor]
        while following := list(islice(ends, self.num_replicas)):
            start, step = step[-1], following
        return int(self.rank >= len(halved(step, self.num_replicas, start)))

    def _part(self, step: list[int], start: int) -> tuple[int, int]:
        """Return the first position and the end of this rank's batch in a step, whose batches end there."""
        if len(step) < self.num_replicas:
            step = halved(step, self.num_replicas, start)
        number = self.rank % len(step)
        return step[number - 1] if number else start, step[number]

    def _cut(self, order: PositionOrder, num_replicas: int) -> PositionOrder:
        return cast("PositionOrder", TokenOrder(cast("Any", order), self._budget, num_replicas))

    def batches_left(self) -> int:
        """Return the batches of each rank in the rest of the epoch."""
        whole, rest = divmod(sum(1 for _ in self._ends()), self.num_replicas)
        return whole + (1 if rest and not self.drop_last else 0)

    def batch_with(self, position: int) -> int:
        """Return the number, counted from here, of the step that has a position of the epoch."""
        return sum(1 for _ in takewhile(position.__ge__, self._ends())) // self.num_replicas

    def step_of(self, cursor: int) -> tuple[int, int]:
        """Return the number of whole steps in `cursor` rows of the epoch, and how many batches are left over."""
        return divmod(sum(1 for _ in takewhile(cursor.__ge__, self._ends(0))), self.num_replicas)

    def _cursor_of(self, step: int) -> int | None:
        before, rest = self.step_of(self.cursor)
        self._check_known(step, before if rest else 0)
        return next(islice(chain([0], self._ends(0)), rest + step * self.num_replicas, None), None)

    def _ends(self, cursor: int | None = None) -> Iterator[int]:
        """Yield where the batches of the epoch end, from a number of rows on; None: from here."""
        ends: Iterator[int] = self.order.ends_from(self.epoch, self.cursor if cursor is None else cursor)
        return ends

    def _is_over(self, order: Any, position: Position) -> bool:
        if not self.drop_last:
            return bool(position.cursor >= order.n)
        left = islice(order.ends_from(position.epoch, position.cursor), self.num_replicas)
        return len(list(left)) < self.num_replicas

    def _advanced(self, order: Any, position: Position, batches: int) -> int:
        ends = islice(order.ends_from(position.epoch, position.cursor), batches * self.num_replicas)
        return max(ends, default=position.cursor)

    def _runs_after(self, epoch: int, cursor: int, skipped: int) -> tuple[Iterator[Int64], int]:
        return self.runs(epoch, cursor), skipped

    def _with_given(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        options = super()._with_given(options)
        own = {name: self._given[name] for name in OPTIONS}
        return options if own.items() <= options.items() else {**options, **own}

    def _begin(self, epoch: int, cursor: int, options: Mapping[str, Any], order: Any) -> None:
        next(order.ends_from(epoch, cursor), None)  # raises inside a batch
        super()._begin(epoch, cursor, options, order)

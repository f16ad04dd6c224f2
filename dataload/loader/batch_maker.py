"""The maker of batches, which answers requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch

from dataload.errors import ConfigError, DataError, RowError
from dataload.loader.background_iterator import taken
from dataload.loader.bad_rows import naming_rows, replacements
from dataload.loader.capacity import MAX_BATCHES_PER_GATHER
from dataload.loader.device_copy import HostMemory
from dataload.loader.integrations import with_pairs
from dataload.loader.requests import Answer, Request
from dataload.loader.transform import Transform
from dataload.loader.user_code import Around, Draws, InThreads, in_loop, in_worker
from dataload.loader.worker_transport import check_sendable, pack
from dataload.map_style import MapStyle
from dataload.rows.collate import Batch, Empty, with_strings
from dataload.rows.columns import Array
from dataload.rows.numbered_rows import NumberedRows
from dataload.rows.row_block import Records
from dataload.rows.row_errors import is_of_a_row
from dataload.rows.row_store import Draw, Loads
from dataload.rows.sequences import Sequences
from dataload.runtime.redact import redacted
from dataload.telemetry.loader_stats import summed
from dataload.telemetry.wait_timeline import Timeline, doing

# Tensors that are made at a time. Twice as many are alive when the next ones are made, and the garbage collector begins
# at 700 objects. Objects that outlive two collections count towards a full one, which looks through all of torch.
MOST_COLUMNS = 300

log = logging.getLogger(__name__)


class BatchMaker(torch.utils.data.Dataset[Answer]):
    """Makes the batches of requests, on a thread or in workers: gather, collate, transform.

    Args:
        dataset: The rows.
        shape: The arguments of `NumberedRows`.
        collate_fn: As in `make_loader`.
        transform: As in `make_loader`.
        on_error: As in `make_loader`.

    Attributes:
        made_together: Batches whose columns are made at a time, at most.

    Raises:
        ConfigError: `group` or a computed column does not suit the columns.
    """

    def __init__(
        self,
        dataset: MapStyle,
        shape: Mapping[str, Any],
        collate_fn: Callable[[NumberedRows], Any] | None = None,
        transform: Callable[..., Any] | None = None,
        on_error: str = "raise",
    ) -> None:
        self._dataset = dataset
        self._shape = shape
        layout = dataset.rowstore.layout
        names = {*dataset.rowstore.names, *(shape["group"] or ())}
        for name in names & shape["computed"].keys():
            argument = "row_ids=True" if name not in dataset.computed else f"name_column={name!r}"
            raise ConfigError(
                f"{argument} adds the column {name!r}, which the batches have already: leave that one out with "
                "columns=, or rename it"
            )
        columns = self._numbered(dataset.rowstore.none(), np.empty(0, np.int64)).batch()  # raises for a wrong `group`
        # Columns of ragged values are made for a whole request, because they take a search in each blob.
        self.made_together = MAX_BATCHES_PER_GATHER if layout.ragged else max(1, MOST_COLUMNS // max(1, len(columns)))
        self._collate = with_pairs(collate_fn)
        self._transform = Transform(transform)
        self._leaves_strings = self.only_gathers and any(field.kind == "string" for field in layout.fields)
        self._draws = Draws()
        self._skip = on_error == "skip"
        self._skipped = 0  # rows in this process

    def over(self, dataset: MapStyle) -> BatchMaker:
        """Return the maker of such batches of another dataset."""
        found = copy(self)
        found._dataset = dataset  # noqa: SLF001
        found._shape = {**self._shape, "computed": {**self._shape["computed"], **dataset.computed}}  # noqa: SLF001
        return found

    @property
    def makes_text(self) -> bool:
        """Whether batches have lists of text."""
        fields = self._dataset.rowstore.layout.fields
        return self._shape["ragged"] != "flat" and any(field.kind == "string" for field in fields)

    @property
    def only_gathers(self) -> bool:
        """Whether batches are made without code of the user."""
        return not self.has_collate_fn and self._transform.function is None

    @property
    def has_collate_fn(self) -> bool:
        """Whether a function of the user makes the batches."""
        return self._collate is not None

    @property
    def makes_objects(self) -> bool:
        """Whether batches hold Python objects of nested values, which are made batch by batch."""
        return any(field.kind == "nested" for field in self._dataset.rowstore.layout.fields)

    def __getitem__(self, request: Request) -> Answer:
        """Return the answer to a request of one batch, packed: torch calls this in a worker."""
        making = Timeline(usually="collate")
        try:
            with making.here():
                [answer] = (call() for call in self.calls(request, in_worker))
                packed = pack(list(answer.batch) if isinstance(answer.batch, NumberedRows) else answer.batch)
        except Exception as error:
            check_sendable(error)
            raise
        take = self._dataset.rowstore.scheduler.ledger.take
        row_groups = {
            group: None if account is None else take(group, at_rest=False) or {}
            for group, account in answer.row_groups.items()
        }
        return replace(answer, batch=packed, row_groups=row_groups, making=making.end())

    def around(self, cursor: int, *, in_threads: bool) -> Around:
        """Return the surroundings of the user's code for a loop in this thread that begins at `cursor`."""
        beside_the_loop = in_threads or threading.current_thread() is not threading.main_thread()
        return InThreads(cursor, self._draws) if beside_the_loop else in_loop

    def handed_out(self, answers: list[Answer], making: Timeline) -> Iterator[Answer]:
        """Yield answers in order, and take them out of their list. Make the strings of each as it is handed out.

        A thread ahead of the loop would hold the interpreter lock, which the loop needs, for the strings of all.
        """
        for answer in taken(answers):
            if self._leaves_strings:
                with making.doing("collate"):
                    with_strings(answer.batch)
            yield answer

    def calls(
        self,
        request: Request,
        around: Around,
        stop: Future[None] | None = None,
        empty: Empty | None = None,
    ) -> Iterator[Callable[[], Answer]]:
        """Yield a call for each batch of a request, whose rows are gathered in one call.

        The user's code runs in the calls, each of which may run in another thread.

        Args:
            request: The request.
            around: The surroundings of the user's code.
            stop: As in `RowStore.gather`.
            empty: As in `columns_of`. Not used for batches that are passed to the user's code.
        """
        loads, memory, start = Loads(), empty if self.only_gathers else None, 0
        rows = self._numbered(self._dataset.rowstore.gather(request.rows, stop, loads, request.draw), request.rows)
        answers = self._answers(request, rows, loads)
        for answer, columns in zip(answers, self._together(rows, request.sizes, memory), strict=True):
            answer.batch = columns
            if columns is not None and self.only_gathers:
                yield partial(_same, answer)
            else:
                part = rows.part(slice(start, start + answer.rows))
                yield partial(self._answered, request, answer, part, around, memory, stop)
            start += answer.rows

    def _answers(self, request: Request, rows: NumberedRows, loads: Loads) -> Iterator[Answer]:
        """Yield the answers to a request, without their batches. The first one has the cost of all of its rows."""
        sources = ((self._dataset.source_of(group), seconds) for group, seconds in loads.waits.items())
        cost: dict[str, Any] = {
            "request": request,
            "row_groups": {group: {} if new else None for group, new in loads.opened.items()},
            "loading": summed({name: seconds} for name, seconds in sources if name is not None),
        }
        cursor, by_source = request.cursor, self._dataset.rows_by_source(request.rows, request.sizes)
        for size, shares, filled in zip(request.sizes, by_source, rows.tokens(request.sizes), strict=True):
            tokens, padding, left_out = filled
            tokens, padding = request.filled or (tokens, padding)
            how = {"tokens": tokens, "padding": padding, "left_out": left_out, **cost}
            yield Answer(cursor, min(cursor + request.step, request.end), size, shares, **how)
            cursor, cost = cursor + request.step, {}

    def _answered(
        self,
        request: Request,
        answer: Answer,
        rows: NumberedRows,
        around: Around,
        empty: Empty | None,
        stop: Future[None] | None,
    ) -> Answer:
        """Return the answer with its batch made by the user's code."""
        _, epoch, rank = request.stream
        name = f"rank {rank}, epoch {epoch}, {request.name(answer.cursor)}"
        place = request.stream, answer.cursor
        make = partial(self._batch, place=place, around=partial(around, *place), empty=empty)
        batch, skipped = self._skipping_bad_rows(rows, answer.batch, make, name, stop, request.draw)
        return replace(answer, batch=batch, skipped=skipped)

    def collate(self, rows: NumberedRows) -> tuple[Any, Mapping[str, int], Mapping[int, int]]:
        """Return the batch of these rows, its rows by source, and those that were replaced, by their positions in it.

        A DataLoader that is no loader calls this, see `dataload.loader.trainer_batches`.

        Raises:
            ConfigError: The transform takes `rng`, and the batch has no place in an epoch, which that depends on.
        """
        [by_source] = self._dataset.rows_by_source(rows.numbers, [len(rows.numbers)])
        make: Callable[[NumberedRows, Batch | None], Any] = self._batch
        if rows.place is not None:
            around = in_loop if torch.utils.data.get_worker_info() is None else in_worker
            make = partial(self._batch, place=rows.place, around=partial(around, *rows.place))
        elif self._transform.wants_rng:
            raise ConfigError(
                "transform(batch, rng) needs the loader's own batches: iterate the loader, or pass its batch_sampler"
            )
        batch, skipped = self._skipping_bad_rows(rows.shaped(**self._shape), None, make, "this batch", draw=rows.draw)
        return batch, by_source, skipped

    def _numbered(self, records: Records | Sequences, numbers: Array) -> NumberedRows:
        return NumberedRows(records, numbers, self._dataset.locate, **self._shape)

    def _together(self, rows: NumberedRows, sizes: Sequence[int], empty: Empty | None) -> Iterator[Batch | None]:
        """Yield the columns of several batches, which are cut from one; None for batches that are made one by one."""
        start = 0
        for first in range(0, len(sizes), self.made_together):
            together = sizes[first : first + self.made_together]
            stop, left = start + sum(together), len(together)
            if self._collate is None:
                with suppress(Exception):  # The batch that has the wrong value raises this again.
                    for columns in rows.part(slice(start, stop)).batches(together, empty):
                        left -= 1
                        yield columns
            yield from repeat(None, left)
            start = stop

    def _skipping_bad_rows(
        self,
        rows: NumberedRows,
        columns: Batch | None,
        make: Callable[[NumberedRows, Batch | None], Any],
        name: str,
        stop: Future[None] | None = None,
        draw: Draw = None,
    ) -> tuple[Any, dict[int, int]]:
        """Return make(rows, columns), and the rows that raised and were replaced, by their positions.

        Args:
            rows: The rows.
            columns: Their columns, or None.
            make: Makes a batch.
            name: Names the batch in errors.
            stop: As in `RowStore.gather`.
            draw: As in `RowStore.gather`.

        Raises:
            Exception: `make` raised it. A note names the rows.
        """

        def gathered(numbers: Array) -> NumberedRows:
            return self._numbered(self._dataset.rowstore.gather(numbers, stop, draw=draw), numbers)

        def works(numbers: Array) -> bool:
            some = gathered(numbers)
            try:
                make(some, None)
            except Exception as error:
                if not is_of_a_row(error):
                    raise
                return False
            return True

        try:
            with naming_rows(rows.numbers, name, self._dataset.locate, None if self._skip else works):
                return make(rows, columns), {}
        except Exception as error:
            if not (self._skip and is_of_a_row(error)):
                raise
            numbers = replacements(rows.numbers, self._dataset.rows_around(int(rows.numbers.max())), works)
            if numbers is None:
                raise
            skipped = {int(place): int(rows.numbers[place]) for place in np.flatnonzero(numbers != rows.numbers)}
            self._warn([*skipped.values()], error)
        with naming_rows(numbers, name, self._dataset.locate):
            return make(gathered(numbers), None), skipped

    def _batch(
        self,
        rows: NumberedRows,
        columns: Batch | None,
        *,
        place: tuple[tuple[int, ...], int] = ((), 0),
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        empty: Empty | None = None,
    ) -> Any:
        """Return the batch of some rows, whose columns may be there already."""
        batch: Any = None
        if self._collate is None:
            batch = rows.batch(empty) if columns is None else with_strings(columns)
            if self._transform.function is None:
                return batch
        with around():
            if self._collate is not None:
                batch = _returned("collate_fn", self._collate(rows))
            return _returned("transform", self._transform(batch, *place))

    def _warn(self, skipped: Sequence[int], error: Exception) -> None:
        """Log the first row that is replaced in this process, and then at each power of ten. `stats` counts all."""
        before, self._skipped = self._skipped, self._skipped + len(skipped)
        if not skipped:
            log.warning('on_error="skip": a batch raised %s; it was made again, without an error', _shown(error))
        elif not before or len(str(before)) < len(str(self._skipped)):
            reason = f"DataError: {error.without_row}" if isinstance(error, RowError) else _shown(error)
            log.warning(
                'on_error="skip": row %d (%s) raised %s; it is replaced, and %d rows of this process so far',
                skipped[0],
                self._dataset.locate(skipped[0]).text,
                reason,
                self._skipped,
            )


def _returned(function: str, batch: Any) -> Any:
    """Return the batch that a function of the user returned. Raise DataError if it is None: its rows would be lost."""
    if batch is None:
        raise DataError(f"{function} returned None: return the batch")
    return batch


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {redacted(error)}"


def _same(answer: Answer) -> Answer:
    return answer


def answers_of(calls: list[Callable[[], Answer]], memory: HostMemory | None) -> list[Answer]:
    """Return the results of calls, with batches that the user's code has made in host memory for the device.

    The calls are taken out of their list, whose owner may keep it while the loop uses the batches.
    """
    answers = [call() for call in taken(calls)]
    if memory is None:
        return answers
    with doing("transfer"):
        return [replace(answer, batch=memory.prepare(answer.batch)) for answer in answers]

"""Which batches a rank makes, in which order, and how one is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.loader.worker_transport import pack
from dataload.rows.arrow_decode import Array
from dataload.rows.collate import Empty, Rows, cut, spans, to_batch
from dataload.rows.row_block import Records
from dataload.samplers.keys import derive_key
from dataload.samplers.sharded import ShardedSampler
from dataload.telemetry.wait_timeline import Timeline, doing


@dataclass(frozen=True)
class Request:
    """Consecutive batches of one rank, to be made together.

    rows: of all of them, int64 [n]; size: of each, though the last may be shorter. cursor: rows of the epoch before the
    global batch of the first; step: rows of a global batch. stream: names the random numbers of the epoch's transforms;
    a batch's own follow from its cursor, whoever makes it.
    """

    rows: Array
    size: int
    cursor: int
    step: int
    stream: tuple[int, ...]

    @property
    def end(self) -> int:
        """Rows of the epoch before the global batch that follows."""
        return self.cursor + self.step * len(self.sizes)

    @property
    def sizes(self) -> list[int]:
        whole, rest = divmod(len(self.rows), self.size)
        return [self.size] * whole + [rest] * (rest > 0)


@dataclass(frozen=True)
class Answer:
    """A batch that was made. cursor: as in its request; rows: how many.

    row_groups: The row groups of all rows of its request, in the first answer to it. Each has an account, see
    `Ledger`, or None if it was open already; only the accounts of a worker have entries. making: what a worker was at.
    """

    cursor: int
    rows: int
    batch: Any
    row_groups: Mapping[int, Mapping[str, float] | None] = field(default_factory=dict)
    making: Timeline = field(default_factory=Timeline)

    def pin_memory(self) -> Answer:
        """Return a worker's answer with its batch in pinned memory. torch calls this on its thread for that."""
        return replace(self, batch=self.batch.pin_memory())


class Requests(Iterable[Request]):
    """The requests of one rank, from wherever it was told to start.

    batches: row numbers of each batch, from where `sampler` stands on; None: the sampler's own.
    """

    def __init__(self, sampler: ShardedSampler, batches: Iterable[Sequence[int]] | None = None) -> None:
        self._sampler = sampler
        self._batches = batches
        self.start_at(0, 0)

    def start_at(
        self, epoch: int, cursor: int, at_once: int = 1, coming: Callable[[int], object] = lambda _: None
    ) -> Requests:
        """From here on, then. at_once: batches of a request, at most; coming: told where each ends, in advance."""
        self._start = epoch, cursor
        self._at_once = at_once
        self._coming = coming
        return self

    def __iter__(self) -> Iterator[Request]:
        return self._from(*self._start, self._at_once, self._coming)

    def _from(self, epoch: int, cursor: int, at_once: int, coming: Callable[[int], object]) -> Iterator[Request]:
        sampler = self._sampler
        step, stream = sampler.global_batch_size, (sampler.seed, epoch, sampler.rank)
        for run in self._runs(epoch, cursor):
            for first in range(0, len(run), at_once):
                batches = run[first : first + at_once]
                request = Request(batches.ravel(), batches.shape[1], cursor, step, stream)
                coming(request.end)
                yield request
                cursor = request.end

    def _runs(self, epoch: int, cursor: int) -> Iterable[Array]:
        if self._batches is None:
            return self._sampler.runs(epoch, cursor)
        return (np.asarray(rows, np.int64)[None] for rows in self._batches)


class BatchMaker(torch.utils.data.Dataset[Answer]):
    """Turns requests into batches, on a thread or in worker processes: gather, collate, transform."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        ragged: str,
        group: Mapping[str, Sequence[str]] | None,
        collate_fn: Callable[[Rows], Any] | None,
        transform: Callable[..., Any] | None,
    ) -> None:
        self._dataset = dataset
        self._shape: dict[str, Any] = {"ragged": ragged, "group": group}
        to_batch(Records.none(dataset.rowstore.layout), **self._shape)  # so that what is wrong with it is said now
        self._collate = collate_fn
        self._transform = transform
        self._wants_rng = _takes_rng(transform)

    @property
    def only_gathers(self) -> bool:
        """Whether no code of the user's has a part in it."""
        return self._collate is None and self._transform is None

    def __getitem__(self, request: Request) -> Answer:
        """The answer of a worker: its batch is packed."""
        making = Timeline(usually="collate")
        with making.here():
            [answer] = self.make(request)
            packed = pack(list(answer.batch) if isinstance(answer.batch, Rows) else answer.batch)
        take = self._dataset.rowstore.ledger.take
        row_groups = {
            group: None if account is None else take(group, at_rest=False) or {}
            for group, account in answer.row_groups.items()
        }
        return replace(answer, batch=packed, row_groups=row_groups, making=making.end())

    def make(self, request: Request, stop: Future[None] | None = None, empty: Empty | None = None) -> Iterator[Answer]:
        """The batches that were asked for, gathered in one go.

        stop: as for `RowStore.gather`. empty: as for `to_batch`; not used for what a user's code is given.
        """
        sizes, cursor, opened = request.sizes, request.cursor, dict[int, bool]()
        records = self._dataset.rowstore.gather(request.rows, stop, opened)
        row_groups: dict[int, Mapping[str, float] | None] = {
            group: {} if new else None for group, new in opened.items()
        }
        for size, batch in zip(sizes, self._collated(records, sizes, empty), strict=True):
            yield Answer(cursor, size, self._transformed(batch, request.stream, cursor), row_groups)
            cursor, row_groups = cursor + request.step, {}

    def collate(self, rows: Rows) -> Any:
        """The batch of these rows, for a plain DataLoader in the loader's place (accelerate's `skip_first_batches`).

        Raises ConfigError for a transform that takes `rng`, which only the loader has.
        """
        if self._wants_rng:
            raise ConfigError("transform(batch, rng) needs the loader itself: skip batches by load_state_dict instead")
        rows = rows.shaped(**self._shape)
        return self._transformed(rows.columns if self._collate is None else self._collate(rows))

    def _collated(self, records: Records, sizes: Sequence[int], empty: Empty | None) -> Iterable[Any]:
        if self.only_gathers:
            return cut(to_batch(records, **self._shape, empty=empty), sizes, empty)
        if self._collate is None:
            return cut(to_batch(records, **self._shape), sizes)
        return (self._collate(Rows(records[span], **self._shape)) for span in spans(sizes))

    def _transformed(self, batch: Any, stream: tuple[int, ...] = (), cursor: int = 0) -> Any:
        if self._transform is None:
            return batch
        with doing("transform"):
            if not self._wants_rng:
                return self._transform(batch)
            seed, epoch, rank = stream
            key = derive_key("transform", seed, epoch, cursor, rank)
            return self._transform(batch, rng=np.random.Generator(np.random.Philox(key)))


def _takes_rng(transform: Callable[..., Any] | None) -> bool:
    try:
        return transform is not None and "rng" in inspect.signature(transform).parameters
    except ValueError:  # a builtin without a signature
        return False

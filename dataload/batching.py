"""Which batches a rank makes, in which order, and how one is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dataload.batch import Rows, cut, to_batch
from dataload.columns import Array
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.packing import pack
from dataload.records import Records
from dataload.samplers.keys import derive_key
from dataload.samplers.sharded import ShardedSampler
from dataload.stats import SHARES


@dataclass(frozen=True)
class Request:
    """One batch to be made. cursor: rows of the epoch before its global batch; rows: int64 [B].

    place: seed, epoch, cursor and rank, from which the random numbers of its transform follow, whoever makes it.
    """

    cursor: int
    rows: Array
    place: tuple[int, ...]


class Answer(NamedTuple):
    """A batch that was made. cursor: as in its request; rows: how many; traffic: what a worker's cache counted."""

    cursor: int
    rows: int
    batch: Any
    traffic: dict[str, float]


class Requests(Iterable[Request]):
    """The requests of one rank, from wherever it was told to start.

    batches: row numbers of each batch, from where `sampler` stands on; None: the sampler's own.
    """

    def __init__(self, sampler: ShardedSampler, batches: Iterable[Sequence[int]] | None = None) -> None:
        self._sampler = sampler
        self._batches = batches
        self._start = (0, 0)
        self._coming: Callable[[Array], object] = lambda _: None

    def start_at(self, epoch: int, cursor: int, coming: Callable[[Array], object] = lambda _: None) -> Requests:
        """From here on, then. coming: told the rows of each request before it is made."""
        self._start = (epoch, cursor)
        self._coming = coming
        return self

    def __iter__(self) -> Iterator[Request]:
        return self._from(*self._start)

    def _from(self, epoch: int, cursor: int) -> Iterator[Request]:
        sampler = self._sampler
        for rows in sampler.batches(epoch, cursor) if self._batches is None else self._batches:
            request = Request(cursor, np.asarray(rows, np.int64), (sampler.seed, epoch, cursor, sampler.rank))
            self._coming(request.rows)
            yield request
            cursor += sampler.global_batch_size


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
        self._collate = collate_fn
        self._transform = transform
        self._wants_rng = _takes_rng(transform)
        self._counted: dict[str, float] = {}

    @property
    def only_gathers(self) -> bool:
        """Whether no code of the user's has a part in it."""
        return self._collate is None and self._transform is None

    def __getitem__(self, request: Request) -> Answer:
        """The answer of a worker: its batch is packed."""
        [answer] = self.make([request])
        return answer._replace(batch=pack(answer.batch), traffic=self._traffic())

    def make(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """The answers to some requests, gathered in one go."""
        records = self._dataset.rowstore.gather(np.concatenate([request.rows for request in requests]))
        sizes = [len(request.rows) for request in requests]
        for request, size, batch in zip(requests, sizes, self._collated(records, sizes), strict=True):
            yield Answer(request.cursor, size, self._transformed(batch, request.place), {})

    def collate(self, rows: Rows) -> Any:
        """The batch of these rows, for a plain DataLoader in the loader's place (accelerate's `skip_first_batches`).

        Raises ConfigError for a transform that takes `rng`, which only the loader has.
        """
        if self._wants_rng:
            raise ConfigError("transform(batch, rng) needs the loader itself: skip batches by load_state_dict instead")
        rows = rows.shaped(**self._shape)
        return self._transformed(rows.columns if self._collate is None else self._collate(rows), ())

    def _collated(self, records: Records, sizes: Sequence[int]) -> Iterable[Any]:
        if self._collate is None:
            return cut(to_batch(records, **self._shape), sizes)
        ends = np.cumsum(sizes).tolist()
        parts = (records[end - size : end] for end, size in zip(ends, sizes, strict=True))
        return (self._collate(Rows(part, **self._shape)) for part in parts)

    def _transformed(self, batch: Any, place: tuple[int, ...]) -> Any:
        if self._transform is None:
            return batch
        if not self._wants_rng:
            return self._transform(batch)
        return self._transform(batch, rng=np.random.Generator(np.random.Philox(derive_key("transform", *place))))

    def _traffic(self) -> dict[str, float]:
        """What this worker's cache counted since it was last asked."""
        before, stats = self._counted, self._dataset.blocks.stats()
        self._counted = {name: stats[name] for name in SHARES}
        return {name: total - before.get(name, 0) for name, total in self._counted.items()}


def _takes_rng(transform: Callable[..., Any] | None) -> bool:
    try:
        return transform is not None and "rng" in inspect.signature(transform).parameters
    except ValueError:  # a builtin without a signature
        return False

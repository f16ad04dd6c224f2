"""Which batches a rank makes, in which order, and how one is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dataload.batch import Rows, pack
from dataload.columns import Array
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key
from dataload.samplers.sharded import ShardedSampler
from dataload.stats import Stopwatch


@dataclass(frozen=True)
class Request:
    """One batch to be made. cursor: rows of the epoch before its global batch; rows: int64 [B].

    key: of the random numbers of its transform; the same whoever makes it, and whenever.
    """

    cursor: int
    rows: Array
    key: int


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

    def start_at(self, epoch: int, cursor: int) -> Requests:
        self._start = (epoch, cursor)
        return self

    def __iter__(self) -> Iterator[Request]:
        return self._from(*self._start)

    def _from(self, epoch: int, cursor: int) -> Iterator[Request]:
        sampler = self._sampler
        for rows in sampler.batches(epoch, cursor) if self._batches is None else self._batches:
            key = derive_key("transform", sampler.seed, epoch, cursor, sampler.rank)
            yield Request(cursor, np.asarray(rows, np.int64), key)
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
        self._ragged = ragged
        self._group = group
        self._collate = collate_fn
        self._transform = transform
        self._wants_rng = _takes_rng(transform)
        self._counted: dict[str, float] = {}

    def __getitem__(self, request: Request) -> Answer:
        batch = self._made(self._dataset.batch(request.rows), request.key)
        if torch.utils.data.get_worker_info() is None:
            return Answer(request.cursor, len(request.rows), batch, {})
        return Answer(request.cursor, len(request.rows), pack(batch), self._traffic())

    def collate(self, rows: Rows) -> Any:
        """The batch of these rows, for a plain DataLoader in the loader's place (accelerate's `skip_first_batches`).

        Raises ConfigError for a transform that takes `rng`, which only the loader has.
        """
        if self._wants_rng:
            raise ConfigError("transform(batch, rng) needs the loader itself: skip batches by load_state_dict instead")
        return self._made(rows, 0)

    def _made(self, rows: Rows, key: int) -> Any:
        rows = rows.shaped(ragged=self._ragged, group=self._group)
        batch = rows.columns if self._collate is None else self._collate(rows)
        if self._transform is None:
            return batch
        rng = {"rng": np.random.Generator(np.random.Philox(key))} if self._wants_rng else {}
        return self._transform(batch, **rng)

    def _traffic(self) -> dict[str, float]:
        """What this worker's cache counted since it was last asked."""
        before, stats = self._counted, self._dataset.blocks.stats()
        self._counted = {name: stats[name] for name in Stopwatch.SHARES}
        return {name: total - before.get(name, 0) for name, total in self._counted.items()}


def _takes_rng(transform: Callable[..., Any] | None) -> bool:
    try:
        return transform is not None and "rng" in inspect.signature(transform).parameters
    except ValueError:  # a builtin without a signature
        return False

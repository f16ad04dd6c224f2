"""The loader: a torch DataLoader whose order, batches and position are ours."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from dataload.cache.config import CacheConfig
from dataload.catalog.manifest import Source
from dataload.catalog.pruning import Filters
from dataload.dataset import Dataset, make_dataset
from dataload.errors import ConfigError
from dataload.loader.batch_maker import Answer, BatchMaker, Request, Requests
from dataload.loader.capacity import check_shared_memory, gathered_at_once, provide
from dataload.loader.device_copy import DeviceCopy, Staging, staging_for
from dataload.loader.integrations import TrainerSampler, Unwrapped, announced, trainer_device
from dataload.loader.lookahead import Lookahead, Needs, run_ahead
from dataload.loader.worker_transport import unpack
from dataload.samplers.order import Shuffle
from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.row_group_ledger import Served
from dataload.telemetry.stats_log import Samples
from dataload.telemetry.wait_timeline import Timeline, doing
from dataload.world import World

BATCHES_AHEAD = 8
PROCESSES_OF_A_RANK = 2  # that fetch: its own, and the one that decodes in the background
RANKS_OF_A_HOST = 8  # at most, where the launcher does not say

log = logging.getLogger(__name__)


class Loader(Unwrapped, DataLoader[Any]):
    """Batches of one rank; `make_loader` makes it.

    Notes: its position is that of the latest iterator, and counts what was handed out, not what was prefetched. Each
    argument is an attribute or goes to torch, and `batch_sampler` is there, because Lightning builds the loader that
    predicts from another one's attributes, with a batch sampler that remembers what it was asked for.
    """

    dataset: Dataset
    sampler: TrainerSampler

    def __init__(
        self,
        dataset: Dataset,
        *,
        maker: BatchMaker,
        batch_size: int = 1,
        sampler: TrainerSampler | None = None,
        batch_sampler: BatchSampler | None = None,
        drop_last: bool = False,
        device: torch.device | None = None,
        prefetch: int = BATCHES_AHEAD,
        detected: bool = False,
        stats_dir: Path | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        batching: dict[str, Any] = {"batch_sampler": batch_sampler}
        if batch_sampler is None:
            batching = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last}
        super().__init__(dataset, **{**dataloader_kwargs, **batching, "collate_fn": maker.collate})
        if batch_sampler is not None:
            vars(self)["sampler"] = batch_sampler.sampler  # torch, which guards the name, has put another one there
        self.maker = maker
        self.device = device
        self.prefetch = prefetch
        self.detected = detected
        self.stats_dir = stats_dir
        self._requests = Requests(self.sampler, batch_sampler)
        self._stats = LoaderStats()
        self._given: tuple[int, int] | None = None  # (epoch, rows of it) that the latest iterator has handed out
        self._workers: DataLoader[Answer] | None = None
        provide(dataset, self.sampler)
        if self.num_workers and not maker.only_gathers:
            in_flight = self.num_workers * (self.prefetch_factor or 1) * self.sampler.batch_size
            check_shared_memory(dataset.rowstore.row_bytes * in_flight)
            # In torch's own words: a dataset indexed by requests, not batched again, with the requests as its sampler.
            # What they send is packed, and pinned in one piece, by torch's own thread.
            staging = staging_for(device or trainer_device(), self.pin_memory)
            pinned = staging is not None and staging.pinned
            own = {"batch_size": None, "sampler": self._requests, "collate_fn": _as_it_is, "pin_memory": pinned}
            self._workers = DataLoader(maker, **{**dataloader_kwargs, **own})

    @property
    def padding(self) -> int:
        """Rows at the end of this rank's epoch that repeat others, so that every rank has as many."""
        return self.sampler.padding_from(self.sampler.cursor)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration runs. A position restored in this very epoch is kept."""
        if epoch != self.sampler.epoch:
            self.sampler.seek(epoch, 0)
        self._given = None

    def state_dict(self) -> dict[str, Any]:
        """Where the rows handed out so far end: JSON-able, under 4 KB, the same on every rank."""
        state = self.sampler.state_dict()
        if self._given is not None and self._given[0] == self.sampler.epoch:
            state[self.sampler.CURSOR] = self._given[1]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` ends, in any world, with any workers. Raises ConfigError for another dataset."""
        self.sampler.load_state_dict(state)
        self._given = None
        provide(self.dataset, self.sampler)

    def stats(self) -> LoaderStats:
        """Figures of the running epoch, or of the last one; they change only while its loop takes batches."""
        return self._stats

    def __iter__(self) -> Generator[Any, None, None]:  # type: ignore[override]
        sampler = self.sampler
        if self.detected and sampler.num_replicas == 1:
            _check_alone()
        if self._given is not None and self._given[0] == sampler.epoch and sampler.finished_at(self._given[1]):
            self.set_epoch(sampler.epoch + 1)  # The last loop took the last batch without asking for one more.
        epoch, cursor = self._given = sampler.epoch, sampler.cursor
        stats = self._stats = LoaderStats(epoch)
        rowstore = self.dataset.rowstore
        in_flight = 0 if self._workers is None else self.num_workers * (self.prefetch_factor or 1)
        served = Served(stats, rowstore.ledger, rowstore.size_of, in_flight)
        needs = Needs(self._needs(epoch, cursor))
        samples = Samples(self.stats_dir, sampler.rank, stats, sampler.num_replicas)
        # A last batch without padding has no remainder for accelerate to cut off.
        remainder = 0 if sampler.drop_last else (sampler.num_rows - cursor) % sampler.global_batch_size
        step = sampler.global_batch_size
        end = sampler.num_rows - (sampler.num_rows - cursor) % step if sampler.drop_last else sampler.num_rows
        started, waiting = perf_counter(), Timeline()
        answering = closing(self._answers(epoch, cursor, needs, waiting))
        with samples, closing(served), answering as answers, announced(remainder) as announce_last:
            while True:
                latest = self._stats is stats
                if self.persistent_workers and not latest:
                    raise RuntimeError("with persistent_workers a loader has one iterator at a time; a later one began")
                asked = perf_counter()
                answer = next(answers, None)
                now = perf_counter()
                stats.waited(waiting.take(asked, now), rowstore.usual_cause)
                stats.seconds = now - started
                if answer is None:
                    break
                stats.rows += answer.rows
                stats.batches += 1
                used = min(answer.cursor + step, sampler.num_rows)
                if latest:
                    self._given = epoch, used
                if used >= end:
                    announce_last()
                served.use(answer.row_groups, needs.before(used))
                samples.take(last=used >= end)
                yield answer.batch
        if sampler.epoch == epoch:  # else somebody has set another meanwhile
            self.set_epoch(epoch + 1)

    def _answers(self, epoch: int, cursor: int, needs: Needs, waiting: Timeline) -> Generator[Answer, None, None]:
        rowstore = self.dataset.rowstore
        lookahead, stop = self._lookahead(needs), Future[None]()
        device = self.device or trainer_device()
        if self._workers is None:
            staging = staging_for(device, self.pin_memory)
            made = self._on_a_thread(epoch, cursor, lookahead, waiting, stop, staging)
        else:
            self._requests.start_at(epoch, cursor, coming=lookahead.reach)
            self._workers.worker_init_fn = self.worker_init_fn  # Lightning sets it when all is built.
            made = self._unpacked(self._workers, waiting)
        copied = None if device is None else DeviceCopy(device)
        with closing(made):
            try:
                for answer in made:
                    if copied is None:
                        yield answer
                    else:
                        with waiting.doing("transfer"):
                            batch = copied(answer.batch)
                        yield replace(answer, batch=batch)
            except BaseException:
                if not stop.done():  # before `forget`, so that what this loop waits for is given up, too
                    stop.set_result(None)
                rowstore.forget()
                raise

    def _lookahead(self, needs: Iterator[tuple[int, int]]) -> Lookahead:
        rowstore = self.dataset.rowstore
        ahead, further = rowstore.ahead, rowstore.further
        if further and self._workers is not None:
            # Workers open what is in the cache when they need it, and more would take the place of that.
            ahead, further = max(1, ahead // 2), 0
        # Forked workers fetch more slowly, and share nothing but the cache: so it is filled from here, in advance.
        here = self._workers is None or rowstore.blobs.shared
        ask = rowstore.prefetch if here else lambda _: None
        return Lookahead(needs, ask, ahead, further, rowstore.blobs.passes)

    def _needs(self, epoch: int, cursor: int) -> Iterator[tuple[int, int]]:
        """(position, row group), what is left of this epoch and, so that no epoch begins with a wait, the next."""
        yield from self.sampler.needs_from(epoch, cursor)
        for position, group in self.sampler.needs_from(epoch + 1, 0):
            yield self.sampler.num_rows + position, group

    def _on_a_thread(
        self,
        epoch: int,
        cursor: int,
        lookahead: Lookahead,
        waiting: Timeline,
        stop: Future[None],
        staging: Staging | None,
    ) -> Generator[Answer, None, None]:
        """Batches, gathered many at once where one takes less than a call; and handed over so, unless transformed."""
        at_once = gathered_at_once(self.dataset.rowstore.row_bytes * self.sampler.batch_size)
        handed_over = at_once if self.maker.only_gathers else 1
        requests = self._requests.start_at(epoch, cursor, at_once)
        made = self._made(requests, lookahead, handed_over, stop, staging)
        with closing(run_ahead(made, max(2, self.prefetch // handed_over), stop, waiting)) as runs:
            for answers in runs:
                yield from answers

    def _made(
        self,
        requests: Iterable[Request],
        lookahead: Lookahead,
        together: int,
        stop: Future[None],
        staging: Staging | None,
    ) -> Iterator[list[Answer]]:
        for request in requests:
            lookahead.reach(request.end)
            answers = self.maker.make(request, stop, None if staging is None else staging.empty)
            if staging is not None and not self.maker.only_gathers:
                answers = _staged(answers, staging)
            while some := list(islice(answers, together)):
                yield some

    def _unpacked(self, answers: Iterable[Answer], waiting: Timeline) -> Generator[Answer, None, None]:
        since = perf_counter()
        try:
            for answer in answers:
                waiting.waited(since, answer.making, instead=answer.making.longest())
                with waiting.here():
                    batch = unpack(answer.batch)
                yield replace(answer, batch=batch)
                since = perf_counter()
        except Exception as error:  # noqa: BLE001
            # The frame in torch that raised it holds it, too: a circle that would keep the workers until it is found by
            # the garbage collector, which ends their queues before they are told to stop, and then waits 5 s for each.
            raise error.with_traceback(None)  # noqa: B904


def make_loader(
    source: Source | Dataset,
    batch_size: int,
    *,
    shuffle: Shuffle | bool = True,
    seed: int = 0,
    drop_last: bool = False,
    window: int | None = None,
    num_streams: int | None = None,
    num_workers: int = 0,
    group: Mapping[str, Sequence[str]] | None = None,
    ragged: str = "list",
    transform: Callable[..., Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool | None = None,
    prefetch: int | None = None,
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    storage_options: dict[str, Any] | None = None,
    cache_dir: str | None = None,
    cache_bytes: int | str | None = None,
    cluster: str | None = None,
    cache: CacheConfig | None = None,
    fill_null: Any = None,
    stats_dir: str | os.PathLike[str] | None = None,
    world: World | None = None,
    **dataloader_kwargs: Any,
) -> Loader:
    """A loader of one rank's batches, each row exactly once an epoch over all ranks.

    source: what `make_dataset` takes, or what it made.
    batch_size: rows of a batch on this rank.
    shuffle: True or "block": row groups over the whole dataset, rows inside a window of `window` row groups; "full":
        every row anywhere; False: file order. window: None: `default_window` of the row groups' rows and bytes.
    seed: of the order, together with the epoch and the dataset.
    num_streams: parts of the dataset that nodes keep to themselves; None: as many as there are nodes, or 1.
    num_workers: processes that run `transform` and `collate_fn`; 0, or neither of them given: a thread.
    group: name -> columns of one dtype that come together as one Tensor[B, k].
    ragged: "list", or "flat" for values and offsets as two tensors (`dataload.rows.collate.Flat`).
    transform: called as transform(batch), or transform(batch, rng=numpy Generator) when it takes `rng`; the generator
        is the same for the same batch, whatever the workers and after any resume.
    collate_fn: makes the batch from a sequence of row dicts (whose `.columns` is the default batch).
    device: where batches are put; pin_memory: default: when the device is CUDA, also where accelerate says so.
    prefetch: batches made ahead, by each worker or by the thread.
    cache_dir, cache_bytes, cluster: as in `CacheConfig`; or give one as `cache`. For none at all, pass a dataset that
        `make_dataset(..., cache=None)` made.
    stats_dir: a folder in which each rank writes what its epochs come to, once a second, for `dataload report`; one
        folder for each loader. Trouble with it is logged and is no error.
    world: this rank among all; None: `World.detect()`.
    columns, filters, storage_options, fill_null: as in `make_dataset`.
    The rest goes to `torch.utils.data.DataLoader`.

    Raises ConfigError for arguments that cannot work, and what `make_dataset` raises.
    """
    own = {"columns": columns, "filters": filters, "storage_options": storage_options, "fill_null": fill_null}
    place = {"cache_dir": cache_dir, "cache_bytes": cache_bytes, "cluster": cluster}
    if isinstance(source, Dataset):
        _refuse({**own, **place, "cache": cache}, "belongs to make_dataset, which made this dataset")
        dataset = source
    else:
        if cache is not None:
            _refuse(place, "is said by cache=CacheConfig(...) already")
        dataset = make_dataset(source, cache=cache or CacheConfig(cache_dir, cache_bytes, cluster=cluster), **own)
    if ragged not in ("list", "flat"):
        raise ConfigError(f"ragged={ragged!r} is unknown: use 'list' or 'flat'")
    for name, number in (("batch_size", batch_size), ("prefetch", 1 if prefetch is None else prefetch)):
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    if not dataloader_kwargs.get("in_order", True):
        raise ConfigError("in_order=False: batches out of order cannot be resumed; leave it out")
    detected = world is None
    world = World.detect(world)
    nodes = world.num_nodes or 1
    if dataset.blocks.origin.limiter is not None:
        ranks = world.local_world_size or min(world.world_size, RANKS_OF_A_HOST)
        dataset.blocks.origin.limiter.share(PROCESSES_OF_A_RANK * ranks)
    sampler = TrainerSampler(
        dataset.block_lengths,
        world.world_size,
        world.rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        window=dataset.window if window is None else window,
        batch_size=batch_size,
        num_streams=num_streams or nodes,
        num_nodes=nodes,
        dataset_key=dataset.fingerprint.encode(),
    )
    log.info("rank %d of %d: %d rows, num_streams=%d", world.rank, world.world_size, len(dataset), num_streams or nodes)
    maker = BatchMaker(dataset, ragged=ragged, group=group, collate_fn=collate_fn, transform=transform)
    where = None if device is None else torch.device(device)
    if num_workers and prefetch is not None:
        dataloader_kwargs["prefetch_factor"] = prefetch
    return Loader(
        dataset,
        maker=maker,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        device=where,
        prefetch=prefetch or BATCHES_AHEAD,
        detected=detected,
        stats_dir=None if stats_dir is None else Path(stats_dir),
        num_workers=num_workers,
        pin_memory=pin_memory,
        **dataloader_kwargs,
    )


def _refuse(arguments: Mapping[str, Any], reason: str) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{name}: it {reason}")  # and not its value, which may hold a password


def _check_alone() -> None:
    """Raises ConfigError when there are several ranks by now: each of them would be given every row."""
    world = World.detect()
    if world.world_size > 1:
        raise ConfigError(
            f"this loader was made for a single process, but this is rank {world.rank} of {world.world_size}: make it "
            "after the ranks have been started (in Lightning, in train_dataloader), or pass world=World(rank, size)"
        )


def _staged(answers: Iterable[Answer], staging: Staging) -> Iterator[Answer]:
    """Stage what a user's code has made."""
    for answer in answers:
        with doing("transfer"):
            batch = staging.stage(answer.batch)
        yield replace(answer, batch=batch)


def _as_it_is(answer: Any) -> Any:
    return answer

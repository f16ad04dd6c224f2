"""The loader: a torch DataLoader with its own order, batches and position."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from dataload.catalog.inventory_store import as_text
from dataload.errors import ConfigError
from dataload.loader.agreement import Agreement
from dataload.loader.background_iterator import check_process, closed_at_exit, run_ahead
from dataload.loader.batch_maker import BatchMaker, answers_of
from dataload.loader.capacity import Capacity, check_workers, gathered_at_once
from dataload.loader.changes import (
    OnChange,
    at_start,
    check_choice,
    continued,
    earlier_dataset,
    for_state,
    keep,
    other_version,
)
from dataload.loader.device_copy import DeviceCopy, HostMemory, current_gpu, host_memory_for
from dataload.loader.epoch_recorder import recorded
from dataload.loader.integrations import PreparedForAccelerate, TrainerEpochs, accelerate_iteration, trainer_device
from dataload.loader.lookahead import Lookahead, RecordedNeeds, lookahead_of, needs_of
from dataload.loader.ranks import check_data_parallel, process_among, share_host
from dataload.loader.requests import Answer, Requests
from dataload.loader.run_record import record_of
from dataload.loader.trainer_batches import LatestLoop, TrainerBatches
from dataload.loader.worker_start import begin_worker, started
from dataload.loader.worker_transport import unpack
from dataload.map_style import MapStyle
from dataload.rows.batch_tree import on_device
from dataload.rows.numbered_rows import PlacedRows
from dataload.runtime.forks import KeptByChildren
from dataload.runtime.text import few
from dataload.samplers.keys import derive_key
from dataload.samplers.position import EARLIER, Position
from dataload.samplers.rank_sampler import RankSampler
from dataload.samplers.steps import PositionOrder
from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.run_ledger import Ledger
from dataload.telemetry.wait_timeline import Timeline, doing

if TYPE_CHECKING:
    from dataload.loader.loader_metrics import LoaderMetrics

BATCHES_AHEAD = 8
STALL_SECONDS = 60.0

log = logging.getLogger(__name__)

_iterators_of_torch = KeptByChildren()  # Their end stops the workers, also if a forked child of this process ends them.


class Loader(PreparedForAccelerate, DataLoader[Any]):
    """Batches of one rank. `make_loader` returns one.

    Notes: `state_dict` has the position of the iterator that yielded last. Prefetched batches do not count. A second
    whole loop within an epoch moves on to the next epoch, and batches of the first loop do not count then.

    Lightning rebuilds a loader from its attributes: for prediction with a batch sampler that records row numbers, for
    `overfit_batches` with a sampler of file order. So each argument is an attribute or is passed on to torch.

    Args:
        rank_sampler: The order of the rows, also if one of the next two is passed.
        sampler: `rank_sampler`, or torch's `SequentialSampler` for the same rows in file order.
        batch_sampler: Returns the row numbers of the batches of `rank_sampler`.
        given: What the ledger of a run says of the arguments of `make_loader` that decide batches.
        sampler_of: Returns such a sampler of another snapshot of the dataset, given this one; None: the loader stays.
    """

    dataset: MapStyle
    replaced: tuple[int, ...] = ()
    """Positions in the batch that was handed out last of rows that stand in for rows that raised."""

    def __init__(
        self,
        dataset: MapStyle,
        *,
        maker: BatchMaker,
        rank_sampler: TrainerEpochs,
        batch_size: int = 1,
        sampler: Sampler[int] | None = None,
        batch_sampler: BatchSampler | None = None,
        sampler_of: Callable[[MapStyle, MapStyle], TrainerEpochs] | None = None,
        drop_last: bool = False,
        device: torch.device | None = None,
        prefetch: int = BATCHES_AHEAD,
        num_threads: int | None = None,
        detected: bool = False,
        local_world_size: int = 1,
        mesh: DeviceMesh | None = None,
        stats_dir: Path | None = None,
        stall_warning: float = STALL_SECONDS,
        metrics: LoaderMetrics | None = None,
        given: Mapping[str, Any] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        if isinstance(batch_sampler, TrainerBatches):  # Lightning has made one with another sampler.
            batch_size, sampler, batch_sampler = batch_sampler.batch_size, batch_sampler.sampler, None
        if isinstance(sampler, SequentialSampler):
            rank_sampler = copy(rank_sampler)
            rank_sampler.use_file_order()
        elif sampler is not None and sampler is not rank_sampler:
            raise ConfigError(f"a loader has its own sampler, not {sampler!r}: pass shuffle= or world= to make_loader")
        batching: dict[str, Any] = {"batch_sampler": batch_sampler}
        if batch_sampler is None:
            batching = {"batch_size": batch_size, "sampler": rank_sampler, "drop_last": drop_last}
        self.metrics = metrics
        self._latest = LatestLoop(metrics)
        collate_fn = partial(self._latest.collate, maker)
        super().__init__(dataset, **{**dataloader_kwargs, **batching, "collate_fn": collate_fn})
        if batch_sampler is None:  # torch has made one, and takes no other besides a sampler.
            vars(self)["batch_sampler"] = TrainerBatches(rank_sampler, batch_size, drop_last, self._latest.begin)
        if not rank_sampler.steps.is_even:
            vars(self)["batch_size"] = None  # as torch has it for batches of several sizes
        self.rank_sampler = rank_sampler
        self.sampler_of = sampler_of
        self._next: MapStyle | None = None  # what the next epoch reads, if this one ends on an earlier snapshot
        self._refreshes = dataset.refreshes  # of which this loader knows
        self.maker = maker
        self.device = device
        self.prefetch = prefetch
        self.num_threads = num_threads
        self.detected = detected
        self.local_world_size = local_world_size
        self.mesh = mesh
        self._agreement = Agreement(dataset, rank_sampler) if detected and rank_sampler.num_replicas > 1 else None
        self._checked = False  # whether a mesh that began after the loader was made has been searched for
        self.stats_dir = stats_dir
        self.stall_warning = stall_warning
        self.given = given
        self._start: Position | None = None  # of the last loop
        self._repeats = 0  # loops that began there again
        self._latest_ledger = Ledger(None, 0, writes=False)
        self._requests = Requests(self.rank_sampler, batch_sampler)
        self._workers: dict[int, DataLoader[Answer]] = {}  # by the process that made them
        self._worker_arguments: dict[str, Any] | None = None  # of `_workers`; None: threads make the batches
        self._capacity = Capacity(dataset, self.rank_sampler)
        if self.num_workers and not maker.only_gathers:
            in_flight = local_world_size * self.num_workers * (self.prefetch_factor or 1) * self.rank_sampler.batch_size
            check_workers(dataset, self.num_workers, in_flight)
            # The workers' dataset is the batch maker, and its sampler yields requests: torch batches nothing itself.
            own = {"batch_size": None, "sampler": self._requests, "collate_fn": _identity}
            self._worker_arguments = {**dataloader_kwargs, **own}

    def __repr__(self) -> str:
        return f"Loader({len(self):,} batches; {_order_text(self.rank_sampler)}; {self.dataset!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the workers, the metrics and the ledger of the loop, which belong to this process."""
        return {**vars(self), "_workers": {}, "metrics": None, "_latest_ledger": Ledger(None, 0, writes=False)}

    def __len__(self) -> int:
        self._renew()
        return super().__len__()

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse to be a dataset of another DataLoader, such as that of a Hugging Face Trainer."""
        raise TypeError(
            "a loader has batches and no rows by number, so it cannot be the dataset of another DataLoader: use the "
            "loader itself (in a Hugging Face Trainer, return it from get_train_dataloader), or its loader.dataset"
        )

    @property
    def padding(self) -> int:
        """Rows at the end of this rank's epoch that repeat others, so that all ranks have equally many.

        After a whole loop, it is the padding of that loop, until the next one begins or the position is set.
        """
        padding = None if self.rank_sampler.handed_out is None else self._latest.padding
        return self.rank_sampler.padding_ahead() if padding is None else padding

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A position that was restored in this epoch is kept."""
        self._start = None
        self.rank_sampler.begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch: JSON-serializable, under 4 KB, equal on all ranks."""
        sampler = self.rank_sampler
        if sampler.handed_out_in_epoch is None:
            self._renew()
        keep(self.dataset, sampler.position.dataset)
        return for_state(sampler.saved_position, self.dataset).state_dict()

    def load_state_dict(self, state: dict[str, Any], on_change: OnChange = "error") -> None:
        """Resume at the position of `state`. The numbers of ranks and of workers may differ from those that saved it.

        An epoch that has begun ends in the order of the state. If `shuffle`, `seed` or `window` were others, those of
        this loader hold from the next epoch on, and a warning names them.

        Args:
            state: What `state_dict` returned.
            on_change: What to do if the data has changed since: files were added, removed or replaced, or a table has
                another version, or other rows are chosen. "error" raises an error. "next_epoch" ends the epoch on the
                data of the state, whose files must still be there, and reads this loader's from the next epoch on.
                "continue" reads in the rest of the epoch what it has not had of this loader's data: the old rows that
                are still there, and the new ones, each once; not after `select` or `split`.

        Raises:
            ConfigError: The state is of another dataset, or of another version of a table; or it cannot be told which
                rows of it the epoch has had, or what the rest of it is.
            OriginError: A file of the data of the state is gone.
            DataError: A function of `map` cannot work with the data of the state.
        """
        check_choice(on_change)
        if self._next is not None:
            self._read(self._next)
        position, sampler = Position.from_state(state), self.rank_sampler
        self._start = None
        changed = position.dataset != sampler.position.dataset
        if changed and on_change == "error":
            if (other := other_version(position, self.dataset)) is not None:
                raise ConfigError(f"the state is of {other}")
            sampler.load_state_dict(state)  # It raises.
        elif changed and not position.cursor:  # The epoch has not begun.
            sampler.load_state_dict(_state_at(at_start(position, self.dataset, sampler)))
            sampler.since = position.epoch
        elif changed and on_change == "next_epoch":
            newest = self.dataset
            earlier = earlier_dataset(position, newest, sampler)
            earlier.precede(newest)
            self._read(earlier)
            try:
                self._restore(state, position)
            except BaseException:
                self._read(newest)
                raise
            self._next = newest
        else:
            self._restore(state, position)

    def _restore(self, state: Mapping[str, Any], position: Position) -> None:
        """Go on at the position of a state, in its epoch, which may have had rows of other data."""
        sampler = self.rank_sampler
        if not position.cursor or (position.dataset == sampler.position.dataset and EARLIER not in position.options):
            sampler.load_state_dict(state)
            return
        moved, order = continued(position, self.dataset, sampler)
        sampler.load_state_dict(_state_at(moved), lambda _: order)

    def inventories(self) -> dict[str, str]:
        """Return which rows the data of the current epoch has, and had before it changed, for checkpoints."""
        position = self.rank_sampler.saved_position
        keep(self.dataset, position.dataset)
        return as_text([position.dataset, *(each["dataset"] for each in position.options.get(EARLIER, ()))])

    def _renew(self) -> None:
        """Follow changes of the data, such as a refresh or new weights of a mixture, unless an epoch goes on."""
        sampler = self.rank_sampler
        newest = self.dataset.newest
        if newest is not self.dataset or newest.refreshes != self._refreshes:
            sampler.end_if_over()
            if sampler.handed_out_in_epoch is None and not sampler.cursor:
                self._follow(newest)
        sampler.renew()

    def _follow(self, newest: MapStyle) -> None:
        """Read the newest snapshot. On other ranks it may be another one, also if it is the same here."""
        self._refreshes = newest.refreshes
        if newest is not self.dataset:
            self._read(newest)
        elif self._agreement is not None:
            self._agreement.read(newest, self.rank_sampler, self._refreshes)

    def _read(self, dataset: MapStyle) -> None:
        """Read another snapshot of the data, from the beginning of the epoch on."""
        if self.sampler_of is None:
            raise ConfigError("a loader with batch_tokens stays at its snapshot: make it again")
        self.rank_sampler.replace_data(self.sampler_of(dataset, self.dataset))
        vars(self)["dataset"] = dataset  # which torch does not let anyone set
        self._next, self._start, self._workers = None, None, {}
        self.maker = self.maker.over(dataset)
        self.collate_fn = partial(self._latest.collate, self.maker)
        self._capacity = Capacity(dataset, self.rank_sampler)
        if self._agreement is not None:
            self._agreement.read(dataset, self.rank_sampler, self._refreshes)

    def rows_at(self, epoch: int, step: int) -> list[npt.NDArray[np.int64]]:
        """Return the row numbers of a step's batches, one array for each rank: what `row_ids=True` adds to them.

        The order is a formula, so nothing is read (with `batch_tokens`, the lengths of rows, which are cached). Rows
        that `on_error="skip"` replaces are those that were to come. `loader.dataset.locate(rows)` tells their files.

        Args:
            epoch: Number of the epoch.
            step: Number of the batch in the epoch, from 0, as `enumerate(loader)` counts a whole epoch. An epoch that
                a state restored goes on at the number that its rows have on these ranks.

        Returns:
            int64 [rows of the batch], by rank.

        Raises:
            IndexError: The epoch has no such batch.
            ConfigError: It came before the state was saved, perhaps on other ranks or in batches of another size; or in
                an epoch that came before those of this loader, in an order that it doesn't know; or before
                the data changed.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import pyarrow as pa, pyarrow.parquet as pq
            >>> from dataload import World, make_loader
            >>> folder = tempfile.TemporaryDirectory()
            >>> pq.write_table(pa.table({"id": range(8)}), Path(folder.name) / "rows.parquet")
            >>> loader = make_loader(folder.name, 2, shuffle=False, world=World(0, 2), cache=False)
            >>> [rows.tolist() for rows in loader.rows_at(epoch=3, step=1)]
            [[4, 5], [6, 7]]
            >>> loader.batch_at(epoch=3, step=1, rank=1)["id"].tolist()
            [6, 7]
            >>> folder.cleanup()
        """
        return self.rank_sampler.at(epoch, step).batches

    def batch_at(self, epoch: int, step: int, rank: int | None = None) -> Any:
        """Return the batch of a step again, with its transform and the same random numbers, wherever the loop is.

        Args:
            epoch: As for `rows_at`.
            step: As for `rows_at`.
            rank: The rank that got it; None: this one.

        Raises:
            IndexError: The epoch has no such batch.
            ConfigError: There is no such rank, or as for `rows_at`.
            Exception: What the loop would raise.
        """
        place = self.rank_sampler.at(epoch, step)
        place = place if rank is None else place.of_rank(rank)
        stream, draw = place.steps.seeds(place.epoch)
        rows = PlacedRows(place.batch.tolist(), (stream, place.cursor), draw)
        batch, *_ = self.maker.collate(self.dataset.__getitems__(rows))
        return batch if self.device is None else on_device(batch, self.device)

    def stats(self) -> LoaderStats:
        """Return statistics of the current or last epoch. They are updated when a batch is taken."""
        return self._latest.stats

    def row_group_states(self) -> dict[str, int]:
        """Return how many row groups of this process are planned, fetching, decoding, cached and mapped.

        Row groups that the background decoder makes count as planned.
        """
        return self.dataset.rowstore.states()

    def __iter__(self) -> Generator[Any, None, None]:  # type: ignore[override]  # noqa: PYI058 (callers close it)
        return self.batches_on()

    @closed_at_exit
    def batches_on(
        self,
        device: torch.device | None = None,
        stats_dir: Path | None = None,
        ledger_dir: Path | None = None,
        progress: Mapping[str, int] | None = None,
    ) -> Generator[Any, None, None]:
        """Yield the batches of an epoch on `device`; otherwise the same as iterating the loader.

        Args:
            device: Device of the batches. The loader's own `device` has precedence over it.
            stats_dir: Folder of the statistics' log. The loader's own `stats_dir` has precedence over it.
            ledger_dir: Folder of the run's ledger, without a folder of statistics.
            progress: What the ledger says of the training: the optimizer steps before, and the batches of each.

        Raises:
            RuntimeError: The workers are persistent and a later iterator has begun, or another process began this one.
        """
        owner = os.getpid()
        before, start = self.rank_sampler.handed_out, self._begin_epoch()
        self._tell_repeats(before, start)
        sampler, epoch, cursor = self.rank_sampler, start.epoch, start.cursor
        sampler.hand_out(epoch, cursor)
        steps = sampler.steps  # those of this epoch, also when the sampler has moved on
        device = self.device or device or trainer_device()
        # Those of a token budget are unknown: all would have to be planned before the first one.
        stats = _new_stats(self, epoch, device, steps.left(epoch, cursor) if steps.is_even else 0)
        self._latest.begin(stats, partial(steps.padding, epoch, cursor))
        needs = RecordedNeeds(needs_of(sampler, epoch, cursor))
        workers = 0 if self._worker_arguments is None else self.num_workers
        log_dir = self.stats_dir or stats_dir
        ledger = self._ledger(log_dir or ledger_dir)
        with (
            ledger,
            recorded(
                self.dataset,
                sampler,
                stats,
                needs,
                folder=log_dir,
                stall_warning=self.stall_warning,
                num_workers=workers,
                in_flight=workers * (self.prefetch_factor or 1),
            ) as recorder,
            closing(self._answers(epoch, cursor, needs, recorder.waiting, device)) as answers,
            accelerate_iteration(partial(steps.remainder, cursor)) as announce_last,
        ):
            counts: Mapping[str, int | None] = progress or {"step": None, "accumulate": None}
            ledger.start(lambda: {**record_of(self, start, ledger.keep), **counts})
            for answer in recorder.timed(answers):
                used, last = answer.end, steps.is_over(epoch, answer.end)
                sampler.hand_out(epoch, used)
                if last:
                    announce_last()
                recorder.hand_out(answer, used, last=last)
                ledger.end = used
                if (request := answer.request) is not None:
                    ledger.hand_out(request.cursor, request.step, request.size, request.rows)
                if answer.skipped:
                    ledger.skip([*answer.skipped.values()])
                self.replaced = tuple(answer.skipped)
                yield answer.batch
                check_process(owner)
                if self.persistent_workers and self._latest.stats is not stats:
                    raise RuntimeError("with persistent_workers a loader has one iterator at a time; a later one began")
        if self._agreement is not None:
            self._agreement.check(epoch)
        if sampler.epoch == epoch:  # The loop may have called set_epoch.
            sampler.end_epoch()

    def _ledger(self, folder: Path | None) -> Ledger:
        """Return the ledger of the loop that begins. None of a batch sampler, which has rows of its own."""
        sampler = self.rank_sampler
        process = None if folder is None else process_among(sampler.num_replicas)
        self._latest_ledger = Ledger(
            folder if self.sampler is sampler else None, sampler.rank, writes=sampler.rank == 0 and not process
        )
        return self._latest_ledger

    def seal(self) -> None:
        """Record in the ledger of the run, if there is one, which rows the loop has handed out so far."""
        self._latest_ledger.seal()

    def _begin_epoch(self) -> Position:
        """Return where the loop begins: a new epoch, or one that goes on."""
        sampler = self.rank_sampler
        if self.detected:
            check_data_parallel(sampler.rank, sampler.num_replicas, search=not self._checked)
            self._checked = True
        sampler.begin_loop()
        self._renew()
        if self._agreement is not None:
            self._agreement.check(sampler.epoch)
        share_host(self.maker, self.dataset, self.local_world_size, self.num_workers)
        return sampler.position if self.sampler is sampler else sampler.position.at(0)  # A batch sampler has all of it.

    def _tell_repeats(self, before: Position | None, start: Position) -> None:
        """Warn, once, of loops that are left early and begin at the same batch each time.

        Args:
            before: What the last loop has handed out.
            start: Where this loop begins. One loop that begins again may be a look at the first batch.
        """
        is_repeat = start == self._start and before is not None and before.cursor > start.cursor
        self._start, self._repeats = start, self._repeats + 1 if is_repeat else 0
        if self._repeats == 2:
            log.warning(
                "loops over this loader begin at the same batch of epoch %d each time, because none of them took all: "
                "call loader.set_epoch(epoch) before each loop for other batches",
                start.epoch,
            )

    def _answers(
        self, epoch: int, cursor: int, needs: RecordedNeeds, waiting: Timeline, device: torch.device | None
    ) -> Generator[Answer, None, None]:
        rowstore = self.dataset.rowstore
        has_workers = self._worker_arguments is not None
        lookahead = lookahead_of(rowstore, self._capacity, needs, has_workers=has_workers)
        stop = Future[None]()
        memory = host_memory_for(device, self.pin_memory)
        if not has_workers:
            answers = self._from_threads(epoch, cursor, lookahead, waiting, stop, memory)
        else:
            self._requests.start_at(epoch, cursor, on_request=lookahead.reach)
            pinned = memory if memory is not None and memory.pinned else None
            answers = _from_workers(self._with_workers(pin=pinned is not None), waiting, pinned)
        copy = None if device is None else DeviceCopy(device)
        with closing(answers):
            try:
                for answer in answers:
                    if copy is None:
                        yield answer
                    else:
                        with waiting.doing("transfer"):
                            batch = copy(answer.batch)
                        yield replace(answer, batch=batch)
            except BaseException:
                if not stop.done():  # before `forget`, so that it also cancels what this loop waits for
                    stop.set_result(None)
                rowstore.forget()
                raise

    def _with_workers(self, *, pin: bool) -> DataLoader[Answer]:
        """Return torch's loader of packed batches. pin: its thread pins them."""
        here = os.getpid()
        if here not in self._workers or not self.persistent_workers:
            if multiprocessing.current_process().daemon:  # torch would say so by an AssertionError
                raise ConfigError(
                    f"num_workers={self.num_workers} cannot start processes in a daemonic one: use num_threads="
                    f"{self.num_workers}, or start this process with daemon=False"
                )
            # Lightning sets worker_init_fn later, fit sets the generator, and the Accelerator may be newer.
            begin = partial(begin_worker, self.worker_init_fn)
            late = {"worker_init_fn": begin, "generator": self._seeds_of_workers(), "pin_memory": pin}
            self._workers = {here: DataLoader(self.maker, **{**(self._worker_arguments or {}), **late})}
        return self._workers[here]

    def _seeds_of_workers(self) -> torch.Generator:
        """Return the generator that torch draws the seeds of workers from: the global one belongs to the loop."""
        sampler = self.rank_sampler
        key = derive_key("workers", sampler.seed, sampler.epoch, sampler.rank)
        return self.generator or torch.Generator().manual_seed(key)

    def _from_threads(
        self,
        epoch: int,
        cursor: int,
        lookahead: Lookahead,
        waiting: Timeline,
        stop: Future[None],
        memory: HostMemory | None,
    ) -> Generator[Answer, None, None]:
        """Yield batches made on threads. Small ones are gathered, and without user code also passed on, together."""
        only_gathers = self.maker.only_gathers
        at_once = gathered_at_once(self.dataset.rowstore.row_bytes * self.rank_sampler.batch_size)
        together = at_once if only_gathers else 1
        passed_on = 1 if self.maker.makes_objects else min(together, self.maker.made_together)
        around = self.maker.around(cursor, in_threads=self.num_threads != 0)
        # One thread gathers at a time.
        threads = 1 if self.num_threads is None or (only_gathers and self.num_threads) else self.num_threads

        def calls() -> Iterator[Callable[[], list[Answer]]]:
            for request in self._requests.start_at(epoch, cursor, at_once):
                lookahead.reach(request.end)
                calls = self.maker.calls(request, around, stop, None if memory is None else memory.empty)
                while chunk := list(islice(calls, passed_on)):
                    yield partial(answers_of, chunk, None if only_gathers else memory)

        depth = max(2, self.prefetch // passed_on, threads)
        made = run_ahead(calls(), threads, depth, stop, waiting, begin=current_gpu(), timeout=self.timeout)
        with closing(made) as chunks:
            for answers in chunks:
                yield from self.maker.handed_out(answers, waiting)


def _from_workers(
    loader: DataLoader[Answer], waiting: Timeline, memory: HostMemory | None
) -> Generator[Answer, None, None]:
    since = perf_counter()
    try:
        for answer in _iterators_of_torch.add(started(loader)):
            assert answer.making is not None
            waiting.waited(since, answer.making, instead=answer.making.longest())
            with waiting.here():
                batch = unpack(answer.batch)
                if memory is not None:  # tensors that `pack` cannot pack, such as those with gradients
                    with doing("transfer"):
                        batch = memory.prepare(batch)
            yield replace(answer, batch=batch)
            since = perf_counter()
    except Exception as error:  # noqa: BLE001
        # The traceback has the frame in torch that holds the error and the workers. In this reference cycle, the
        # garbage collector would close the workers' queues before it stops them, and wait 5 s for each worker.
        raise error.with_traceback(None)  # noqa: B904


def _new_stats(loader: Loader, epoch: int, device: torch.device | None, total_batches: int) -> LoaderStats:
    stages = [stage for each in loader.dataset.datasets for stage in each.stages]
    in_use = {
        "no_cache": not loader.dataset.rowstore.row_groups.shared,
        "part": loader._capacity.transient_ahead > 0,  # noqa: SLF001 (of this module)
        "collate_fn": loader.maker.has_collate_fn,
        "text": loader.maker.makes_text,
        "num_workers": bool(loader.num_workers),
        "num_threads": (loader.num_threads or 1) > 1,
        "processes": any(stage.processes for stage in stages),
        "map": bool(stages),
        "pin_memory": device is not None and device.type == "cuda" if loader.pin_memory is None else loader.pin_memory,
    }
    return LoaderStats(
        epoch,
        memory_bytes=loader.dataset.rowstore.row_groups.memory.limit,
        rank=loader.rank_sampler.rank,
        world_size=loader.rank_sampler.num_replicas,
        total_batches=total_batches,
        settings=[name for name, is_used in in_use.items() if is_used],
    )


def _order_text(sampler: RankSampler) -> str:
    orders = dict.fromkeys(_shuffle_text(order) for order in (sampler.order, sampler.next_order))
    shuffle = f", from epoch {sampler.epoch + 1} on ".join(orders)
    return f"{sampler.steps.text}, rank {sampler.rank} of {sampler.num_replicas}; {shuffle}"


def _shuffle_text(order: PositionOrder) -> str:
    windows = few(str(each.window) for each in order.orders)
    return f"shuffle={order.shuffle!r}, window={windows}, seed={order.seed}" if order.shuffle else "shuffle=False"


def _state_at(position: Position) -> dict[str, Any]:
    """Return a state of this position, for this process: with all lists, of which those of a file may be digests."""
    return {**position.state_dict(), **position.options}


def _identity(answer: Any) -> Any:
    return answer

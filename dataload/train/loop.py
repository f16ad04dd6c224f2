"""The training loop: epochs, checkpoints and resuming."""

from __future__ import annotations

import logging
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dataload.catalog.inventory_store import learn
from dataload.errors import ConfigError
from dataload.loader.changes import OnChange, other_version
from dataload.loader.loader import Loader
from dataload.rows.batch_tree import on_device
from dataload.runtime.cached_property import cached_property
from dataload.samplers.position import CHOICE, Position
from dataload.telemetry.spans import stage
from dataload.train.checkpoint.checkpoints import Checkpoints, load
from dataload.train.checkpoint.places import AnyPath
from dataload.train.checkpoint.progress import Progress
from dataload.train.checkpoint.state import all_equal, check_plain, map_leaves, rng_state, set_rng_state, to_meta
from dataload.train.ending import Ending
from dataload.train.epoch_metrics import (
    AVERAGED,
    EpochMetrics,
    first_of_each,
    line_of,
    progress_bar,
    reserved_names,
    scores_of,
    sum_ranks,
)
from dataload.train.loss_monitor import LossMonitor, Where
from dataload.train.modules import evaluating
from dataload.train.optimizer_step import OptimizerStep
from dataload.train.rank_batches import RankBatch, batches_on, even_batches, feed
from dataload.train.ranks.collectives import agree, gather, on_first, process_number, share_buffers
from dataload.train.ranks.process_group import sampler_with
from dataload.train.ranks.sharded import check_replicated, reshard
from dataload.train.tensorboard import TensorBoardWriter
from dataload.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """The part of a checkpoint that the epoch which a run resumes needs.

    Attributes:
        metrics: The arguments of the `EpochMetrics` of this rank, from the part of the epoch before the resume.
        begin: Called when the first batch has arrived.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    begin: Callable[[], None] = lambda: None


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its sampler have for themselves."""
    found = [getattr(each, "generator", None) for each in (loader, sampler_with(loader, "generator"))]
    return [each for each in found if isinstance(each, torch.Generator)]


def _set_epoch(loader: Any, number: int) -> None:
    """Set the epoch of a loader; without a set_epoch of its own, that of its sampler and of its dataset."""
    parts = [loader]
    if not hasattr(loader, "set_epoch"):
        parts = [sampler_with(loader, "set_epoch"), getattr(loader, "dataset", None)]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)


@dataclass
class TrainingLoop:
    """The state of a training run, and its epochs.

    Args:
        model: The model itself, without DDP.
        loader: This rank's batches.
        steps: Runs the optimizer steps.
        world: This rank, and the number of ranks.
        checkpoints: Where the run is saved.
        losses: Checks losses and parameters.
        ending: Ends the run before its last epoch.
        checkpoint_every: Optimizer steps between checkpoints in an epoch; None to save only at the end of an epoch.
        evaluate: Called after each epoch; returns scalars.
        mesh: The data-parallel dimensions of the ranks; None if all ranks are data-parallel.
        stats_dir: Where the loader writes its statistics, see `batches_on`.
        weigh: As for `feed`.
        on_change: As for `fit`.

    Attributes:
        history: The metrics of each finished epoch.
        evaluated: Whether the last epoch in `history` has been evaluated.
        step: Optimizer steps so far.
        tensorboard: Writes metrics on rank 0; None on other ranks.
        traced: Called after each optimizer step.
    """

    model: nn.Module
    loader: Any
    steps: OptimizerStep
    world: World
    checkpoints: Checkpoints
    losses: LossMonitor
    ending: Ending
    checkpoint_every: int | None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None
    mesh: DeviceMesh | None
    stats_dir: Path | None
    weigh: Callable[[Any], float] | None
    on_change: OnChange

    def __post_init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.evaluated, self.step = True, 0
        self.tensorboard: TensorBoardWriter | None = None
        self.traced: Callable[[], None] = lambda: None
        self._rows = 0  # of all ranks, in the pending optimizer step
        self._waited = 0.0  # seconds for batches of this process, without those of the epoch that goes on
        scaler = self.steps.scaler
        parts = {
            "model": self.model,
            "optimizer": self.steps.optimizer,
            "scheduler": self.steps.scheduler,
            "scaler": scaler if scaler.is_enabled() else None,
            "evaluate": self.evaluate if _has_state(self.evaluate) else None,
        }
        self._parts: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        self._even = even_batches(self.loader)
        self._stateful = hasattr(self.loader, "load_state_dict")
        self._generators = [] if self._stateful else _generators_of(self.loader)

    def resume(self, path: AnyPath | None) -> Resumed:
        """Resume from the checkpoint at `path`, of which each rank may have a copy. Do nothing if it is None.

        Raises:
            ConfigError: The checkpoint does not fit this run.
        """
        reshard(self.model)
        if path is None:
            return Resumed()
        self.history, self.step, processes, inventories = load(path, self._parts, Progress.read)
        learn(inventories)
        ranks = first_of_each(processes)
        self.steps.usual_weight = ranks[0]["usual weight"]
        self.evaluated = bool(ranks[0]["so far"])  # Inside an epoch, all earlier epochs have been evaluated.
        self._resume_loader(path, [rank["loader"] for rank in ranks])
        if len(ranks) == self.world.world_size:
            alike = gather(self.world.rank) == [rank for rank, _ in processes]
            own = processes[process_number()][1] if alike else ranks[self.world.rank]
            if own["so far"]:
                # The saved state is from after the loader drew from the generators at the start of its iteration.
                return Resumed(own["so far"], partial(set_rng_state, own["generators"]))
            set_rng_state(own["generators"], self._generators)
        elif self.world.rank == 0 and ranks[0]["so far"]:
            metrics = sum_ranks([rank["so far"] for rank in ranks])
            for name in metrics["counts"].keys() & set(AVERAGED):
                metrics["counts"][name] *= self.world.world_size / len(ranks)
            return Resumed(metrics)
        return Resumed()

    def _resume_loader(self, path: AnyPath, states: list[Any]) -> None:
        if self._stateful != (states[0] is not None):
            raise ConfigError(
                f"{path} does not match this call of fit: only one of the two has the state of a loader; pass such a "
                "loader as that run did, or resume=None"
            )
        if not self._stateful:
            return
        if len(states) != self.world.world_size and not all_equal(states):
            raise ConfigError(
                f"{path} has a different loader state for each of {len(states)} ranks, which no other number of ranks "
                f"can resume: start {len(states)} ranks, not {self.world.world_size}"
            )
        own = states[self.world.rank] if len(states) == self.world.world_size else states[0]
        position = self._of_other_data(path, own)
        if position is None:
            self.loader.load_state_dict(own)
        elif not position.cursor:
            if self.world.rank == 0:
                log.warning("%s is of another dataset: epoch %d begins with this one", path, len(self.history))
        elif self.on_change != "error":
            self.loader.load_state_dict(own, self.on_change)
        elif (other := other_version(position, self.loader.dataset)) is not None:
            raise ConfigError(f"{path} was saved within an epoch of {other}")
        else:
            raise ConfigError(
                f"{path} was saved within an epoch of another dataset: {CHOICE}, or use the files and filters of that "
                "run until this epoch ends, or pass resume= a checkpoint from the end of an epoch, if one is kept: "
                "there data may change"
            )

    def _of_other_data(self, path: AnyPath, state: Any) -> Position | None:
        """Return the position of a state of this package's loader if it is of another dataset than the loader."""
        if not isinstance(self.loader, Loader):
            return None
        try:
            position = Position.from_state(state)
        except ConfigError as error:
            raise ConfigError(f"{path} has the state of another loader: {error}, or pass resume=None") from error
        return None if position.dataset == self.loader.rank_sampler.position.dataset else position

    def run(self, epochs: int, resumed: Resumed, *, show_progress: bool) -> list[dict[str, Any]]:
        """Train until `epochs` epochs are done, those before a resume included. Return the metrics of each.

        The last ones are those of an unfinished epoch if the run has ended in it.
        """
        if self.checkpoints.enabled:  # An error now is better than one at the end of the first epoch.
            states = map_leaves(self._states(), to_meta)
            on_first(lambda: check_plain(states))
            check_replicated(self.model)
        elif self.checkpoint_every is not None and self.world.rank == 0:
            log.warning("checkpoint_every=%d saves nothing without a checkpoint_dir", self.checkpoint_every)
        if finished := self._finished(epochs):
            log.warning(
                "the run is finished, its checkpoint has all %s, so nothing is trained: raise %s to go on; for another "
                "run, pass resume=None or a checkpoint_dir of its own",
                *finished,
            )
        self._first_epoch, self._epochs, self._show = len(self.history), epochs, show_progress
        if self.step and not finished:
            self._say(f"resumed after step {self.step:,}, in epoch {len(self.history)} of {epochs}")
        self._finish_epoch()  # The resumed run may have been killed before it evaluated its last epoch.
        for number in range(len(self.history), epochs):
            if self.ending.ask_signals() or self.ending.is_over(self.step):
                break
            _set_epoch(self.loader, number)
            self._check_data()
            with progress_bar(f"epoch {number} of {epochs}", length_hint(self.loader), show_progress) as advance:
                unfinished = self._epoch(number, advance, resumed)
            resumed = Resumed()
            if unfinished:
                self._tell(unfinished)
                self._tell_of_end(number)
                return [*self.history, unfinished]
            self._finish_epoch()
            if self.ending.ask(self.step):
                break
        if self.ending.ask_signals() or (self.ending.reason and len(self.history) < epochs):
            self._tell_of_end(len(self.history))
        return self.history

    def _tell(self, record: Mapping[str, Any]) -> None:
        """Tell of an epoch in one line."""
        unfinished = " (unfinished)" if "unfinished" in record else ""
        figures = line_of(record, reserved_names(self.loader))
        self._say(f"epoch {record['epoch']} of {self._epochs}{unfinished}: {figures}")

    def _say(self, line: str) -> None:
        """Say what rank 0 does: on standard error if there is a progress bar, otherwise in the log."""
        if self.world.rank:
            return
        if self._show:
            print(line, file=sys.stderr, flush=True)  # noqa: T201
        else:
            log.info("%s", line)

    def _tell_of_end(self, number: int) -> None:
        if self.world.rank:
            return
        call = "a call with a larger max_steps" if self.ending.is_over(self.step) else "the same call"
        if not self.checkpoints.enabled:
            saved = "nothing is saved without a checkpoint_dir"
        elif not self.step:
            saved = f"{call} begins"
        elif number == self._epochs:
            saved = "all epochs are trained" + ("" if self.evaluated else f", and {call} evaluates the last one")
        elif number == len(self.history) and not self._stateful:
            saved = f"{call} begins again with epoch {number}, because the loader has no state_dict"
        else:
            saved = f"{call} goes on from {self.checkpoints.folder}"
        place = f"in epoch {number}" if number < self._epochs else "the last one"
        log.warning("%s has ended the run after step %d, %s: %s", self.ending.reason, self.step, place, saved)

    def _finished(self, epochs: int) -> tuple[str, str] | None:
        """Return what a resumed run has done already, and the argument that says so; None: there is more to do."""
        if self.world.rank or not self.step:
            return None
        if len(self.history) >= epochs > 0:
            return f"{len(self.history)} epochs", "epochs"
        if self.ending.is_over(self.step):
            return f"{self.step} steps", "max_steps"
        return None

    def _check_data(self) -> None:
        """Raise ConfigError if the ranks read different snapshots, such as after a refresh."""
        if isinstance(self.loader, Loader):
            len(self.loader)  # It follows a refresh.
            agree("the dataset's order_key", self.loader.dataset.order_key)

    def _epoch(self, number: int, advance: Callable[[], None], resumed: Resumed) -> dict[str, Any] | None:
        """Train on the rest of the epoch and save a checkpoint. Call `advance` after each batch.

        Returns:
            The metrics of the epoch if the run has ended within it.
        """
        with self._annotate_errors(number):
            tally, is_whole = self._train(number, advance, resumed)
            if not is_whole:
                return self._record(number, tally) | {"unfinished": True}
            # Running statistics differ between ranks; the checkpoint and evaluation use those of rank 0.
            share_buffers(self.model, self.mesh, self.steps.exchange.ignored)
            self.history.append(self._record(number, tally))
            self.evaluated = False
            self._save({}, self.loader.state_dict() if self._stateful else None)
            return None

    def _record(self, number: int, tally: EpochMetrics) -> dict[str, Any]:
        return {"epoch": number, "loss": math.nan, **tally.figures(self.loader, self.world.rank)}

    def _finish_epoch(self) -> None:
        """Evaluate and log the last epoch, unless done. It has a checkpoint, so a failed evaluation loses nothing.

        After a signal, the next run does so.
        """
        if self.evaluated or self.ending.ask_signals():
            return
        record = self.history[-1]
        if self.evaluate is not None:
            with (
                self._annotate_errors(record["epoch"]),
                evaluating(self.model),
                torch.no_grad(),
                self.steps.autocast(cached=False),  # `evaluate` may load other weights.
                stage("evaluate"),
            ):
                scores = scores_of(self.evaluate(self.model))
            record |= {f"evaluate.{name}" if name in record else name: value for name, value in scores.items()}
        if self.tensorboard is not None:
            self.tensorboard.epoch(record, self.step)
        self._tell(record)
        self.evaluated = True

    @contextmanager
    def _annotate_errors(self, epoch: int) -> Iterator[None]:
        """Add a note with rank, epoch and step to an exception that leaves the block."""
        try:
            yield
        except Exception as error:
            error.add_note(f"rank {self.world.rank} of {self.world.world_size}, epoch {epoch}, step {self.step}")
            raise

    def _train(self, number: int, advance: Callable[[], None], resumed: Resumed) -> tuple[EpochMetrics, bool]:
        """Train on the rest of the epoch. Return its metrics, and whether it is whole."""
        tally = EpochMetrics(**resumed.metrics)
        self._waited -= tally.counts["wait_seconds"]  # those before the resume
        self.steps.optimizer.zero_grad()
        before = tally.counts["sync_seconds"]
        progress = {"step": self.step, "accumulate": self.steps.accumulate}
        batches = batches_on(self.loader, self.steps.device, self.stats_dir, self.checkpoints.ledger_folder, progress)
        replay = self.replay
        begin = partial(self._begin, resumed, number)
        for fed in feed(batches, tally.counts, self.world, self._even, self._state, begin, self.mesh, self.weigh):
            self._take(fed, tally, Where(number, self.step + 1, replay))
            if isinstance(self.loader, Loader):
                self.loader.stats().sync_seconds = tally.counts["sync_seconds"] - before
            advance()
            if self.steps.pending or fed.last:
                continue
            is_due = self.checkpoint_every is not None and self.step % self.checkpoint_every == 0
            started = perf_counter()
            ends = self.ending.ask(self.step)  # where ranks may wait for each other
            tally.counts["sync_seconds"] += perf_counter() - started
            if not (is_due or ends):
                continue
            self._check_finite(number)
            # A rank without further batches could not resume this epoch: its loader is at the next one.
            if can_save := not fed.ending and fed.state is not None:
                share_buffers(self.model, self.mesh, self.steps.exchange.ignored)
                self._save(tally.state(), fed.state)
            if ends and (can_save or not self._saves_within_epochs):
                return tally, False
        self._check_finite(number)
        self._waited += tally.counts["wait_seconds"]
        return tally, True

    def _state(self) -> Any:
        """Return the state of the loader, if a checkpoint may need it after the batch that comes now."""
        # That of other loaders may take long.
        due = self.checkpoint_every or isinstance(self.loader, Loader) or self.ending.may_be_near(self.step)
        return self.loader.state_dict() if self._saves_within_epochs and due else None

    @property
    def _saves_within_epochs(self) -> bool:
        return self._stateful and self.checkpoints.enabled

    @property
    def replay(self) -> str:
        """The folder of the run's ledger, for a command; "": there is none."""
        if not isinstance(self.loader, Loader):
            return ""
        folder = self.loader.stats_dir or self.stats_dir or self.checkpoints.ledger_folder
        return "" if folder is None else shlex.quote(str(folder))

    def _begin(self, resumed: Resumed, number: int) -> None:
        """End the resume. In the first epoch, check the loader's state, which it may have only within its iteration."""
        if number == self._first_epoch and self._stateful and self.checkpoints.enabled:
            state = map_leaves({"loader": self.loader.state_dict()}, to_meta)
            on_first(lambda: check_plain(state))
        resumed.begin()

    def _check_finite(self, number: int) -> None:
        self.losses.settle()
        self.losses.check_parameters(self.model, f"epoch {number}, step {self.step}")

    def _take(self, fed: RankBatch, tally: EpochMetrics, where: Where) -> None:
        with stage("copy to device"):
            batch = on_device(fed.batch, self.steps.device)
        before = self.steps.sync_seconds
        loss, scalars = self.steps.add(batch, fed.weight, fed.all_weight, last=fed.last)
        tally.counts["sync_seconds"] += self.steps.sync_seconds - before
        self._check_names(scalars)
        if fed.weight:  # The mean over nothing is NaN.
            self.losses.add(loss, where)
        tally.add({**scalars, "loss": loss}, fed.rows, fed.weight)
        self._rows += fed.all_rows
        if self.steps.pending:
            return
        rows, self._rows = self._rows, 0
        self.step += 1
        if "scaler" in self._parts:
            tally.counts["skipped_steps"] += self.steps.skipped
        self.traced()
        if self.tensorboard is not None:
            lr = self.steps.optimizer.param_groups[0]["lr"]
            waited = self._waited + tally.counts["wait_seconds"]
            self.tensorboard.step(self.step, self.losses.latest, lr, rows, waited)

    def _check_names(self, scalars: Mapping[str, Any]) -> None:
        if taken := self._reserved.intersection(scalars.keys()):
            raise ConfigError(
                f"loss_fn logs {', '.join(map(repr, sorted(taken)))}, but an epoch's dict has its own value of this "
                f"name: rename the scalar. Reserved names are {', '.join(sorted(self._reserved))}"
            )

    @cached_property
    def _reserved(self) -> set[str]:
        return reserved_names(self.loader)

    def _save(self, metrics: dict[str, Any], loader_state: Any) -> None:
        """Save a checkpoint. `metrics` are those of the unfinished epoch; empty at the end of an epoch."""
        if not self.checkpoints.enabled:
            return
        with stage("checkpoint"):
            own = {"generators": rng_state(self._generators), "so far": metrics, "loader": loader_state}
            own["usual weight"] = self.steps.usual_weight
            if isinstance(self.loader, Loader):
                self.loader.seal()
            inventories = self.loader.inventories() if metrics and isinstance(self.loader, Loader) else {}
            progress = Progress(self.history, self.step, gather((self.world.rank, own)), inventories)
            self.checkpoints.save(self._states(), progress._asdict())

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

"""A training run: where it is, how it goes on, and what it leaves behind for the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataload.errors import ConfigError
from dataload.rows.collate import map_tensors
from dataload.runtime.cached_property import cached_property
from dataload.telemetry.spans import stage
from dataload.train.checkpoint import Checkpoints, load
from dataload.train.distributed import agree, gather, share_buffers
from dataload.train.epoch_metrics import AVERAGED, EpochMetrics, reserved_names, sum_ranks
from dataload.train.loss_monitor import LossMonitor
from dataload.train.module_modes import evaluating
from dataload.train.optimizer_step import OptimizerStep
from dataload.train.rank_batches import RankBatch, feed
from dataload.train.rng_state import rng_state, set_rng_state
from dataload.train.state_tree import all_equal
from dataload.train.tensorboard import TensorBoardWriter
from dataload.world import World


@dataclass
class TrainingLoop:
    """even: all ranks' loaders are known to have equally many batches of equally many rows. traced: called after each
    step.

    Attributes: history, of the epochs done; evaluated, whether the last of them is; step, how many optimizer steps were
    begun.
    """

    model: nn.Module
    loader: Any
    steps: OptimizerStep
    world: World
    checkpoints: Checkpoints
    losses: LossMonitor
    even: bool = True
    checkpoint_every: int | None = None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    tensorboard: TensorBoardWriter | None = None
    traced: Callable[[], None] = lambda: None
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluated: bool = True
    step: int = 0

    def __post_init__(self) -> None:
        self._so_far: dict[str, Any] = {}  # what an epoch begun by another process has come to, on this rank
        self._begun: Callable[[], None] = lambda: None
        self._rows = 0  # of all ranks, in the step begun
        scaler = self.steps.scaler
        parts = {
            "model": self.model,
            "optimizer": self.steps.optimizer,
            "scheduler": self.steps.scheduler,
            "scaler": scaler if scaler.is_enabled() else None,
        }
        self._parts: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        self._stateful = hasattr(self.loader, "load_state_dict")

    def resume(self, path: Path | None) -> None:
        """Goes on from the checkpoint at `path`; the same on all ranks."""
        agree("the checkpoint to go on from", None if path is None else str(path))
        if path is None:
            return
        rest = load(path, self._parts)
        self.history, self.step, ranks = rest["history"], rest["step"], rest["ranks"]
        self.evaluated = bool(ranks[0]["so far"])  # an epoch begun: those before it are done with
        self._resume_loader(path, [rank["loader"] for rank in ranks])
        if len(ranks) == self.world.world_size:
            own = ranks[self.world.rank]
            self._so_far = own["so far"]
            if self._so_far:
                # A loader may draw from the generators when it begins to be iterated, as it had before they were saved.
                self._begun = partial(set_rng_state, own["generators"])
            else:
                set_rng_state(own["generators"])
        elif self.world.rank == 0 and ranks[0]["so far"]:
            self._so_far = sum_ranks([rank["so far"] for rank in ranks])
            for name in self._so_far["counts"].keys() & set(AVERAGED):
                self._so_far["counts"][name] *= self.world.world_size / len(ranks)

    def _resume_loader(self, path: Path, states: list[Any]) -> None:
        if self._stateful != (states[0] is not None):
            raise ConfigError(f"{path} does not match this call of fit: only one of the two has the state of a loader")
        if not self._stateful:
            return
        own = states[self.world.rank] if len(states) == self.world.world_size else states[0]
        if len(states) != self.world.world_size and not all_equal(states):
            raise ConfigError(
                f"{path}: each of {len(states)} ranks had a loader in a state of its own, and no other number of ranks "
                f"can go on with those: start {len(states)} ranks, not {self.world.world_size}"
            )
        self.loader.load_state_dict(own)

    def epoch(self, number: int, advance: Callable[[], None]) -> None:
        """Trains on what is left of the epoch, and saves; calls `advance` after each batch."""
        with self._noted(number):
            self._train(number, advance)
            share_buffers(self.model)  # running statistics differ between ranks; from here on nobody sees that
            self.history.append({"epoch": number, **self._tally.figures(self.loader)})
            self.evaluated = False
            self._save({}, self.loader.state_dict() if self._stateful else None)

    def conclude(self) -> None:
        """Evaluates the last epoch, once: after it was saved, so that an evaluation that fails loses nothing."""
        if self.evaluated:
            return
        record = self.history[-1]
        if self.evaluate is not None:
            with self._noted(record["epoch"]), evaluating(self.model), torch.no_grad(), stage("evaluate"):
                found = {name: float(value) for name, value in self.evaluate(self.model).items()}
            record |= {f"evaluate.{name}" if name in record else name: value for name, value in found.items()}
        if self.tensorboard is not None:
            self.tensorboard.epoch(record, self.step)
        self.evaluated = True

    @contextmanager
    def _noted(self, epoch: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"rank {self.world.rank} of {self.world.world_size}, epoch {epoch}, step {self.step}")
            raise

    def _train(self, number: int, advance: Callable[[], None]) -> None:
        tally = self._tally = EpochMetrics(**self._so_far)
        self._so_far = {}
        self.steps.optimizer.zero_grad()
        state_of = self.loader.state_dict if self.checkpoint_every else lambda: None
        for fed in feed(self.loader, tally.counts, self.world, self.even, state_of, self._begun):
            self._take(fed, tally, f"epoch {number}, step {self.step + 1}")
            due = self.checkpoint_every and not self.steps.pending and self.step % self.checkpoint_every == 0
            if due and not fed.last:
                self._settle(number)
                share_buffers(self.model)
                self._save(tally.state(), fed.state)
            advance()
        self._begun = lambda: None
        self._settle(number)

    def _settle(self, number: int) -> None:
        self.losses.settle()
        self.losses.look_at(self.model, f"epoch {number}, step {self.step}")

    def _take(self, fed: RankBatch, tally: EpochMetrics, where: str) -> None:
        with stage("copy to device"):
            batch = map_tensors(fed.batch, lambda tensor: tensor.to(self.steps.device, non_blocking=True))
        loss, scalars = self.steps.add(batch, fed.rows, fed.all_rows, last=fed.last)
        self._check_names(scalars)
        self.losses.add(loss, where)
        tally.add({**scalars, "loss": loss}, fed.rows)
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
            self.tensorboard.step(self.step, self.losses.latest, lr, rows, tally.counts["wait_seconds"])

    def _check_names(self, scalars: Mapping[str, Any]) -> None:
        if taken := self._reserved.intersection(scalars.keys()):
            raise ConfigError(
                f"loss_fn logs {', '.join(map(repr, sorted(taken)))}, but the epoch's dict has figures of that name: "
                f"rename the scalar. Reserved are {', '.join(sorted(self._reserved))}"
            )

    @cached_property
    def _reserved(self) -> set[str]:
        return reserved_names(self.loader)

    def _save(self, so_far: dict[str, Any], loader_state: Any) -> None:
        """so_far: of the epoch that goes on."""
        if not self.checkpoints.enabled:
            return
        with stage("checkpoint"):
            states = {name: part.state_dict() for name, part in self._parts.items()}
            ranks = gather({"generators": rng_state(), "so far": so_far, "loader": loader_state})
            self.checkpoints.save(states, {"history": self.history, "step": self.step, "ranks": ranks})

"""A training run: where it is, how it goes on, and what it leaves behind for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataload.batch import map_tensors
from dataload.checkpoint import Checkpoints, generators, load, set_generators
from dataload.distributed import agree, gather, share_buffers
from dataload.feed import Fed, feed
from dataload.figures import Scalars, Tally
from dataload.losses import Losses
from dataload.stages import stage
from dataload.steps import Steps
from dataload.world import World


@dataclass
class Run:
    """even: all ranks' loaders have equally many batches. traced: called after each step.

    Attributes: history, of the epochs done; step, how many optimizer steps were begun.
    """

    model: nn.Module
    loader: Any
    steps: Steps
    world: World
    checkpoints: Checkpoints
    losses: Losses
    even: bool = True
    checkpoint_every: int | None = None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    scalars: Scalars | None = None
    traced: Callable[[], None] = lambda: None
    history: list[dict[str, Any]] = field(default_factory=list)
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
            "loader": self.loader if hasattr(self.loader, "load_state_dict") else None,
        }
        self._parts: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}

    def resume(self, path: Path | None) -> None:
        """Goes on from the checkpoint at `path`; the same on all ranks."""
        agree("the checkpoint to go on from", None if path is None else str(path))
        if path is None:
            return
        rest = load(path, self._parts)
        self.history, self.step, ranks = rest["history"], rest["step"], rest["ranks"]
        if len(ranks) == self.world.world_size:
            own = ranks[self.world.rank]
            self._so_far = own["so far"]
            if self._so_far:
                # A loader may draw from the generators when it begins to be iterated, as it had before they were saved.
                self._begun = partial(set_generators, own["generators"])
            else:
                set_generators(own["generators"])
        elif self.world.rank == 0 and ranks[0]["so far"]:
            self._so_far = _added([rank["so far"] for rank in ranks], self.world.world_size)

    def epoch(self, number: int, advance: Callable[[], None]) -> None:
        """Trains on what is left of the epoch, evaluates and saves; calls `advance` after each batch."""
        try:
            self._train(number, advance)
            self._conclude(number)
        except Exception as error:
            error.add_note(f"rank {self.world.rank} of {self.world.world_size}, epoch {number}, step {self.step}")
            raise

    def _train(self, number: int, advance: Callable[[], None]) -> None:
        tally = self._tally = Tally(**self._so_far)
        self._so_far = {}
        self.model.train()
        self.steps.optimizer.zero_grad()
        state_of = self.loader.state_dict if self.checkpoint_every else lambda: None
        for fed in feed(self.loader, tally.counts, self.world, self.even, state_of, self._begun):
            self._take(fed, tally, f"epoch {number}, step {self.step + 1}")
            due = self.checkpoint_every and not self.steps.pending and self.step % self.checkpoint_every == 0
            if due and not fed.last:
                self.losses.settle()
                share_buffers(self.model)
                self._save(tally.state(), fed.state)
            advance()
        self._begun = lambda: None
        self.losses.settle()

    def _conclude(self, number: int) -> None:
        share_buffers(self.model)  # running statistics differ between ranks; from here on nobody sees that
        record = {"epoch": number, **self._tally.figures(self.loader)}
        if self.evaluate is not None:
            self.model.eval()
            with torch.no_grad(), stage("evaluate"):
                record |= {name: float(value) for name, value in self.evaluate(self.model).items()}
        self.history.append(record)
        if self.scalars is not None:
            self.scalars.epoch(record, self.step)
        self._save({}, self.loader.state_dict() if "loader" in self._parts else None)

    def _take(self, fed: Fed, tally: Tally, where: str) -> None:
        with stage("copy to device"):
            batch = map_tensors(fed.batch, lambda tensor: tensor.to(self.steps.device, non_blocking=True))
        loss, scalars = self.steps.add(batch, fed.rows, fed.all_rows, last=fed.last)
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
        if self.scalars is not None:
            lr = self.steps.optimizer.param_groups[0]["lr"]
            self.scalars.step(self.step, self.losses.latest, lr, rows, tally.counts["wait_seconds"])

    def _save(self, so_far: dict[str, Any], loader_state: Any) -> None:
        """so_far: of the epoch that goes on."""
        if not self.checkpoints.wanted:
            return
        with stage("checkpoint"):
            states = {name: part.state_dict() for name, part in self._parts.items() if name != "loader"}
            if "loader" in self._parts:
                states["loader"] = loader_state
            ranks = gather({"generators": generators(), "so far": so_far})
            self.checkpoints.save(states, {"history": self.history, "step": self.step, "ranks": ranks})


def _added(ranks: list[dict[str, dict[str, float]]], world_size: int) -> dict[str, dict[str, float]]:
    """What the ranks of another world had come to, as one rank's share of what `world_size` ranks have."""
    total = {
        kind: {name: sum(rank[kind].get(name, 0.0) for rank in ranks) for rank_ in ranks for name in rank_[kind]}
        for kind in ("sums", "counts")
    }
    for name in ("seconds", "wait_seconds"):  # which are averaged over ranks
        total["counts"][name] *= world_size / len(ranks)
    return total

"""The training loop: torch's own DDP, autocast, GradScaler and checkpoint file, put together in the right order."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataload.errors import ConfigError
from dataload.world import World

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKPOINT = "checkpoint.pt"
# What a loader's stats() may count besides rows and time; the history holds the sums over ranks.
TRAFFIC = ("hits", "misses", "bytes_local", "bytes_cluster", "bytes_origin", "requests_origin")

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]
History = list[dict[str, Any]]


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    loss_fn: LossFn,
    *,
    epochs: int,
    precision: str = "bf16",
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    scheduler: Any = None,
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = "auto",
    device: torch.device | str | None = None,
    progress: bool = True,
) -> History:
    """Train `model` in place until `epochs` epochs are done; returns one dict per epoch, those before a resume too.

    Under torchrun (or any launcher's environment) the ranks train together by DDP, on `cuda:LOCAL_RANK` over NCCL or
    on the CPU over gloo. A process group that nobody has started is started here and ended here, come what may.

    loss_fn(model, batch): a scalar tensor, the mean over the batch's rows; or it and a dict of scalars to log. A batch
        is a dict (or tuple, or list) whose tensors are on the device.
    precision: autocast to "bf16" or "fp16" (with the loss scaled), or "fp32" for none.
    accumulate: batches per optimizer step, their gradients averaged; an epoch's last step averages what is left.
    clip_grad_norm: limit on the norm of the averaged gradients.
    scheduler: its step() is called after every optimizer step, not after every epoch.
    evaluate(model): called on every rank after each epoch, in eval mode and without gradients; its scalars join the
        history as this rank returned them (`evaluate_over` returns the same on every rank).
    checkpoint_dir: a folder that all ranks see; it gets one file, replaced as a whole at each epoch's end.
    resume: "auto" goes on from `checkpoint_dir` if a checkpoint is there, None starts anew, a path must exist. Random
        generators go on as well when the world size is the same.

    An epoch's dict: epoch; loss and logged scalars, averaged over all ranks' rows; rows of all ranks; seconds;
    rows_per_second; wait_seconds for batches, averaged over ranks; stall_fraction; counts of the loader's stats; what
    `evaluate` returned.

    Raises ConfigError for arguments that cannot work, and when ranks see different data or different checkpoints.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
    if accumulate < 1:
        raise ConfigError(f"accumulate={accumulate}: an optimizer step takes at least 1 batch")
    world = World.detect()
    device = _device(world, device)
    with _process_group(world, device):
        _agree("the dataset's fingerprint", getattr(getattr(loader, "dataset", None), "fingerprint", None))
        _agree("len(loader)", _length(loader))
        scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        parallel = _parallel(model.to(device), world, device)
        steps = _Steps(parallel, optimizer, scaler, scheduler, loss_fn, device, precision, accumulate, clip_grad_norm)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        parts["scaler"] = scaler if scaler.is_enabled() else None
        parts["loader"] = loader if hasattr(loader, "load_state_dict") else None
        parts = {name: part for name, part in parts.items() if part is not None}
        history = _load(parts, checkpoint_dir, resume, world)
        for epoch in range(len(history), epochs):
            _set_epoch(loader, epoch)
            with _bar(f"epoch {epoch + 1}/{epochs}", _length(loader), shown=progress and world.rank == 0) as advance:
                record = {"epoch": epoch, **steps.epoch(loader, advance)}
            if evaluate is not None:
                with _evaluating(model):
                    record |= {name: float(value) for name, value in evaluate(model).items()}
            history.append(record)
            if checkpoint_dir is not None:
                _save(parts, Path(checkpoint_dir), history, world)
    return history


def evaluate_over(
    model: nn.Module, loader: Iterable[Any], metric_fn: Callable[[nn.Module, Any], Mapping[str, Any]]
) -> dict[str, float]:
    """Sums of metric_fn over every row of `loader` on all ranks, each row once; the same dict on every rank.

    metric_fn(model, batch): a dict of sums over the batch's rows, such as {"correct": …, "rows": …}. This rank's last
    `loader.padding` rows, repeats that make the ranks' counts equal, are cut off before it sees them.

    With several ranks, call it on every one, from fit's `evaluate`. Raises ConfigError when the loader cannot say its
    padding, when padded columns have no common length to cut, or when no process group is there.
    """
    if World.detect().world_size > 1 and not (dist.is_initialized() and hasattr(loader, "padding")):
        raise ConfigError("evaluate_over needs a process group and a loader with `padding` to count each row once")
    device = next(model.parameters()).device
    padding, sums = getattr(loader, "padding", 0), _Sums()
    with _evaluating(model):
        for batch, last in _Feed(loader):
            kept = _without_last_rows(batch, padding) if last and padding else batch
            if _num_rows(kept):
                sums.add(metric_fn(model, _move(kept, device)))
    return _add(_gather(sums.floats()))


@dataclass
class _Steps:
    """One epoch: forward, backward and optimizer steps. `model` is what loss_fn sees: wrapped by DDP if ranks share."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    scheduler: Any
    loss_fn: LossFn
    device: torch.device
    precision: str
    accumulate: int
    clip_grad_norm: float | None

    def epoch(self, loader: Iterable[Any], advance: Callable[[], None]) -> dict[str, Any]:
        """Trains on all that `loader` gives; returns the epoch's figures over all ranks."""
        self.model.train()
        self.optimizer.zero_grad()
        feed, sums, num_rows, gathered = _Feed(loader), _Sums(), 0, 0
        started = time.perf_counter()
        for batch, last in feed:
            gathered += 1
            full = last or gathered == self.accumulate
            scalars, rows = self.backward(_move(batch, self.device), full), _num_rows(batch)
            sums.add(scalars, weight=rows)
            num_rows += rows
            if full:
                self.step(gathered)
                gathered = 0
            advance()
        own = sums.floats()  # on a GPU this waits for the epoch's last kernel, so the time below is whole
        seconds = time.perf_counter() - started
        return _figures(own, num_rows, seconds, feed.wait_seconds, _traffic(loader))

    def backward(self, batch: Any, full: bool) -> dict[str, Any]:
        """Adds the batch's gradients, over all ranks if the step's batches are full; returns loss and logged scalars."""
        dtype = PRECISIONS[self.precision]
        alone = isinstance(self.model, DistributedDataParallel) and not full
        with (
            self.model.no_sync() if alone else nullcontext(),
            torch.autocast(self.device.type, dtype, enabled=dtype is not None),
        ):
            result = self.loss_fn(self.model, batch)
            loss, scalars = result if isinstance(result, tuple) else (result, {})
            self.scaler.scale(loss / self.accumulate).backward()
        return {**scalars, "loss": loss}

    def step(self, gathered: int) -> None:
        """One optimizer step on the mean of `gathered` batches' gradients, which came divided by `accumulate`."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gathered < self.accumulate:
            for parameter in parameters:
                parameter.grad.mul_(self.accumulate / gathered)
        if self.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale  # fp16 gradients overflowed: no step was made
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()

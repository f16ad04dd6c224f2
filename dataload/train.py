"""The training loop: torch's own DDP, autocast, GradScaler and checkpoint file, put together in the right order."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataload.batch import Flat, map_tensors
from dataload.checkpoint import CHECKPOINT, load, save
from dataload.distributed import agree, device_of, gather, process_group
from dataload.errors import ConfigError
from dataload.world import World

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a loader's stats() may count besides rows and time.
TRAFFIC = ("hits", "misses", "bytes_local", "bytes_cluster", "bytes_origin", "requests_origin")
LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]


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
) -> list[dict[str, Any]]:
    """Train `model` in place until `epochs` epochs are done; returns one dict per epoch, those before a resume too.

    Under torchrun (or any launcher's environment) the ranks train together by DDP, on `cuda:LOCAL_RANK` over NCCL or
    on the CPU over gloo. A process group that nobody has started is started here and ended here, come what may.

    loss_fn(model, batch): the mean loss over the batch's rows, a scalar tensor; or it and a dict of scalars to log.
        A batch is a dict (or tuple, or list) whose tensors are on the device.
    precision: autocast to "bf16" or "fp16" (with the loss scaled), or "fp32" for none.
    accumulate: batches per optimizer step, their gradients averaged; an epoch's last step averages what is left.
    clip_grad_norm: limit on the norm of the averaged gradients.
    scheduler: its step() is called after every optimizer step, not after every epoch.
    evaluate(model): called on every rank after each epoch, in eval mode and without gradients; returns scalars.
    checkpoint_dir: a folder that all ranks see; it gets one file, replaced as a whole at each epoch's end.
    resume: "auto" goes on from `checkpoint_dir` if a checkpoint is there, None starts anew, a path must exist. Random
        generators go on too when the world size is the same.

    An epoch's dict: epoch; loss and logged scalars, averaged over all ranks' rows; rows of all ranks; seconds and
    wait_seconds (for batches), averaged over ranks; rows_per_second; stall_fraction; what the loader's stats count,
    summed over ranks; what `evaluate` returned on this rank.

    Raises ConfigError for arguments that cannot work, and when ranks see different data or different checkpoints.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
    if accumulate < 1:
        raise ConfigError(f"accumulate={accumulate}: an optimizer step takes at least 1 batch")
    world = World.detect()
    device = device_of(world, device)
    with process_group(world, device):
        agree("the dataset's fingerprint", getattr(getattr(loader, "dataset", None), "fingerprint", None))
        agree("len(loader)", _length(loader))
        scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        stateful = {
            "model": model.to(device),
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler if scaler.is_enabled() else None,
            "loader": loader if hasattr(loader, "load_state_dict") else None,
        }
        parts = {name: part for name, part in stateful.items() if part is not None}
        history = load(parts, checkpoint_dir, resume, world)
        shared = _shared(model, device) if world.world_size > 1 else model
        steps = _Steps(shared, optimizer, scaler, scheduler, loss_fn, device, precision, accumulate, clip_grad_norm)
        for epoch in range(len(history), epochs):
            ordered: Any = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
            if hasattr(ordered, "set_epoch"):
                ordered.set_epoch(epoch)
            with _bar(f"epoch {epoch + 1}/{epochs}", _length(loader), progress and world.rank == 0) as advance:
                record = {"epoch": epoch, **steps.epoch(loader, advance)}
            if evaluate is not None:
                model.eval()
                with torch.no_grad():
                    record |= {name: float(value) for name, value in evaluate(model).items()}
            history.append(record)
            if checkpoint_dir is not None:
                save(parts, history, Path(checkpoint_dir, CHECKPOINT), world)
    return history


@dataclass
class _Steps:
    """Forward, backward and optimizer steps. `model` is what loss_fn sees: wrapped in DDP if there are other ranks."""

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
        counts: defaultdict[str, float] = defaultdict(float)
        sums: defaultdict[str, Any] = defaultdict(float)  # over rows; tensors, so that no step waits for the device
        pending, started = 0, time.perf_counter()
        for batch, last in _feed(loader, counts):
            pending += 1
            full = last or pending == self.accumulate
            rows = _num_rows(batch)
            for name, value in self.backward(map_tensors(batch, self._put), full).items():
                sums[name] += torch.as_tensor(value).detach().double() * rows
            counts["rows"] += rows
            if full:
                self.step(pending)
                pending = 0
            advance()
        done = {name: float(total) for name, total in sums.items()}  # on a GPU this waits for the last kernel
        counts["seconds"] = time.perf_counter() - started
        if not counts["rows"]:
            raise ConfigError("the loader gave no batch: fewer rows than one global batch, or an iterator used up")
        return _figures(done, counts, loader)

    def backward(self, batch: Any, full: bool) -> dict[str, Any]:
        """Adds the batch's gradients, averaged over ranks once the step is full; returns loss and logged scalars."""
        waits = isinstance(self.model, DistributedDataParallel) and not full
        sync = self.model.no_sync() if waits else nullcontext()  # type: ignore[operator]
        dtype = PRECISIONS[self.precision]
        with sync, torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            result = self.loss_fn(self.model, batch)
            loss, scalars = result if isinstance(result, tuple) else (result, {})
            torch.autograd.backward(self.scaler.scale(loss / self.accumulate))
        return {**scalars, "loss": loss}

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def step(self, pending: int) -> None:
        """One optimizer step on `pending` batches, each of which added its gradients divided by `accumulate`."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters if pending < self.accumulate else ():
            parameter.grad *= self.accumulate / pending
        if self.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        overflowed = self.scaler.get_scale() < scale  # fp16 only: the optimizer made no step
        if self.scheduler is not None and not overflowed:
            self.scheduler.step()
        self.optimizer.zero_grad()


def _feed(loader: Iterable[Any], counts: dict[str, float]) -> Iterator[tuple[Any, bool]]:
    """Each batch and whether it is the last; adds the time spent waiting for the loader to counts["wait_seconds"]."""
    end, started = object(), time.perf_counter()
    batches = iter(loader)
    ahead = next(batches, end)
    counts["wait_seconds"] += time.perf_counter() - started
    while ahead is not end:
        batch, started = ahead, time.perf_counter()
        ahead = next(batches, end)
        counts["wait_seconds"] += time.perf_counter() - started
        yield batch, ahead is end


def _figures(sums: dict[str, float], counts: dict[str, float], loader: Any) -> dict[str, Any]:
    """An epoch's figures over all ranks from this rank's sums over rows, counts and loader."""
    stats = loader.stats() if hasattr(loader, "stats") else None
    get = getattr(stats, "get", lambda name: getattr(stats, name, None))
    traffic = {name: int(count) for name in TRAFFIC if (count := get(name)) is not None}
    ranks = gather({**sums, **traffic, **counts})
    total = {name: sum(rank.get(name, 0) for rank in ranks) for name in ranks[0]}
    rows = int(total["rows"])
    return {
        **{name: total[name] / rows for name in sums},
        "rows": rows,
        "seconds": total["seconds"] / len(ranks),
        "rows_per_second": rows * len(ranks) / total["seconds"],
        "wait_seconds": total["wait_seconds"] / len(ranks),
        "stall_fraction": total["wait_seconds"] / total["seconds"],
        **{name: total[name] for name in traffic},
    }


def _shared(model: nn.Module, device: torch.device) -> nn.Module:
    shared = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    # Attributes are freed in this order. Were DDP's reducer the last to hold the group, it would join gloo's threads
    # without giving up the GIL that they wait for, and hang.
    shared.group = dist.group.WORLD  # type: ignore[assignment]
    return shared


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable without a length
        return None


@contextmanager
def _bar(title: str, total: int | None, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar; gives what to call after each batch. Off a terminal rich writes one plain line at the end."""
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _num_rows(batch: Any) -> int:
    columns = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    sizes = [column.offsets[1:] if isinstance(column, Flat) else column for column in columns]
    return min(len(size) for size in sizes if not isinstance(size, Tensor) or size.ndim)

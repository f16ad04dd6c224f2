"""The training loop: torch's own DDP, autocast, GradScaler and checkpoint file, put together in the right order."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import defaultdict
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
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from dataload.batch import Flat, map_tensors
from dataload.errors import ConfigError
from dataload.world import World

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKPOINT = "checkpoint.pt"
# What a loader's stats() may count besides rows and time.
TRAFFIC = ("hits", "misses", "bytes_local", "bytes_cluster", "bytes_origin", "requests_origin")
_GROUPS = itertools.count()  # process groups started so far, the same number on every rank
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
    device = _device(world, device)
    with _process_group(world, device):
        _agree("the dataset's fingerprint", getattr(getattr(loader, "dataset", None), "fingerprint", None))
        _agree("len(loader)", _length(loader))
        scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        stateful = {
            "model": model.to(device),
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler if scaler.is_enabled() else None,
            "loader": loader if hasattr(loader, "load_state_dict") else None,
        }
        parts = {name: part for name, part in stateful.items() if part is not None}
        history = _load(parts, checkpoint_dir, resume, world)
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
                _save(parts, history, Path(checkpoint_dir, CHECKPOINT), world)
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
    ranks = _gather({**sums, **traffic, **counts})
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


def _load(parts: dict[str, Any], folder: Any, resume: Any, world: World) -> list[dict[str, Any]]:
    """Restores `parts` and this rank's generators; returns the history so far. Nothing but plain data is unpickled."""
    place = folder if resume == "auto" else resume
    path = Path(place) if place is not None and Path(place).is_file() else Path(place or "", CHECKPOINT)
    found = place is not None and path.is_file()
    if resume not in (None, "auto") and not found:
        raise ConfigError(f"resume={str(resume)!r}: no checkpoint there")
    saved = torch.load(path, map_location="cpu", weights_only=True) if found else {"history": []}
    _agree("epochs done by the checkpoint (a checkpoint_dir that not all ranks see?)", len(saved["history"]))
    if found:
        if odd := saved["parts"].keys() ^ parts.keys():
            raise ConfigError(f"{path} and this call of fit do not both have: {', '.join(sorted(odd))}")
        for name, part in parts.items():
            part.load_state_dict(saved["parts"][name])
        if len(saved["generators"]) == world.world_size:
            _set_generators(saved["generators"][world.rank])
    return list(saved["history"])


def _save(parts: dict[str, Any], history: list[dict[str, Any]], path: Path, world: World) -> None:
    """Rank 0 replaces the file as a whole: a kill at any moment leaves the old one or the new one. The others wait."""
    generators = _gather(_generators())
    if world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        states = {name: _plain(part.state_dict()) for name, part in parts.items()}
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save({"parts": states, "history": history, "generators": generators}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    if dist.is_initialized():
        dist.barrier()


def _plain(state: Any) -> Any:
    """`state` with numpy's scalars as Python's (a scheduler's, say), which `torch.load(weights_only=True)` takes."""
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    if type(state) is dict:
        return {key: _plain(value) for key, value in state.items()}
    return state.item() if isinstance(state, np.generic) else state


def _generators() -> dict[str, Any]:
    """The state of the generators that the user's code may draw from, numpy's global one included, as plain data."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}


def _set_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])


def _shared(model: nn.Module, device: torch.device) -> nn.Module:
    shared = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    # Attributes are freed in this order. Were DDP's reducer the last to hold the group, it would join gloo's threads
    # without giving up the GIL that they wait for, and hang.
    shared.group = dist.group.WORLD  # type: ignore[assignment]
    return shared


@contextmanager
def _process_group(world: World, device: torch.device) -> Iterator[None]:
    if world.world_size == 1 or dist.is_initialized():
        yield
        return
    backend, only = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store, rank, world_size = next(rendezvous("env://", world.rank, world.world_size))
    # torchrun's store outlives a group: in a second fit the keys of the first would lead to closed connections.
    store = dist.PrefixStore(f"fit-{next(_GROUPS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=only)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device(world: World, device: torch.device | str | None) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        # Some launchers show each rank only its own GPU, which then is number 0 whatever the local rank.
        own = (world.local_rank or 0) % torch.cuda.device_count()
        chosen = torch.device("cuda", own if chosen.index is None else chosen.index)
        torch.cuda.set_device(chosen)
    return chosen


def _gather(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order."""
    ranks = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(ranks, value)
    return ranks


def _agree(what: str, value: Any) -> None:
    """Raises ConfigError, on every rank, when the ranks' values differ."""
    holders: dict[Any, list[int]] = {}
    for rank, other in enumerate(_gather(value)):
        holders.setdefault(other, []).append(rank)
    if len(holders) > 1:
        listed = "; ".join(f"{other!r} on ranks {ranks}" for other, ranks in holders.items())
        raise ConfigError(f"ranks do not agree on {what}: {listed}")


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

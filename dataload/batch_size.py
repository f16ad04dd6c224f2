"""The batch size that fits and is fast: tried out, by doubling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dataload.batch import Flat, map_tensors
from dataload.checkpoint import copied, generators, set_generators
from dataload.distributed import device_of, gather, process_group
from dataload.errors import ConfigError
from dataload.feed import num_rows
from dataload.modes import begin_training, modes_kept
from dataload.steps import LossFn, Steps
from dataload.world import World

REPEATS = 5  # steps of each size; the first is not timed


def find_batch_size(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: LossFn,
    *,
    start: int = 1,
    limit: int = 1 << 16,
    gain: float = 0.05,
    precision: str = "bf16",
    device: torch.device | str | None = None,
) -> int:
    """The largest batch, of this rank, that fits into memory, or a smaller one beyond which steps get no faster.

    batch: any batch of the loader; its rows are repeated. start, limit: the sizes to begin with and to end at.
    gain: what a doubling has to add to the rows per second, as a share, for the doubled size to be preferred.
    The ranks try together and get the same answer.

    Whatever happens, these are as before afterwards: what is in the state_dict of model and optimizer; each module's
    train or eval mode; the generators of torch (on the CPU and on `device`), numpy's global one and Python's. The model
    stays on `device`, and gradients are gone.

    Raises ConfigError when not even `start` rows fit, and whatever the steps raise but that memory is full.
    """
    world = World.detect()
    device = device_of(world, device)
    best, fastest, size = 0, 0.0, start
    with process_group(world, device), _restored(model.to(device), optimizer):
        begin_training(model)
        steps = Steps(model, optimizer, loss_fn, device, precision)
        while size <= limit:
            seconds = gather(_seconds(steps, batch, size))
            if None in seconds:
                break
            speed = size / max(seconds)
            if speed < fastest * (1 + gain):
                break
            best, fastest, size = size, speed, size * 2
    if not best:
        raise ConfigError(f"a batch of {start} rows does not fit into the memory of {device}")
    return best


@contextmanager
def _restored(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Model, optimizer and generators are afterwards as they were; gradients are gone."""
    states = [copied(part.state_dict()) for part in (model, optimizer)]
    drawn = generators()
    try:
        with modes_kept(model):
            yield
    finally:
        optimizer.zero_grad()
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        set_generators(drawn)


def _seconds(steps: Steps, batch: Any, rows: int) -> float | None:
    """What a step on so many rows takes; None when they, or the step, do not fit."""
    taken = []
    try:
        larger = _of_size(batch, rows, steps.device)
        for _ in range(REPEATS):
            started = perf_counter()
            steps.add(larger, rows, rows, last=True)
            if steps.device.type == "cuda":
                torch.cuda.synchronize(steps.device)
            taken.append(perf_counter() - started)
    except torch.OutOfMemoryError:
        pass
    if len(taken) == REPEATS:
        return median(taken[1:])
    # After the error has gone, which holds the frames that hold the tensors.
    steps.optimizer.zero_grad()
    if steps.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _of_size(batch: Any, size: int, device: torch.device) -> Any:
    """`batch` with so many rows, its own again and again."""
    rows = num_rows(batch)

    def repeated(column: Any) -> Any:
        if isinstance(column, Mapping):
            return {name: repeated(own) for name, own in column.items()}
        if isinstance(column, Flat):
            raise ConfigError('find_batch_size repeats rows, which it cannot in a column of ragged="flat"')
        if isinstance(column, Tensor):
            return column[torch.arange(size) % rows] if column.ndim else column
        return [column[number % rows] for number in range(size)]

    larger = type(batch)(map(repeated, batch)) if isinstance(batch, (list, tuple)) else repeated(batch)
    return map_tensors(larger, lambda tensor: tensor.to(device))

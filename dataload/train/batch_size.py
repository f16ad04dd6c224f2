"""The batch size that fits and is fast: tried out, by doubling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dataload.errors import ConfigError
from dataload.rows.collate import Flat, map_columns, map_tensors, map_values
from dataload.train.distributed import device_of, gather, process_group
from dataload.train.module_modes import begin_training, modes_kept
from dataload.train.optimizer_step import LossFn, OptimizerStep
from dataload.train.rank_batches import num_rows
from dataload.train.rng_state import rng_state, set_rng_state
from dataload.train.state_tree import host_copy
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

    batch: any batch that `fit` takes; columns with one entry for each row are repeated, all else stays as it is.
    start, limit: the sizes to begin with and to end at.
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
        steps = OptimizerStep(model, optimizer, loss_fn, device, precision)
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
    states = [host_copy(part.state_dict()) for part in (model, optimizer)]
    drawn = rng_state()
    try:
        with modes_kept(model):
            yield
    finally:
        optimizer.zero_grad()
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        set_rng_state(drawn)


def _seconds(steps: OptimizerStep, batch: Any, rows: int) -> float | None:
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
    """The batch with `size` rows, its own again and again, on `device`."""
    rows = num_rows(batch)
    if not rows:
        raise ConfigError("find_batch_size repeats the rows of its batch, and this one has none: pass another one")
    picked = torch.arange(size) % rows
    larger = map_columns(batch, lambda column: _repeated(column, rows, picked))
    return map_tensors(larger, lambda tensor: tensor.to(device))


def _repeated(column: Any, rows: int, picked: Tensor) -> Any:
    """The picked rows of a column that has one entry for each of the batch's rows; anything else as it is.

    A list or tuple of another length may hold columns of its own, for example the two images of each row.
    """
    if isinstance(column, Flat):
        return _repeated_flat(column, picked) if len(column.offsets) == rows + 1 else column
    if isinstance(column, (str, bytes)) or not _has_entries(column, rows):
        return map_values(column, lambda value: _repeated(value, rows, picked))
    if hasattr(column, "shape"):
        return column[picked if isinstance(column, Tensor) else picked.numpy()]
    return [column[row] for row in picked.tolist()]


def _has_entries(column: Any, rows: int) -> bool:
    if hasattr(column, "shape"):
        return len(column.shape) > 0 and column.shape[0] == rows
    return isinstance(column, Sequence) and len(column) == rows


def _repeated_flat(column: Flat, picked: Tensor) -> Flat:
    starts, ends = column.offsets[:-1][picked], column.offsets[1:][picked]
    values = torch.cat([column.values[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
    return Flat(values, torch.cat([column.offsets.new_zeros(1), (ends - starts).cumsum(0)]))

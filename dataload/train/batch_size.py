"""The search for the fastest batch size that fits into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dataload.errors import ConfigError
from dataload.rows.batch_tree import map_columns, map_values, on_device
from dataload.rows.collate import Flat
from dataload.train.checkpoint.state import host_copy, rng_state, set_rng_state
from dataload.train.modules import begin_training, check_not_wrapped, modes_kept
from dataload.train.optimizer_step import LossFn, OptimizerStep
from dataload.train.rank_batches import num_rows
from dataload.train.ranks.collectives import gather
from dataload.train.ranks.exchange import Exchange
from dataload.train.ranks.process_group import device_of, process_group
from dataload.train.ranks.sharded import is_sharded, move
from dataload.world import World

# What cuBLAS, cuDNN and NCCL say if memory is full. Their errors are not OutOfMemoryError.
FULL_MEMORY = ("out of memory", "ALLOC_FAILED")
REPEATS = 5  # steps of each size; the first one is a warm-up and is not timed


def find_batch_size(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: LossFn,
    *,
    start: int = 1,
    limit: int = 1 << 16,
    gain: float = 0.05,
    precision: str = "auto",
    device: torch.device | str | None = None,
) -> int:
    """Return the largest batch size of a rank that fits into memory and still gains speed.

    The size is doubled until memory is full or the speed in rows per second grows by less than `gain`. All ranks search
    together and return the same size.

    The search restores, also after an exception, the state_dict of model and optimizer, each module's train or eval
    mode, and the global generators of torch (on the CPU and on `device`), NumPy and Python. The model stays on
    `device`, and gradients are None.

    Args:
        model: The model to train.
        optimizer: Its optimizer.
        batch: Any batch that `fit` accepts. Columns with one entry per row are repeated to the size that is tried.
        loss_fn: As in `fit`.
        start: The first size that is tried, in rows.
        limit: The largest size that is tried, in rows.
        gain: The fraction by which a doubled size must raise the speed to be preferred.
        precision: As in `fit`.
        device: As in `fit`.

    Raises:
        ConfigError: `start` rows do not fit, it is not from 1 to `limit`, `batch` has no rows, or the ranks of the
            model wait for each other in each step: it is sharded, in DDP or FSDP, or has SyncBatchNorm.
        Exception: Any exception of a step that does not mean full memory.
    """
    if not 1 <= start <= limit:
        raise ConfigError(f"start={start} must be from 1 to limit={limit}")
    check_not_wrapped(model)
    world = World.detect()
    device = device_of(world, device)
    best, fastest, size = 0, 0.0, start
    waits = is_sharded(model) or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if world.world_size > 1 and waits:
        raise ConfigError(
            "find_batch_size would hang once the memory of one rank is full, because the ranks of this model, sharded "
            "or with SyncBatchNorm, wait for each other in each step: call it on one rank, or choose the size yourself"
        )
    move(model, optimizer, device)
    with process_group(world, device), _restored(model, optimizer):
        begin_training(model)
        steps = OptimizerStep(Exchange(model), optimizer, loss_fn, device, precision)
        while size <= limit:
            seconds = gather(_time_step(steps, batch, size))
            if None in seconds:
                break
            speed = size / max(seconds)
            if speed < fastest * (1 + gain):
                break
            best, fastest, size = size, speed, size * 2
    if not best:
        raise ConfigError(f"a batch of {start} rows does not fit into the memory of {device}: lower start")
    return best


@contextmanager
def _restored(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore model, optimizer and generators at the end of the block; set gradients to None."""
    states = [host_copy(part.state_dict()) for part in (model, optimizer)]
    generators = rng_state()
    try:
        with modes_kept(model):
            yield
    finally:
        optimizer.zero_grad()
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        set_rng_state(generators)


def _time_step(steps: OptimizerStep, batch: Any, rows: int) -> float | None:
    """Return the median seconds of a step on `rows` rows; None if memory does not suffice."""
    seconds = []
    try:
        resized = _resize(batch, rows, steps.device)
        for _ in range(REPEATS):
            started = perf_counter()
            steps.add(resized, rows, rows, last=True)
            if steps.device.type == "cuda":
                torch.cuda.synchronize(steps.device)
            seconds.append(perf_counter() - started)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in FULL_MEMORY):
            raise
    if len(seconds) == REPEATS:
        return median(seconds[1:])
    # Outside the except block, because the traceback of the error keeps the tensors alive.
    steps.optimizer.zero_grad()
    if steps.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _resize(batch: Any, size: int, device: torch.device) -> Any:
    """Return `size` rows on `device`: those of the batch in order, repeated as often as necessary."""
    rows = num_rows(batch)
    if not rows:
        raise ConfigError("find_batch_size repeats the rows of its batch, but this batch has none: pass one with rows")
    index = torch.arange(size, device="cpu") % rows
    resized = map_columns(batch, lambda column: _take_rows(column, rows, index))
    return on_device(resized, device)


def _take_rows(column: Any, rows: int, index: Tensor) -> Any:
    """Return the rows at `index` of a column that has one entry per row of the batch; return other columns unchanged.

    A list or tuple of another length may hold columns of its own, for example the two images of each row.
    """
    if isinstance(column, Flat):
        return _take_flat_rows(column, index) if len(column.offsets) == rows + 1 else column
    if isinstance(column, (str, bytes)) or not _has_entries(column, rows):
        return map_values(column, lambda value: _take_rows(value, rows, index))
    if hasattr(column, "shape"):
        return column[index if isinstance(column, Tensor) else index.numpy()]
    return [column[row] for row in index.tolist()]


def _has_entries(column: Any, rows: int) -> bool:
    if hasattr(column, "shape"):
        return len(column.shape) > 0 and column.shape[0] == rows
    return isinstance(column, Sequence) and len(column) == rows


def _take_flat_rows(column: Flat, index: Tensor) -> Flat:
    starts, lengths = column.offsets[:-1][index], column.offsets.diff()[index]
    ends = lengths.cumsum(0)
    elements = torch.arange(int(lengths.sum()), device=lengths.device) + torch.repeat_interleave(
        starts - ends + lengths, lengths
    )
    return Flat(_take_values(column.values, elements), torch.cat([column.offsets.new_zeros(1), ends]))


def _take_values(values: Any, index: Tensor) -> Any:
    if isinstance(values, Flat):
        return _take_flat_rows(values, index)
    if isinstance(values, dict):
        return {name: _take_values(member, index) for name, member in values.items()}
    return values[index] if isinstance(values, Tensor) else [values[row] for row in index.tolist()]

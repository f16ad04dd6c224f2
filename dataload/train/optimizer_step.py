"""Forward, backward and optimizer steps: mixed precision, accumulation, clipping, in the right order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataload.errors import ConfigError
from dataload.telemetry.spans import stage

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]


@dataclass
class OptimizerStep:
    """model: what loss_fn sees. replica: the DDP in it, if there are other ranks. scheduler: stepped after each
    optimizer step.

    The gradient of a step is that of the mean loss over the rows of all its batches on all ranks.

    Attributes: pending, batches of a step begun; skipped, whether the last step was an overflow in fp16, and not made.
    """

    model: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    device: torch.device
    precision: str = "fp32"
    accumulate: int = 1
    clip_grad_norm: float | None = None
    scheduler: Any = None
    replica: DistributedDataParallel | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} is none of {', '.join(PRECISIONS)}")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate={self.accumulate}: an optimizer step takes at least 1 batch")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.pending = 0  # batches of the step begun
        self.skipped = False
        self._first = True  # backward is to come: with a static graph, DDP must see the ranks meet in it
        self._rows = self._nominal = 0  # of the step begun: so far, and as many as equal batches would have

    def add(self, batch: Any, rows: int, all_rows: int, *, last: bool) -> tuple[Tensor, Mapping[str, Any]]:
        """Adds the batch's gradients, and makes an optimizer step when it was the last of a step, or of the epoch.

        rows, all_rows: of this batch, and of the batches of all ranks at this moment.
        Returns the loss and what else loss_fn gave.
        """
        if not self.pending:
            self._nominal = self.accumulate * all_rows
        self.pending += 1
        self._rows += all_rows
        full = last or self.pending == self.accumulate
        # DDP takes the mean over ranks, so the sum over them is that of the losses times the number of ranks.
        ranks = 1 if self.replica is None else self.replica.process_group.size()
        loss, scalars = self._backward(batch, rows * ranks / self._nominal, full)
        if full:
            self._step(self._nominal / self._rows)
            self.pending = self._rows = 0
        return loss, scalars

    def _backward(self, batch: Any, weight: float, full: bool) -> tuple[Tensor, Mapping[str, Any]]:
        """Gradients cross ranks once a step: with its last batch."""
        replica, first = self.replica, self._first
        self._first = False
        with replica.no_sync() if replica and not full and not (first and replica.static_graph) else nullcontext():
            dtype = PRECISIONS[self.precision]
            with stage("forward"), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                result = self.loss_fn(self.model, batch)  # type: ignore[arg-type]
                loss, scalars = result if isinstance(result, tuple) else (result, {})
            with stage("backward"):
                torch.autograd.backward(self.scaler.scale(loss * weight))
        return loss, scalars

    def _step(self, factor: float) -> None:
        """factor: what the gradients have to be multiplied by, for they were added up as if batches were equal."""
        with stage("optimizer"):
            parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            if factor != 1:
                for parameter in parameters:
                    parameter.grad *= factor
            if self.clip_grad_norm is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skipped = self.scaler.get_scale() < scale
            if self.scheduler is not None and not self.skipped:
                self.scheduler.step()
            self.optimizer.zero_grad()

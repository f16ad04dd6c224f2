"""Forward, backward and optimizer steps: mixed precision, accumulation, clipping, in the right order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.telemetry.spans import stage
from dataload.train.modules import BuffersKept
from dataload.train.ranks.exchange import Exchange, Sharded
from dataload.train.ranks.sharded import clip_grad_norm, full_tensor

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]


def _has_bf16(device: torch.device) -> bool:
    """Return whether the device is an accelerator that computes in bfloat16 itself."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu" or not torch.amp.is_autocast_available(device.type):
        return False
    return torch.get_autocast_dtype(device.type) == torch.bfloat16


def check_options(precision: str, accumulate: int, clip_grad_norm: float | None) -> None:
    """Raise ConfigError unless an `OptimizerStep` can have these arguments."""
    if precision not in ("auto", *PRECISIONS):
        raise ConfigError(f"precision={precision!r} is not one of auto, {', '.join(PRECISIONS)}")
    whole_number("accumulate", accumulate, least=1)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ConfigError(f"clip_grad_norm={clip_grad_norm}: a bound of gradients must be above 0")


def _loss_and_scalars(result: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss and the scalars that the user's `loss_fn` returned.

    Raises:
        ConfigError: The result is neither a tensor with one element nor a pair of such a tensor and a mapping.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    loss, scalars = result if is_pair else (result, {})
    if isinstance(loss, Tensor) and loss.numel() == 1 and isinstance(scalars, Mapping):
        return loss, scalars
    raise ConfigError(
        f"loss_fn returned {_kind(result)}: return the mean loss as a tensor with one element, or this loss and a dict "
        "of scalars"
    )


def _kind(result: Any) -> str:
    """Return the types of a result in words, such as "(dict, Tensor of shape (3,))"."""
    if isinstance(result, tuple):
        return f"({', '.join(map(_kind, result))}{',' if len(result) == 1 else ''})"
    return type(result).__name__ + (f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else "")


@dataclass
class OptimizerStep:
    """Forward, backward and optimizer step with autocast, loss scaling, gradient accumulation and clipping.

    The gradient of a step is that of the mean loss over all its batches on all ranks: over their rows, or whatever they
    are weighed by.

    Args:
        exchange: The model, and how the ranks exchange its gradients.
        optimizer: The optimizer.
        loss_fn: Returns the mean loss over the rows of a batch, or this loss and a dict of scalars to log.
        device: The device of this rank.
        precision: "fp32", the autocast dtype "bf16" or "fp16", or "auto" for one of them by `device`.
        accumulate: Batches per step.
        clip_grad_norm: Upper bound of the norm of the gradients; None for no clipping.
        scheduler: A learning rate scheduler, stepped after each optimizer step that is not left out.

    Attributes:
        pending: Batches added since the last step.
        skipped: Whether the last step was skipped because of an overflow in fp16.
        sync_seconds: Seconds so far in the passes in which ranks wait for each other.
        usual_weight: In fp16, what a batch of all ranks weighed on average in the last step; 0 before the first. Of a
            step that begins with a light batch, the sum of gradients would overflow if they were divided by that one's.

    Raises:
        ConfigError: See `check_options`.
    """

    exchange: Exchange
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    device: torch.device
    precision: str = "fp32"
    accumulate: int = 1
    clip_grad_norm: float | None = None
    scheduler: Any = None

    def __post_init__(self) -> None:
        check_options(self.precision, self.accumulate, self.clip_grad_norm)
        if self.precision == "auto":
            self.precision = "bf16" if _has_bf16(self.device) else "fp32"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.pending = 0
        self.skipped = False
        self.sync_seconds = 0.0
        self._total = 0.0  # weight of all batches in the pending step, on all ranks
        self._nominal = 0.0  # about what that will be, known at the first batch
        self.usual_weight = 0.0

    def add(self, batch: Any, weight: float, all_weight: float, *, last: bool) -> tuple[Tensor, Mapping[str, Any]]:
        """Add the gradients of a batch. Step the optimizer after `accumulate` batches, or after the last of an epoch.

        Args:
            batch: The batch, on the device.
            weight: What the batch weighs, such as its rows; 0 if this rank has run out of batches, or its loss averages
                over nothing: then no buffer changes either, but for statistics that the ranks exchange, those of
                SyncBatchNorm.
            all_weight: Weight of the batches that all ranks add at this time.
            last: Whether this is the last batch of the epoch on all ranks.

        Returns:
            The loss, and the scalars that `loss_fn` logs.
        """
        if not self.pending:
            self._nominal = self.accumulate * (max(self.usual_weight, all_weight) or 1)
        self.pending += 1
        self._total += all_weight
        full = last or self.pending == self.accumulate
        # DDP and FSDP average gradients over ranks. Multiplying by the number of ranks makes it a sum.
        factor = weight * self.exchange.ranks / self._nominal
        with nullcontext() if weight else self._without_effect():
            loss, scalars = self._backward(batch, factor, full)
        if full:
            self._step()
            self.pending, self._total = 0, 0.0
        return loss, scalars

    def autocast(self, *, cached: bool = True) -> torch.autocast:
        """Return the context in which the model computes in `precision`.

        Args:
            cached: Keep the casts of parameters, which must not change before the context ends; otherwise each use
                casts again. A sharded model keeps none here, because those of its gathered parameters would be the
                whole model. Without activation checkpointing, its backward keeps them all the same.
        """
        dtype, cached = PRECISIONS[self.precision], cached and not isinstance(self.exchange, Sharded)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None, cache_enabled=cached)

    @contextmanager
    def _without_effect(self) -> Iterator[None]:
        """Keep buffers and gradients as they are in a forward and backward that the other ranks wait for.

        The mean loss over nothing is NaN, and 0 times its gradient may be, too. FSDP has no hook that could change it.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
        try:
            with BuffersKept(self.exchange.model, nn.SyncBatchNorm):  # type: ignore[arg-type]
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _backward(self, batch: Any, factor: float, full: bool) -> tuple[Tensor, Mapping[str, Any]]:
        """Run forward and backward. The ranks exchange gradients only in the last batch of a step."""
        waits_in_forward, started = self.exchange.waits_in_forward, perf_counter()
        with self.exchange.during(last=full):
            with stage("forward"), self.autocast():
                loss, scalars = _loss_and_scalars(self.loss_fn(self.exchange.model, batch))  # type: ignore[arg-type]
            started = started if waits_in_forward else perf_counter()
            with stage("backward"):
                torch.autograd.backward(self.scaler.scale(loss * factor))
        if full or waits_in_forward:
            self.sync_seconds += perf_counter() - started
        return full_tensor(loss), scalars

    def _step(self) -> None:
        """Step the optimizer, unless all batches of the step weigh 0: weight decay and momentum would train, too."""
        if not self._total:
            self.skipped = False
            self.optimizer.zero_grad()
            return
        if self.scaler.is_enabled():  # In other precisions nothing overflows.
            self.usual_weight = self._total / self.pending
        factor = self._nominal / self._total  # The gradients were divided by the nominal weight.
        with stage("optimizer"):
            parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            if factor != 1:
                for parameter in parameters:
                    parameter.grad *= factor
            if self.clip_grad_norm is not None:
                self.scaler.unscale_(self.optimizer)
                clip_grad_norm(parameters, self.clip_grad_norm)
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skipped = self.scaler.get_scale() < scale
            if self.scheduler is not None and not self.skipped:
                self.scheduler.step()
            self.optimizer.zero_grad()

"""Losses on their way from the device: read when they have come, so that no step waits for one."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dataload.errors import NonFiniteLoss


class _Coming(NamedTuple):
    where: str
    value: Tensor  # on the host, filled once `event` has happened
    event: Any


class LossMonitor:
    """Watches over the losses of a run.

    rank: this process's, for the error. check: whether losses, and what they make of the parameters, must be finite.
    Attributes: latest, the last loss that has come to the host; None before the first.
    """

    def __init__(self, rank: int, *, check: bool = True) -> None:
        self.latest: float | None = None
        self._rank = rank
        self._check = check
        self._coming: deque[_Coming] = deque()

    def add(self, loss: Tensor, where: str) -> None:
        """A step's loss, and which step that is. Raises NonFiniteLoss for it or for an earlier one that has come."""
        value, event = loss.detach(), None
        if value.is_cuda:
            value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._coming.append(_Coming(where, value, event))
        self._look(wait=False)

    def settle(self) -> None:
        """Waits for all of them. Raises NonFiniteLoss: so nothing is saved that an infinite loss has spoiled."""
        self._look(wait=True)

    def look_at(self, model: nn.Module, where: str) -> None:
        """Waits for the parameters, which a finite loss may have spoiled: its gradient need not be finite.

        where: which step was the last. Raises NonFiniteLoss.
        """
        for name, parameter in model.named_parameters():
            if self._check and parameter.requires_grad and not parameter.isfinite().all():
                raise NonFiniteLoss(
                    f"rank {self._rank}, {where}: parameter {name!r} is not finite, though the losses were. A gradient "
                    "was not: look for a root, logarithm or division near 0 in the loss, lower the learning rate; or "
                    "pass check_finite=False to go on with it"
                )

    def _look(self, *, wait: bool) -> None:
        while self._coming:
            where, value, event = self._coming[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self._coming.popleft()
            self.latest = value.item()
            if self._check and not math.isfinite(self.latest):
                raise NonFiniteLoss(
                    f"rank {self._rank}, {where}: the loss is {self.latest}. Look at that batch, lower the learning "
                    "rate, clip gradients; or pass check_finite=False to go on with it"
                )

"""A monitor that reads losses after they have arrived on the host, so that no step waits for the device."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from dataload.errors import NonFiniteLoss
from dataload.train.ranks.sharded import full_tensor


class LossMonitor:
    """A check that the losses and parameters of a run are finite.

    Args:
        rank: The rank of this process, for error messages.
        check: Whether a value that is not finite raises NonFiniteLoss.

    Attributes:
        latest: The last loss that has arrived on the host; None before the first.
    """

    def __init__(self, rank: int, *, check: bool = True) -> None:
        self.latest: float | None = None
        self._rank = rank
        self._check = check
        # The step, its loss on the host, and the event after which that is valid; None for a loss from the CPU.
        self._pending: deque[tuple[str, Tensor, Any]] = deque()

    def add(self, loss: Tensor, where: str) -> None:
        """Add the loss of a step, and check the losses that have arrived.

        Args:
            loss: The loss, a scalar tensor.
            where: Names the step in error messages.

        Raises:
            NonFiniteLoss: This loss or an earlier one is not finite.
        """
        value, event = loss.detach(), None
        if value.is_cuda:
            value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending.append((where, value, event))
        self.settle(wait=False)

    def settle(self, *, wait: bool = True) -> None:
        """Check the losses, so that no checkpoint is saved after a loss that is not finite.

        Args:
            wait: Wait for all losses, instead of checking only those that have arrived.

        Raises:
            NonFiniteLoss: A loss is not finite.
        """
        while self._pending:
            where, value, event = self._pending[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self._pending.popleft()
            self.latest = value.item()
            if self._check and not math.isfinite(self.latest):
                raise NonFiniteLoss(
                    f"rank {self._rank}, {where}: the loss is {self.latest}. Look at this batch, lower the learning "
                    "rate, clip gradients, or pass check_finite=False to continue"
                )

    def check_parameters(self, model: nn.Module, where: str) -> None:
        """Wait for the parameters and check them: the gradient of a finite loss may not be finite.

        Args:
            model: The model whose trained parameters are checked.
            where: Names the last step in error messages.

        Raises:
            NonFiniteLoss: A parameter is not finite.
        """
        for name, parameter in model.named_parameters():
            if self._check and parameter.requires_grad and not full_tensor(parameter.detach().isfinite().all()):
                raise NonFiniteLoss(
                    f"rank {self._rank}, {where}: parameter {name!r} is not finite although the losses were, so a "
                    "gradient was not. Look for a root, logarithm or division near 0 in the loss, lower the learning "
                    "rate, or pass check_finite=False to continue"
                )

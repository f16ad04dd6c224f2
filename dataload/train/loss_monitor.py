"""A monitor that reads losses after they have arrived on the host, so that no step waits for the device."""

from __future__ import annotations

import logging
import math
from collections import deque
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dataload.errors import ConfigError, LossSpike, NonFiniteLoss
from dataload.train.ranks.sharded import full_tensor

OnSpike = Literal["log", "raise"]

MOST_LOSSES = 128  # whose median is the usual loss
LEAST_LOSSES = 16  # before a loss may count as a spike

log = logging.getLogger(__name__)


class Spikes(NamedTuple):
    """What counts as a spike of the loss, and what follows.

    Attributes:
        factor: A loss is a spike if it is above so many times the median of the latest ones; None: none is.
        on_spike: "log" a warning, or "raise" LossSpike.
    """

    factor: float | None = None
    on_spike: OnSpike = "log"

    def check(self) -> None:
        """Raise ConfigError unless these are arguments of `fit`."""
        if self.factor is not None and not self.factor > 1:
            raise ConfigError(f"spike={self.factor}: must be above 1, such as 3 for three times the usual loss")
        if self.on_spike not in ("log", "raise"):
            raise ConfigError(f'on_spike={self.on_spike!r}: use "log" or "raise"')


class Where(NamedTuple):
    """The batch of a loss.

    Attributes:
        epoch: Its epoch.
        step: Its optimizer step, from 1.
        replay: The folder of the run's ledger; "": there is none.
    """

    epoch: int
    step: int
    replay: str = ""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"

    def look(self, rank: int) -> str:
        """Return how to look at the batch."""
        if not self.replay:
            return "Look at this batch"
        how = f"{self.replay} --step {self.step} --rank {rank}"
        return f"To see its rows: dataload rows {how} --show. To make it again: dataload replay {how} --out batch.pt"


class LossMonitor:
    """A check that the losses and parameters of a run are finite, and that no loss is far above those before it.

    Args:
        rank: The rank of this process, for error messages.
        check: Whether a value that is not finite raises NonFiniteLoss.
        spikes: What else is told.

    Attributes:
        latest: The last loss that has arrived on the host; None before the first.
    """

    def __init__(self, rank: int, *, check: bool = True, spikes: Spikes | None = None) -> None:
        self.latest: float | None = None
        self._spikes = spikes or Spikes()
        self._losses = deque[float](maxlen=MOST_LOSSES)
        self._usual = 0  # losses since the latest spike
        self._rank = rank
        self._check = check
        # The step, its loss on the host, and the event after which that is valid; None for a loss from the CPU.
        self._pending: deque[tuple[Where, Tensor, Any]] = deque()

    def add(self, loss: Tensor, where: Where) -> None:
        """Add the loss of a step, and check the losses that have arrived.

        Args:
            loss: The loss, a scalar tensor.
            where: The batch of the loss.

        Raises:
            NonFiniteLoss: This loss or an earlier one is not finite.
            LossSpike: It is far above those before it, if that is an error.
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
            LossSpike: A loss is far above those before it, if that is an error.
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
                    f"rank {self._rank}, {where}: the loss is {self.latest}. {where.look(self._rank)}. Or lower the "
                    "learning rate, clip gradients, or pass check_finite=False to continue"
                )
            self._check_spike(self.latest, where)

    def _check_spike(self, loss: float, where: Where) -> None:
        factor, losses = self._spikes.factor, self._losses
        if factor is None or not math.isfinite(loss):
            return
        usual = median(losses) if len(losses) >= LEAST_LOSSES else math.inf
        losses.append(loss)
        before, self._usual = self._usual, self._usual + 1
        if usual <= 0 or loss <= factor * usual:
            return
        self._usual = 0
        if before < LEAST_LOSSES:  # It follows from the spike before it, which has been told.
            return
        message = (
            f"rank {self._rank}, {where}: the loss is {loss:.6g}, {loss / usual:.3g} times the median of those before "
            f"it ({usual:.6g}). {where.look(self._rank)}"
        )
        if self._spikes.on_spike == "raise":
            raise LossSpike(message)
        log.warning("%s", message)

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

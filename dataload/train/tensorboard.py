"""Training metrics for TensorBoard."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import torch

from dataload.errors import ConfigError

log = logging.getLogger(__name__)


class TensorBoardWriter:
    """A writer of one point every `every` optimizer steps and one point an epoch. Only rank 0 has one.

    Args:
        folder: Where the event files are written.
        every: Optimizer steps between two points.
        device: Where the model trains. The peak memory of a GPU from now on, or of this process, is one of the metrics.
        after: The step that is resumed after: later points of the earlier run are hidden. 0: nothing is resumed.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int, device: torch.device, after: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("log_dir needs TensorBoard: pip install 'dataload[tensorboard]'") from error
        self._writer = SummaryWriter(os.fspath(folder), purge_step=after + 1 if after else None)
        self._folder = folder
        self._has_failed = False
        self._every = every
        self._device = device
        self._rows = 0  # since the last point
        self._last = (perf_counter(), 0.0)  # time and wait_seconds at the last point
        if device.type == "cuda":  # Its peak may be that of a search for the batch size.
            torch.cuda.reset_peak_memory_stats(device)

    def step(self, step: int, loss: float | None, lr: float, all_rows: int, wait_seconds: float) -> None:
        """Count an optimizer step, and write a point if it is due.

        Args:
            step: Number of the step, from 1.
            loss: The last loss that is on the host; None before the first.
            lr: The learning rate.
            all_rows: Rows of the step on all ranks.
            wait_seconds: Seconds that this process has waited for batches so far.
        """
        self._rows += all_rows
        if step % self._every:
            return
        now, (last, waited_before) = perf_counter(), self._last
        metrics = {
            "loss": loss,
            "learning rate": lr,
            "rows per second": self._rows / (now - last),
            "stall fraction": (wait_seconds - waited_before) / (now - last),
            "memory": peak_memory(self._device),
        }
        self._rows, self._last = 0, (now, wait_seconds)
        self._add({f"step/{name}": value for name, value in metrics.items() if value is not None}, step)

    def epoch(self, record: Mapping[str, Any], step: int) -> None:
        """Write the metrics of an epoch that ended with optimizer step `step`.

        Their points are at the next step. So a run that is resumed after `step`, and writes them again, hides them.
        """
        self._add({f"epoch/{name}": value for name, value in record.items() if name != "epoch"}, step + 1)
        self._try(self._writer.flush)

    def close(self) -> None:
        """Close the event file."""
        with suppress(OSError):
            self._writer.close()

    def _add(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._try(partial(self._writer.add_scalar, name, value, step))

    def _try(self, write: Callable[[], object]) -> None:
        """Call `write`. An error of the disk ends the metrics, not the run: the other ranks would wait."""
        if self._has_failed:
            return
        try:
            write()
        except OSError as error:
            self._has_failed = True
            log.warning("%s gets no more metrics: %s", self._folder, error)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU's allocator, or of this process if `device` is a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

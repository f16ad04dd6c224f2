"""Batches on their way to a device, copied beside the kernels of the step."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from dataload.batch import map_tensors


class Copies:
    """Copies batches to `device`: on CUDA by a stream of their own, for which the current one waits on the device.

    Notes: nothing waits in the program, when what is copied is pinned; what is not pinned is copied before the call
    returns. torch uses pinned memory again once the copy from it is done, and memory on the device once the current
    stream is done with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """The batch with its tensors on the device."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            copied = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        if self._stream is not None:
            step = torch.cuda.current_stream(self._device)
            step.wait_stream(self._stream)
            map_tensors(copied, lambda tensor: _used_on(step, tensor))
        return copied


@cache
def _stream(device: torch.device) -> Any:
    """One for each device: memory that was allocated for a stream is not used again for another."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _used_on(stream: Any, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor

"""Batches on their way to a device, copied beside the kernels of the step."""

from __future__ import annotations

from contextlib import nullcontext
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
        cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Any:
        """The batch with its tensors on the device."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            copied = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        if self._stream is not None:
            step = torch.cuda.current_stream(self._device)
            step.wait_stream(self._stream)
            map_tensors(copied, lambda tensor: _used_on(step, tensor))
        return copied


def _used_on(stream: Any, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor

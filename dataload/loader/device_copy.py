"""Batches on their way to a device, copied beside the kernels of the step.

A copy to a GPU is asynchronous only from pinned memory without gaps. From any other, torch copies the tensor once more
on the host, in the thread that trains.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from dataload.rows.collate import map_tensors


class Staging(NamedTuple):
    """Host memory for batches that are copied to a device. pinned: where there is CUDA."""

    pinned: bool

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory for a tensor."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.pinned)

    def stage(self, batch: Any) -> Any:
        """Return the batch with each tensor of the host in such memory, without gaps: copied once if it is not."""
        return map_tensors(batch, self._staged)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        if tensor.is_contiguous() and (not self.pinned or tensor.is_pinned()):
            return tensor
        # Gaps are left out; the order of dimensions stays, as that of channels_last.
        return torch.empty_like(tensor, pin_memory=self.pinned).copy_(tensor)


def staging_for(device: torch.device | None, pin_memory: bool | None) -> Staging | None:
    """Return where batches are put together for `device`; None: wherever they are.

    pin_memory: None: where the device is CUDA.
    """
    pinned = device is not None and device.type == "cuda" if pin_memory is None else pin_memory
    if not pinned and (device is None or device.type == "cpu"):
        return None
    return Staging(pinned and torch.cuda.is_available())


class DeviceCopy:
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

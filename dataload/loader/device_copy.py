"""Copy batches to a device while the kernels of the training step run.

A copy to a GPU is asynchronous only from dense pinned memory. From other memory, torch copies the tensor once more
on the host, in the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from dataload.loader.worker_transport import in_memory_order
from dataload.rows.batch_tree import map_tensors, moved, on_device


class HostMemory(NamedTuple):
    """Allocates host memory for batches that are copied to a device.

    Attributes:
        pinned: Whether the memory is pinned, which requires CUDA.
    """

    pinned: bool

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized, contiguous tensor."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.pinned)

    def prepare(self, batch: Any) -> Any:
        """Return the batch with its CPU tensors dense, and pinned if `pinned`. Others are copied once.

        Objects with a method `pin_memory` pin themselves.
        """
        return map_tensors(batch, self._prepare_value, "pin_memory")

    def _prepare_value(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor.pin_memory() if self.pinned else tensor
        if tensor.device.type != "cpu" or not _is_strided(tensor):
            return tensor
        is_dense = tensor.is_contiguous() or in_memory_order(tensor) is not None
        if is_dense and (not self.pinned or tensor.is_pinned()):
            return tensor
        # The copy is dense and keeps the order of dimensions, such as channels_last.
        return torch.empty_like(tensor, pin_memory=self.pinned).copy_(tensor)


def host_memory_for(device: torch.device | None, pin_memory: bool | None) -> HostMemory | None:
    """Return the host memory for batches that go to `device`. None: they need none.

    Args:
        device: Device of the batches. None: the CPU.
        pin_memory: Whether to pin the memory. None: pin it if the device is CUDA.
    """
    pinned = device is not None and device.type == "cuda" if pin_memory is None else pin_memory
    if not pinned and (device is None or device.type == "cpu"):
        return None
    return HostMemory(pinned and torch.cuda.is_available())


def current_gpu() -> Callable[[], object]:
    """Return a function that gives other threads the current GPU of this one. A new thread has GPU 0."""
    # Without CUDA, this thread has chosen none, and a look would take memory of a GPU.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


class DeviceCopy:
    """Copies batches to a device. On CUDA it uses a stream of its own, and the current stream waits for the copy.

    Args:
        device: Device to copy to. A GPU without a number is the current one of this thread.

    Notes: a copy from pinned memory does not block the calling thread; a copy from other memory is done when the call
    returns. torch reuses pinned memory after the copy from it, and device memory after the current stream has used it.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:  # It may be another one when a stream is used again.
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its tensors, and objects with a method `to`, on the device."""
        if self._stream is None:
            return on_device(batch, self._device)
        with torch.cuda.stream(self._stream):
            copied = map_tensors(batch, lambda value: moved(value, self._device) if _is_strided(value) else value, "to")
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # Sparse tensors and other objects are copied by the stream that uses them: torch cannot record the use by
        # another one.
        return map_tensors(
            copied, lambda value: _used(value, current) if _is_strided(value) else moved(value, self._device), "to"
        )


@cache
def _stream(device: torch.device) -> Any:
    """Return the copy stream of a device. One is shared: torch does not reuse memory of a stream for another one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _used(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Record that a stream uses the tensor, whose memory then stays until the stream has done so. Return the tensor."""
    tensor.record_stream(stream)
    return tensor

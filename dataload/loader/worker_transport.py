"""Transport of batches from a worker: tensors, arrays, bytes and strings are packed into one buffer.

torch sends each tensor in a shared memory file of its own, which takes a descriptor and a millisecond. Up to
`PIPED_BYTES`, bytes through the pipe are faster.
"""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

PIPED_BYTES = 256 << 10
_ALIGN = 16


class Packed(NamedTuple):
    """A packed batch.

    Attributes:
        content: The values, uint8 [n]; a bytearray, if they are sent through the pipe.
        shape: The pickled batch. A `_Tensor`, `_Array`, `_Tensors`, `_Bytes` or `_Text` replaces each packed value.
    """

    content: torch.Tensor | bytearray
    shape: bytes

    def pin_memory(self) -> Packed:
        """Return a copy in pinned memory. torch calls this on its pinning thread."""
        content = self.content
        if isinstance(content, bytearray):
            content = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return self._replace(content=content.pin_memory())


class _Tensor(NamedTuple):
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Array(NamedTuple):
    start: int
    dtype: str
    shape: tuple[int, ...]


class _Tensors(NamedTuple):
    """A list of one-dimensional tensors of one dtype."""

    start: int
    dtype: torch.dtype
    lengths: list[int]


class _Bytes(NamedTuple):
    """A list of bytes, or of memoryviews if `views`."""

    start: int
    lengths: list[int]
    views: bool


class _Text(NamedTuple):
    start: int
    size: int
    lengths: list[int]  # in characters


def pack(batch: Any) -> Packed:
    """Pack the tensors, arrays, bytes and strings in the dicts, lists and tuples of a batch.

    Raises:
        Exception: Another value of the batch cannot be pickled. A queue would only print this error and send nothing.
    """
    packer = _Packer()
    shape = packer.pack(batch)
    piped = packer.size <= PIPED_BYTES
    content = bytearray(packer.size) if piped else torch.empty(packer.size, dtype=torch.uint8)
    memory = content if isinstance(content, bytearray) else content.numpy().data
    for start, array in packer.arrays:
        np.ndarray(array.shape, array.dtype, memory, start)[...] = array
    return Packed(content, pickle.dumps(shape))


class _Packer:
    def __init__(self) -> None:
        self.size = 0
        self.arrays: list[tuple[int, npt.NDArray[Any]]] = []

    def pack(self, value: Any) -> Any:  # noqa: PLR0911 (one per case)
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if _is_plain(value) else value
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return _Array(self._put(value), value.dtype.str, value.shape)
        if type(value) is dict:  # A subclass may have other state, so it is pickled.
            return {name: self.pack(entry) for name, entry in value.items()}
        if type(value) is tuple:
            return tuple(self.pack(entry) for entry in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.pack, value))
        if type(value) is list and value:
            return self._list(value)
        return bytes(value) if isinstance(value, memoryview) else value

    def _list(self, values: list[Any]) -> Any:
        kinds = {type(value) for value in values}
        if kinds in ({bytes}, {memoryview}):
            lengths = [memoryview(value).nbytes for value in values]
            return _Bytes(self._put(b"".join(values)), lengths, kinds == {memoryview})
        if kinds == {str}:
            text = "".join(values).encode(errors="surrogatepass")
            return _Text(self._put(text), len(text), [len(value) for value in values])
        if kinds == {torch.Tensor} and _can_be_joined(values):
            joined = self._tensor(torch.cat(values))
            return _Tensors(joined.start, joined.dtype, [len(value) for value in values])
        return [self.pack(value) for value in values]

    def _tensor(self, tensor: torch.Tensor) -> _Tensor:
        try:
            array = tensor.numpy()
        except TypeError:  # numpy has no bfloat16
            array = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
        return _Tensor(self._put(array), tensor.dtype, tuple(tensor.shape))

    def _put(self, content: npt.NDArray[Any] | bytes) -> int:
        array = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
        start = -(-self.size // _ALIGN) * _ALIGN
        if array.nbytes:
            self.arrays.append((start, array))
            self.size = start + array.nbytes
        return start


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether shape, dtype and elements are the whole state of a tensor."""
    dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    extra_state = tensor.is_conj() or tensor.is_neg() or tensor.requires_grad
    return dense and tensor.device.type == "cpu" and not extra_state


def _can_be_joined(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors}) == 1 and all(
        tensor.ndim == 1 and _is_plain(tensor) for tensor in tensors
    )


def unpack(packed: Packed) -> Any:
    """Return the batch that was packed. Its values are views of the content."""
    return _Unpacker(packed.content).unpack(pickle.loads(packed.shape))  # noqa: S301 (made by a worker of this process)


class _Unpacker:
    def __init__(self, content: torch.Tensor | bytearray) -> None:
        self._memory = memoryview(content) if isinstance(content, bytearray) else content.numpy().data
        pinned = content if isinstance(content, torch.Tensor) and content.is_pinned() else None
        self._pinned = None if pinned is None else pinned.untyped_storage()

    def unpack(self, value: Any) -> Any:  # noqa: PLR0911 (one per case)
        match value:
            case _Tensor(start, dtype, shape):
                tensor = self._values(start, dtype, math.prod(shape))
                return tensor if len(shape) == 1 else tensor.reshape(shape)
            case _Array(start, kind, shape):
                count = math.prod(shape)
                array = np.frombuffer(self._memory, kind, count, start) if count else np.empty(0, kind)
                return array.reshape(shape)
            case _Tensors(start, dtype, lengths):
                return list(torch.split(self._values(start, dtype, sum(lengths)), lengths))
            case _Bytes(start, lengths, views):
                found = _cut(self._memory[start:].toreadonly(), lengths)
                return found if views else [bytes(view) for view in found]
            case _Text(start, size, lengths):
                return _cut(str(self._memory[start : start + size], "utf-8", "surrogatepass"), lengths)
            case dict() if type(value) is dict:
                return {name: self.unpack(entry) for name, entry in value.items()}
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self.unpack, value))
            case tuple() if type(value) is tuple:
                return tuple(self.unpack(entry) for entry in value)
            case list() if type(value) is list:
                return [self.unpack(entry) for entry in value]
        return value

    def _values(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        if self._pinned is not None:
            # torch identifies the pinned block of an asynchronous copy by the tensor's storage. With the separate
            # storage that `frombuffer` makes, torch would reuse the block before the copy is done.
            return torch.empty(0, dtype=dtype).set_(self._pinned, start // dtype.itemsize, (count,), (1,))
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)


def _cut(whole: Any, lengths: list[int]) -> list[Any]:
    ends = itertools.accumulate(lengths)
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]

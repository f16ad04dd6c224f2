"""Batches on their way out of a worker: all that is large in one piece.

A tensor that is sent takes a descriptor and a millisecond; up to some size bytes through the pipe are there sooner.
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
    """content: uint8 [n], or so many bytes; shape: the batch, pickled, with a `_Tensor`, `_Array`, `_Bytes` or `_Text`
    in place of what is in there.
    """

    content: torch.Tensor | bytearray
    shape: bytes

    def pin_memory(self) -> Packed:
        """Return the same in pinned memory. torch calls this on its thread for that."""
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
    """A list of bytes; views: of what arrives as views of memory."""

    start: int
    lengths: list[int]
    views: bool


class _Text(NamedTuple):
    start: int
    size: int
    lengths: list[int]  # in characters


def pack(batch: Any) -> Packed:
    """The batch with its tensors, arrays, bytes and strings packed, wherever they are in dicts, lists and tuples.

    Raises what pickling the rest of it raises: here, because a queue would only print it, and send nothing.
    """
    packer = _Packer()
    shape = packer.pack(batch)
    piped = packer.size <= PIPED_BYTES
    content = bytearray(packer.size) if piped else torch.empty(packer.size, dtype=torch.uint8)
    memory = content if isinstance(content, bytearray) else content.numpy().data
    for start, array in packer.parts:
        np.ndarray(array.shape, array.dtype, memory, start)[...] = array
    return Packed(content, pickle.dumps(shape))


class _Packer:
    def __init__(self) -> None:
        self.size = 0
        self.parts: list[tuple[int, npt.NDArray[Any]]] = []

    def pack(self, value: Any) -> Any:  # noqa: PLR0911 (one a case)
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if _is_plain(value) else value
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return _Array(self._put(value), value.dtype.str, value.shape)
        if type(value) is dict:  # What it is besides, a subclass alone knows: it goes as it is.
            return {name: self.pack(one) for name, one in value.items()}
        if type(value) is tuple:
            return tuple(self.pack(one) for one in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.pack, value))
        if type(value) is list and value:
            return self._list(value)
        return bytes(value) if isinstance(value, memoryview) else value

    def _list(self, values: list[Any]) -> Any:
        kinds = {type(one) for one in values}
        if kinds in ({bytes}, {memoryview}):
            return _Bytes(
                self._put(b"".join(values)), [memoryview(one).nbytes for one in values], kinds == {memoryview}
            )
        if kinds == {str}:
            text = "".join(values).encode(errors="surrogatepass")
            return _Text(self._put(text), len(text), [len(one) for one in values])
        if kinds == {torch.Tensor} and _can_be_joined(values):
            joined = self._tensor(torch.cat(values))
            return _Tensors(joined.start, joined.dtype, [len(one) for one in values])
        return [self.pack(one) for one in values]

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
            self.parts.append((start, array))
            self.size = start + array.nbytes
        return start


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are all there is to it."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.requires_grad
    return ordinary and tensor.device.type == "cpu" and not lazy


def _can_be_joined(tensors: list[torch.Tensor]) -> bool:
    return len({one.dtype for one in tensors}) == 1 and all(one.ndim == 1 and _is_plain(one) for one in tensors)


def unpack(packed: Packed) -> Any:
    """What was packed, as views of the content."""
    return _Unpacker(packed.content).unpack(pickle.loads(packed.shape))  # noqa: S301 (a worker of ours made it)


class _Unpacker:
    def __init__(self, content: torch.Tensor | bytearray) -> None:
        self._memory = memoryview(content) if isinstance(content, bytearray) else content.numpy().data
        pinned = content if isinstance(content, torch.Tensor) and content.is_pinned() else None
        self._pinned = None if pinned is None else pinned.untyped_storage()

    def unpack(self, value: Any) -> Any:  # noqa: PLR0911 (one a case)
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
                return found if views else [bytes(one) for one in found]
            case _Text(start, size, lengths):
                return _cut(str(self._memory[start : start + size], "utf-8", "surrogatepass"), lengths)
            case dict() if type(value) is dict:
                return {name: self.unpack(one) for name, one in value.items()}
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self.unpack, value))
            case tuple() if type(value) is tuple:
                return tuple(self.unpack(one) for one in value)
            case list() if type(value) is list:
                return [self.unpack(one) for one in value]
        return value

    def _values(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        if self._pinned is not None:
            # torch finds the block that an asynchronous copy reads by the storage of its tensor. A tensor that
            # `frombuffer` makes has a storage of its own: torch would reuse the block before the copy is done.
            return torch.empty(0, dtype=dtype).set_(self._pinned, start // dtype.itemsize, (count,), (1,))
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)


def _cut(whole: Any, lengths: list[int]) -> list[Any]:
    ends = itertools.accumulate(lengths)
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]

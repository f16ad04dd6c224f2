"""Batches on their way out of a worker: all that is large in one tensor, for each that is sent takes a descriptor."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

_ALIGN = 16


class Packed(NamedTuple):
    """content: uint8 [n], what is large; shape: the batch with a `_Tensor`, `_Bytes` or `_Text` in place of it."""

    content: torch.Tensor
    shape: Any


class _Tensor(NamedTuple):
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Tensors(NamedTuple):
    """A list of one-dimensional tensors of one dtype."""

    start: int
    dtype: torch.dtype
    lengths: list[int]


class _Bytes(NamedTuple):
    start: int
    lengths: list[int]


class _Text(NamedTuple):
    start: int
    size: int
    lengths: list[int]  # in characters


def pack(batch: Any) -> Packed:
    """The batch with its tensors, bytes and strings packed, wherever they are in dicts, lists and tuples."""
    packer = _Packer()
    shape = packer.pack(batch)
    content = torch.empty(packer.size, dtype=torch.uint8)
    memory = content.numpy()
    for start, part in packer.parts:
        memory[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
    return Packed(content, shape)


class _Packer:
    def __init__(self) -> None:
        self.size = 0
        self.parts: list[tuple[int, memoryview]] = []

    def pack(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if _is_plain(value) else value
        if isinstance(value, dict):
            return {name: self.pack(one) for name, one in value.items()}
        if isinstance(value, tuple):
            packed = [self.pack(one) for one in value]
            return type(value)(*packed) if hasattr(value, "_fields") else tuple(packed)
        if isinstance(value, list) and value:
            return self._list(value)
        return bytes(value) if isinstance(value, memoryview) else value

    def _list(self, values: list[Any]) -> Any:
        kinds = {type(one) for one in values}
        if kinds <= {bytes, bytearray, memoryview}:
            return _Bytes(self._put(b"".join(values)), [len(one) for one in values])
        if kinds == {str}:
            text = "".join(values).encode(errors="surrogatepass")
            return _Text(self._put(text), len(text), [len(one) for one in values])
        if kinds == {torch.Tensor} and _can_be_joined(values):
            joined = self._tensor(torch.cat(values))
            return _Tensors(joined.start, joined.dtype, [len(one) for one in values])
        return [self.pack(one) for one in values]

    def _tensor(self, tensor: torch.Tensor) -> _Tensor:
        plain = tensor.detach().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # A single element may have any stride, and be contiguous.
        content = flat.view(torch.uint8).numpy() if plain.numel() else b""
        return _Tensor(self._put(content), tensor.dtype, tuple(tensor.shape))

    def _put(self, content: Any) -> int:
        start = -(-self.size // _ALIGN) * _ALIGN
        part = memoryview(content)
        self.parts.append((start, part))
        self.size = start + part.nbytes
        return start


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are all there is to it."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return ordinary and tensor.device.type == "cpu" and not tensor.requires_grad


def _can_be_joined(tensors: list[torch.Tensor]) -> bool:
    return len({one.dtype for one in tensors}) == 1 and all(one.ndim == 1 and _is_plain(one) for one in tensors)


def unpack(packed: Packed) -> Any:
    """What was packed, as views of the content."""
    return _Unpacker(packed.content).unpack(packed.shape)


class _Unpacker:
    def __init__(self, content: torch.Tensor) -> None:
        self._content = content
        self._memory = content.numpy().data

    def unpack(self, value: Any) -> Any:  # noqa: PLR0911 (one a case)
        match value:
            case _Tensor(start, dtype, shape):
                return self._values(start, dtype, math.prod(shape)).reshape(shape)
            case _Tensors(start, dtype, lengths):
                return list(torch.split(self._values(start, dtype, sum(lengths)), lengths))
            case _Bytes(start, lengths):
                return _cut(self._memory[start:], lengths)
            case _Text(start, size, lengths):
                return _cut(str(self._memory[start : start + size], "utf-8", "surrogatepass"), lengths)
            case dict():
                return {name: self.unpack(one) for name, one in value.items()}
            case tuple():
                values = [self.unpack(one) for one in value]
                return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
            case list():
                return [self.unpack(one) for one in value]
        return value

    def _values(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        return self._content[start : start + count * dtype.itemsize].view(dtype)


def _cut(whole: Any, lengths: list[int]) -> list[Any]:
    ends = itertools.accumulate(lengths)
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]

"""Transport of batches from a worker: a pickle, whose tensors, arrays and views are beside it in the same buffer.

torch sends each tensor in a shared memory file of its own, which takes a descriptor and a millisecond. Up to
`PIPED_BYTES`, bytes through the pipe are faster.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dataload.rows.batch_tree import map_values

PIPED_BYTES = 256 << 10
_ALIGN = 16

Shape = tuple[int, ...]


class Packed(NamedTuple):
    """A packed batch.

    Attributes:
        content: Values, then the pickle, uint8 [n]; a bytearray, if they are sent through the pipe.
        pickle_start: Byte of the content at which the pickle begins.
    """

    content: torch.Tensor | bytearray
    pickle_start: int

    def pin_memory(self) -> Packed:
        """Return a copy in pinned memory. torch calls this on its pinning thread."""
        content = self.content
        if isinstance(content, bytearray):
            content = torch.frombuffer(content, dtype=torch.uint8)
        return self._replace(content=content.pin_memory())


def pack(batch: Any) -> Packed:
    """Pack a batch of any picklable values.

    Raises:
        RuntimeError: Shared memory is full.
        Exception: A value of the batch cannot be pickled. A queue would only print this error and send nothing.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(pickler.joined(batch))
    pickle_start = pickler.put(np.frombuffer(stream.getbuffer(), np.uint8))
    content = bytearray(pickler.size) if pickler.size <= PIPED_BYTES else _shared(pickler.size)
    memory = _memory(content)
    for start, array in pickler.arrays:
        np.ndarray(array.shape, array.dtype, memory, start)[...] = array
    return Packed(content, pickle_start)


def unpack(packed: Packed) -> Any:
    """Return the batch that was packed. Its tensors, arrays and views share the memory of the content."""
    return _Unpickler(packed).load()


def check_sendable(error: Exception) -> None:
    """Raise RuntimeError instead of an error whose type cannot be pickled. torch would send nothing, and wait for ever.

    torch sends the type and the text of an error, and not what it holds.
    """
    try:
        pickle.dumps(type(error))
    except Exception:  # noqa: BLE001 (a metaclass may raise anything)
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a contiguous view of a dense tensor, such as one in channels_last; None if it has gaps or overlaps."""
    turned = tensor.permute(_memory_order(tensor.stride()))
    return turned if turned.is_contiguous() else None


class _Pickler(pickle.Pickler):
    """Replaces tensors and arrays by calls of the methods of `_Content`, and collects their contents.

    Attributes:
        arrays: The values for the content, each with its start.
        size: Bytes of the content.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.arrays: list[tuple[int, npt.NDArray[Any]]] = []
        self.size = 0

    def put(self, array: npt.NDArray[Any]) -> int:
        """Add an array to the content. Return its start."""
        start = -(-self.size // _ALIGN) * _ALIGN
        if array.nbytes:
            self.arrays.append((start, array))
            self.size = start + array.nbytes
        return start

    def joined(self, value: Any, outermost: bool = True) -> Any:
        """Return the value with each column of views of bytes, and of arrays with rows of one shape, as one `_Call`.

        Columns are entries of dicts, of tuples, and of the outermost list. The rows of a column are not searched: they
        may be many nested values.
        """
        if type(value) is list:
            kinds = set(map(type, value))
            if kinds == {memoryview} and all(map(_is_bytes, value)):
                return _Call(_views, np.frombuffer(b"".join(value), np.uint8), [view.nbytes for view in value])
            if kinds == {torch.Tensor} and _can_be_joined(value):
                return _Call(list, _Call(torch.split, torch.cat(value), [len(vector) for vector in value]))
        if type(value) in (dict, tuple) or (outermost and type(value) is list):  # Subclasses may have other state.
            return map_values(value, partial(self.joined, outermost=False))
        return value

    def reducer_override(self, value: Any) -> Any:
        """Return the function and arguments that restore a value, or NotImplemented for pickle's own way."""
        if isinstance(value, torch.Tensor) and _is_plain(value):
            dense = in_memory_order(value)
            values, strides = (value, None) if dense is None else (dense, value.stride())
            return _Content.tensor, (self.put(_as_array(values)), value.dtype, tuple(value.shape), strides)
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            turned = value.transpose(_memory_order(value.strides))
            array, strides = (turned, value.strides) if turned.flags.c_contiguous else (value, None)
            return _Content.array, (self.put(array), value.dtype.str, value.shape, strides)
        if isinstance(value, memoryview):
            return (memoryview, (value.tobytes(),)) if _is_bytes(value) else (_view, (np.asarray(value), value.format))
        return NotImplemented


class _Call:
    """A call whose result takes the place of this object when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


class _Unpickler(pickle.Unpickler):
    """Restores a batch that a worker of this process packed."""

    def __init__(self, packed: Packed) -> None:
        self._content = _Content(packed.content)
        super().__init__(io.BytesIO(self._content.memory[packed.pickle_start :]))

    def find_class(self, module: str, name: str) -> Any:
        """Return a function or class of a pickle. A method of `_Content` is bound to the content of this batch."""
        owner, _, method = name.rpartition(".")
        is_own = module == __name__ and owner == _Content.__name__
        return getattr(self._content, method) if is_own else super().find_class(module, name)


class _Content:
    """The memory of a packed batch.

    It does not refer to the unpickler, which remembers its methods: such a cycle would keep each batch alive until the
    next collection of garbage.
    """

    def __init__(self, content: torch.Tensor | bytearray) -> None:
        self.memory = _memory(content)
        pinned = content if isinstance(content, torch.Tensor) and content.is_pinned() else None
        self._pinned = None if pinned is None else pinned.untyped_storage()

    def tensor(self, start: int, dtype: torch.dtype, shape: Shape, strides: Shape | None) -> torch.Tensor:
        """Return a tensor of the content. Without strides, it is in C order."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._pinned is None:
            values = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start)
        else:
            # torch identifies the pinned block of an asynchronous copy by the tensor's storage. With the separate
            # storage that `frombuffer` makes, torch would reuse the block before the copy is done.
            empty = torch.empty(0, dtype=dtype, device="cpu")
            values = empty.set_(self._pinned, start // dtype.itemsize, (count,), (1,))
        return values.reshape(shape) if strides is None else values.as_strided(shape, strides)

    def array(self, start: int, dtype: str, shape: Shape, strides: Shape | None) -> npt.NDArray[Any]:
        """Return an array of the content. Without strides, it is in C order."""
        return np.ndarray(shape, dtype, self.memory, start, strides)


def _views(joined: npt.NDArray[np.uint8], lengths: list[int]) -> list[memoryview]:
    memory = joined.data.toreadonly()
    ends = itertools.accumulate(lengths, initial=0)
    return [memory[first:last] for first, last in itertools.pairwise(ends)]


def _view(array: npt.NDArray[Any], code: Any) -> memoryview:
    """Return a view of an array with the format `code`, for which numpy may have another name, such as "l" for "q"."""
    view = array.data
    if view.format != code and len(code) == 1:
        flat = array.reshape(-1).view(np.uint8).data
        view = flat.cast(code) if array.ndim == 1 else flat.cast(code, array.shape)
    return view.toreadonly()


def _is_bytes(view: memoryview) -> bool:
    return view.format == "B" and view.ndim == 1 and view.c_contiguous


def _shared(size: int) -> torch.Tensor:
    """Return shared memory. A queue would move other memory there, but only print that it is full and send nothing."""
    try:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        memory.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            f"no shared memory for a batch of {size} bytes: {error}; if /dev/shm is full, give it more (docker run "
            "--shm-size), or lower batch_size, num_workers or prefetch"
        ) from error
    return memory


def _memory(content: torch.Tensor | bytearray) -> memoryview:
    return memoryview(content) if isinstance(content, bytearray) else content.numpy().data


def _memory_order(strides: Shape) -> list[int]:
    """Return the dimensions, that of the largest stride first."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def _as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    try:
        return tensor.numpy()
    except TypeError:  # numpy has no bfloat16
        return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether shape, dtype and elements are the whole state of a tensor."""
    dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    extra_state = tensor.is_conj() or tensor.is_neg() or tensor.requires_grad
    return dense and tensor.device.type == "cpu" and not extra_state


def _can_be_joined(tensors: list[torch.Tensor]) -> bool:
    return len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) == 1 and all(
        tensor.ndim and _is_plain(tensor) and (tensor.ndim == 1 or tensor.is_contiguous()) for tensor in tensors
    )

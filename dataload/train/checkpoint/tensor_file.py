"""A tensor that torch.save has written, within a file: its bytes are read straight to where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dataload.runtime.seekable import Seekable


class Part(Seekable):
    """A part of a file that is open, as a file.

    Args:
        file: The file.
        start: Where the part begins.
        length: Its bytes.
    """

    def __init__(self, file: Any, start: int, length: int) -> None:
        super().__init__(length)
        self._file, self._start = file, start

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(view) if view else 0
        self._position += count
        return count


def unsummed() -> AbstractContextManager[Any]:
    """Let torch.save compute no CRC32 in this thread, as long as it copies: the manifest has better checksums."""
    try:
        from torch.utils.serialization import config
    except ImportError:  # older releases of torch
        return nullcontext()
    changed: Any = config
    found: AbstractContextManager[Any] = changed.patch("save.compute_crc32", False)
    return found


def read_into(target: Tensor, part: Any, offsets: Sequence[int], lengths: Sequence[int]) -> None:
    """Fill `target` with the values of a tensor, or of a part of it.

    torch.load would compute a checksum and make a tensor, which had to be copied: it only tells where the bytes are.

    Args:
        target: Gets the values.
        part: A `Part` that torch.save has written, whose bytes have been verified or are as they are read.
        offsets: Where the part begins in the tensor that was saved.
        lengths: Its sizes.

    Raises:
        ValueError: The bytes of the tensor are not within those of the part, or it has other sizes.
        Exception: torch.load cannot read it.
    """
    layout = torch.load(part, map_location="meta", weights_only=True)
    begin = getattr(layout.untyped_storage(), "_checkpoint_offset", None)  # Older releases of torch lack it.
    is_whole = layout.is_contiguous() and not layout.storage_offset() and list(layout.size()) == list(lengths)
    if begin is None or not is_whole:
        part.seek(0)
        found = torch.load(part, map_location="cpu", weights_only=True)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            found = found.narrow(dim, offset, length)
        _copy(found, target)
        return
    is_plain = target.device.type == "cpu" and target.is_contiguous() and target.dtype == layout.dtype
    found = target if is_plain and target.size() == layout.size() else torch.empty_like(layout, device="cpu")
    values: Any = found.reshape(-1).view(torch.uint8).numpy()
    view = memoryview(values)
    part.seek(begin)
    done = 0
    while done < len(view):
        if not (count := part.readinto(view[done:])):
            raise ValueError("a tensor ends before its last value")
        done += count
    if found is not target:
        _copy(found, target)


def _copy(found: Tensor, target: Tensor) -> None:
    if found.size() != target.size():
        raise ValueError(f"a tensor has shape {list(found.size())}, not {list(target.size())}")
    target.copy_(found)

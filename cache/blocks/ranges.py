"""Concurrent reads of many ranges of many objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

from dataload.cache.blocks.reader import Blocks, Object
from dataload.errors import ObjectChanged

Range = tuple[Object, int, int]
"""Bytes [start, stop) of an object, 0 <= start and stop <= its size."""

S = TypeVar("S")
T = TypeVar("T")


def read_ranges(
    blocks: Blocks, ranges: Iterable[Range | Exception], changed: Callable[[Object], object], *, raises: bool = False
) -> list[bytes | Exception]:
    """Return the bytes of each range, or the exception of a failed read. Exceptions in `ranges` are passed through.

    Args:
        blocks: Reads the blocks.
        ranges: The ranges.
        changed: Called with an object when the origin no longer has this version.
        raises: As for `outcomes`.

    Notes:
        Ranges that share a block read it once. A block is released as soon as its bytes are copied.
    """
    requested = list(ranges)
    size = blocks.block_bytes
    cuts: dict[tuple[int, Object], list[tuple[int, int, int]]] = defaultdict(list)
    for index, item in enumerate(requested):
        if not isinstance(item, Exception):
            obj, start, stop = item
            for first in range(start // size * size, stop, size):
                cuts[first, obj].append((index, max(start, first), min(stop, first + size)))

    def read(block: tuple[int, Object]) -> list[tuple[int, bytes]]:
        lowest = min(low for _, low, _ in cuts[block])
        try:
            view = blocks.read(block[1], lowest, max(high for _, _, high in cuts[block]))
        except ObjectChanged:
            changed(block[1])
            raise
        return [(index, bytes(view[low - lowest : high - lowest])) for index, low, high in cuts[block]]

    errors = [item if isinstance(item, Exception) else None for item in requested]
    pieces: list[list[bytes]] = [[] for _ in requested]
    in_file_order = sorted(cuts, key=lambda block: block[0])
    for block, result in zip(in_file_order, outcomes(blocks, read, in_file_order, raises=raises), strict=True):
        if isinstance(result, Exception):
            for index, _, _ in cuts[block]:
                errors[index] = errors[index] or result
        else:
            for index, piece in result:
                pieces[index].append(piece)
    return [error or b"".join(own) for error, own in zip(errors, pieces, strict=True)]


def outcomes(
    blocks: Blocks, call: Callable[[S], T], items: Iterable[S], *, raises: bool = False
) -> list[T | Exception]:
    """Return the result of `call`, or its exception, for each item. The calls run concurrently.

    Args:
        blocks: Has the threads.
        call: The function.
        items: Its arguments.
        raises: Raise the first exception instead, and cancel the calls that have not begun.
    """

    def outcome(item: S) -> T | Exception:
        try:
            return call(item)
        except Exception as error:  # noqa: BLE001 (the caller gets every error)
            return error

    chosen: Callable[[S], T | Exception] = call if raises else outcome
    return blocks.map(chosen, items)

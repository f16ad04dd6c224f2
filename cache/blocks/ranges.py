"""Many ranges of many objects at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from typing import TypeVar

from dataload.cache.blocks.reader import Blocks, Object

Range = tuple[Object, int, int]
"""Bytes [start, stop) of an object, 0 <= start and stop <= its size."""

S = TypeVar("S")
T = TypeVar("T")


def read_ranges(blocks: Blocks, ranges: Iterable[Range | Exception]) -> list[bytes | Exception]:
    """The bytes of each range, or what went wrong with it; what is an exception already stays one.

    Notes: a block is looked up once, however many ranges share it, and held no longer than it takes to copy.
    """
    wanted = list(ranges)
    size = blocks.block_bytes
    cuts: dict[tuple[int, Object], list[tuple[int, int, int]]] = defaultdict(list)
    for index, one in enumerate(wanted):
        if not isinstance(one, Exception):
            obj, start, stop = one
            for first in range(start // size * size, stop, size):
                cuts[first, obj].append((index, max(start, first), min(stop, first + size)))

    def read(block: tuple[int, Object]) -> list[tuple[int, bytes]]:
        lowest = min(low for _, low, _ in cuts[block])
        view = blocks.read(block[1], lowest, max(high for _, _, high in cuts[block]))
        return [(index, bytes(view[low - lowest : high - lowest])) for index, low, high in cuts[block]]

    found = [one if isinstance(one, Exception) else None for one in wanted]
    pieces: list[list[bytes]] = [[] for _ in wanted]
    in_file_order = sorted(cuts, key=lambda block: block[0])
    for block, result in zip(in_file_order, outcomes(blocks, read, in_file_order), strict=True):
        if isinstance(result, Exception):
            for index, _, _ in cuts[block]:
                found[index] = found[index] or result
        else:
            for index, piece in result:
                pieces[index].append(piece)
    return [error or b"".join(own) for error, own in zip(found, pieces, strict=True)]


def outcomes(blocks: Blocks, call: Callable[[S], T], items: Iterable[S]) -> list[T | Exception]:
    """What `call` gives for each of `items`, or the exception that it raises, many at a time."""

    def outcome(item: S) -> T | Exception:
        try:
            return call(item)
        except Exception as error:  # noqa: BLE001 (whatever it is, the caller hears of it)
            return error

    futures = [blocks.submit(outcome, item) for item in items]
    wait(futures)
    return [future.result() for future in futures]

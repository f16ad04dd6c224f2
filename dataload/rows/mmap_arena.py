"""Runs of records from many blobs side by side in one range of addresses, so that one gather reads from all of them."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np

from dataload.rows.arrow_decode import Array
from dataload.runtime.filemap import MAP_FIXED, MAP_NORESERVE, POPULATE_READ, libc, os_error

_WORD = np.dtype(np.int64)
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2  # mremap(2)


class MmapArena:
    """`slots` places for at most `rows` records of `itemsize` bytes (a multiple of 8) each.

    What is put into a slot is mapped there a second time where it is a map of a file, which takes no memory of its own,
    and copied where it is not. The arena lets go of a file only when its slot is cleared.

    Notes: not for several threads at once. Takes addresses, not memory: a slot is as wide as a page and a record allow
    at their least common multiple, so that a record's place in the arena is a whole number of records.
    """

    def __init__(self, slots: int, rows: int, itemsize: int) -> None:
        step = math.lcm(mmap.PAGESIZE, itemsize)
        self._slot_bytes = -(-rows * itemsize // step) * step
        self.rows_per_slot = self._slot_bytes // itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, slots * self._slot_bytes, flags=flags, prot=mmap.PROT_READ)
        self._address = _address_of(self._map)
        words = np.frombuffer(self._map, _WORD)
        self._records = words.reshape(-1, itemsize // _WORD.itemsize)

    def put(self, slot: int, records: memoryview) -> None:
        """Fill a slot with the bytes of its records."""
        self.clear(slot)
        if records:
            place = self._address + slot * self._slot_bytes
            if not _map_again(records, place):
                _map_memory(place, len(records), mmap.PROT_READ | mmap.PROT_WRITE)
                ctypes.memmove(place, _address_of(records), len(records))

    def clear(self, slot: int) -> None:
        """Let go of what a slot holds."""
        _map_memory(self._address + slot * self._slot_bytes, self._slot_bytes, mmap.PROT_READ)

    def take(self, places: Array) -> Array:
        """The records at these places (int64 [n]; slot times `rows_per_slot`, and row): int64 [n, words], copied."""
        return np.take(self._records, places, axis=0, mode="clip")  # to raise for places outside takes twice as long


def _address_of(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _map_memory(address: int, size: int, protection: int) -> None:
    """Empty memory in place of whatever these addresses held. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    if libc().mmap(address, size, protection, flags, -1, 0) != address:
        raise os_error("mapping memory")


def _map_again(memory: memoryview, address: int) -> bool:
    """Have `address` show the same pages of a file as `memory` does; False when it is no shared map.

    mremap(2): "If the value of old_size is zero, and old_address refers to a shareable mapping, then mremap() will
    create a new mapping of the same pages."
    """
    size = -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
    # Somewhere first: older kernels empty the place they are told before they refuse, for other threads to map into.
    again = libc().mremap(_address_of(memory), 0, size, _MREMAP_MAYMOVE, None)
    if again in (None, ctypes.c_void_p(-1).value):
        return False
    if libc().mremap(again, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) != address:
        libc().munmap(again, size)
        return False
    libc().madvise(address, size, POPULATE_READ)  # an older kernel goes without
    return True

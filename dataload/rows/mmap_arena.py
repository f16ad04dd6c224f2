"""An arena of records from many blobs in one address range, so that one gather reads from all of them."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.rows.columns import Array
from dataload.runtime.filemap import MAP_FIXED, MAP_NORESERVE, is_file_map, libc, map_error, read_in

LONG_RECORD = 1 << 20  # bytes; from here on, a copy takes much longer than the call for it

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2  # mremap(2)


class MmapArena:
    """An address range of slots for records.

    Records that are a map of a file are mapped into their slot a second time, which takes no further memory. Other
    records are copied. The arena keeps a file mapped until its slot is cleared.

    Args:
        slots: Number of slots.
        rows: Records of a slot, at most.
        itemsize: Bytes of a record.

    Attributes:
        rows_per_slot: Records from the start of a slot to the start of the next.

    Notes:
        One thread at a time may call it. It reserves addresses, not memory: the width of a slot is a multiple of both
        the page size and the record size, so that each slot starts at a whole record. With long records, such slots
        would take more addresses than a process has. The width is a multiple of the page size then, and `take` copies
        record by record.
    """

    def __init__(self, slots: int, rows: int, itemsize: int) -> None:
        self._itemsize = itemsize
        self._is_long = itemsize >= LONG_RECORD
        step = mmap.PAGESIZE if self._is_long else math.lcm(mmap.PAGESIZE, itemsize)
        self._slot_bytes = -(-rows * itemsize // step) * step
        self.rows_per_slot = self._slot_bytes // itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, slots * self._slot_bytes, flags=flags, prot=mmap.PROT_READ)
        self._address = _address_of(self._map)
        self._records = np.frombuffer(self._map, np.uint8).reshape(-1, self._slot_bytes if self._is_long else itemsize)

    def put(self, slot: int, records: memoryview) -> None:
        """Replace the content of a slot by the bytes of records."""
        self.clear(slot)
        if records:
            address = self._address + slot * self._slot_bytes
            if not _map_again(records, address):
                _map_memory(address, len(records), mmap.PROT_READ | mmap.PROT_WRITE)
                ctypes.memmove(address, _address_of(records), len(records))

    def clear(self, slot: int) -> None:
        """Unmap the content of a slot."""
        _map_memory(self._address + slot * self._slot_bytes, self._slot_bytes, mmap.PROT_READ)

    def take(self, positions: Array) -> Array:
        """Return copies of records, uint8 [n, itemsize].

        Args:
            positions: Index of each record, slot * `rows_per_slot` + row, int64 [n].
        """
        if not self._is_long:
            return np.take(self._records, positions, axis=0, mode="clip")  # mode="raise" takes twice as long
        found = np.empty((len(positions), self._itemsize), np.uint8)
        for record, position in zip(found, positions.tolist(), strict=True):
            slot, row = divmod(position, self.rows_per_slot)
            record[:] = self._records[slot, row * self._itemsize : (row + 1) * self._itemsize]
        return found


def _address_of(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _map_memory(address: int, size: int, protection: int) -> None:
    """Map zeroed memory at an address, in place of what was mapped there.

    Raises:
        ConfigError: The process has as many maps as it may have.
        OSError: The kernel cannot map the memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    if libc().mmap(address, size, protection, flags, -1, 0) != address:
        error = map_error("opening a row group")
        if error.errno == errno.ENOMEM:
            raise ConfigError(error.strerror) from error
        raise error


def _map_again(memory: memoryview, address: int) -> bool:
    """Map the file pages of `memory` at `address` as well. Return False if this is not Linux or no `FileMap`.

    mremap(2): "If the value of old_size is zero, and old_address refers to a shareable mapping, then mremap() will
    create a new mapping of the same pages." For private memory, kernels before 4.14 return an unrelated map.

    Raises:
        OSError: The disk cannot read the pages, so that the first access would end this process by SIGBUS.
    """
    if not is_file_map(memory) or not hasattr(libc(), "mremap"):
        return False
    size = -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
    # Map anywhere first, then move: with a fixed address, older kernels unmap the target before they fail. Another
    # thread could map its memory there.
    again = libc().mremap(_address_of(memory), 0, size, _MREMAP_MAYMOVE, None)
    if again in (None, ctypes.c_void_p(-1).value):
        return False
    if libc().mremap(again, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) != address:
        libc().munmap(again, size)
        return False
    read_in(address, size, "the rows of an open row group")
    return True

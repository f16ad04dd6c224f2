"""Read-only maps of files that hold no descriptor: Python's own keeps one for each map."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of mmap(2)
POPULATE_READ = 22  # MADV_POPULATE_READ of madvise(2), Linux 5.14


@functools.cache
def libc() -> Any:
    """The C library, with the types of what is called here."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mremap.restype = ctypes.c_void_p
    library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return library


def max_maps() -> int:
    """How many maps a process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530  # Linux's default


def os_error(doing: str) -> OSError:
    """The error that the last call of the C library met."""
    number = ctypes.get_errno()
    return OSError(number, f"{doing}: {os.strerror(number)}")


class FileMap:
    """The first `size` bytes of an open file, at least one; unmapped when no view of them is left. Raises OSError."""

    def __init__(self, descriptor: int, size: int) -> None:
        address = libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise os_error(f"mapping {size} bytes")
        self.address: int = address
        content = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(content, libc().munmap, address, size).atexit = False
        self.view = memoryview(content).cast("B").toreadonly()

    def populate(self, start: int, stop: int) -> None:
        """Have the pages of these bytes read in now. Raises OSError where that cannot be done."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if libc().madvise(self.address + first, stop - first, POPULATE_READ):
            raise os_error("reading pages in")

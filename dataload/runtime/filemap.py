"""Read-only file maps without an open descriptor; Python's own `mmap` keeps one descriptor per map."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

MAP_FIXED = 0x10  # of mmap(2)
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_POPULATE_READ = 22  # MADV_POPULATE_READ of madvise(2), Linux 5.14; earlier kernels answer EINVAL
DEFAULT_MAX_MAPS = 65_530  # of Linux


@functools.cache
def libc() -> Any:
    """Return the C library, with the argument types of the functions used here."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if hasattr(library, "mremap"):  # only Linux has it
        library.mremap.restype = ctypes.c_void_p
        library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return library


def max_maps() -> int:
    """Return how many memory maps the kernel allows a process."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return DEFAULT_MAX_MAPS


def is_file_map(memory: memoryview) -> bool:
    """Return whether memory is of a `FileMap`, so that it is in the page cache and not of this process alone."""
    return isinstance(memory.obj, ctypes.Array)


def read_in(address: int, size: int, named: str | Path) -> None:
    """Read the mapped pages from `address` on now, so that a disk error is no SIGBUS at the first access.

    An older kernel reads the pages at their first access.

    Args:
        address: Start of a page.
        size: Number of bytes.
        named: Name of the bytes in the error.

    Raises:
        OSError: The disk cannot read the pages. The number is EIO.
    """
    if libc().madvise(address, size, _POPULATE_READ) and ctypes.get_errno() != errno.EINVAL:
        raise OSError(errno.EIO, f"the disk cannot read {named}")


def map_error(doing: str) -> OSError:
    """Return the error of the last failed `mmap` of the C library. It has the number ENOMEM at the limit of maps."""
    number = ctypes.get_errno()
    if number != errno.ENOMEM:
        return OSError(number, f"{doing}: {os.strerror(number)}")
    limits = f"raise vm.max_map_count (sysctl; it is {max_maps()}) or the limit of addresses (ulimit -v)"
    return OSError(
        errno.ENOMEM,
        f"{doing}: this process may have no further memory map: {limits}, or use a smaller batch or window",
    )


class FileMap:
    """A map of the first `size` bytes of an open file. The map ends with the last view of it.

    Args:
        descriptor: The open file. It may be closed as soon as the map exists.
        size: Bytes to map, at least 1.

    Raises:
        OSError: The kernel cannot map the file, with the number ENOMEM at the limit of maps.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        address = libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise map_error(f"mapping {size} bytes")
        self.address: int = address
        content = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(content, libc().munmap, address, size).atexit = False
        self.view = memoryview(content).cast("B").toreadonly()

    def read_in(self, start: int, stop: int, named: str | Path) -> None:
        """Read the pages of bytes `start` to `stop` now. See the function `read_in`."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        read_in(self.address + first, stop - first, named)

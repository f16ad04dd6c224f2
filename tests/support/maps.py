"""A process that can make no memory map."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dataload.runtime.filemap import MAP_FIXED, MAP_NORESERVE, libc, max_maps

MOST = 1 << 20  # maps; more take too long


@contextmanager
def no_more_maps() -> Iterator[None]:
    """Use up the maps that the kernel allows this process."""
    if max_maps() > MOST:
        pytest.skip(f"this machine allows {max_maps()} memory maps: it takes too long to make all of them")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    size = 2 * max_maps() * mmap.PAGESIZE
    start = libc().mmap(None, size, mmap.PROT_READ, flags, -1, 0)
    address, mapped = start, start
    try:
        while mapped == address:  # Each page of another protection divides a map.
            address += 2 * mmap.PAGESIZE
            mapped = libc().mmap(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags | MAP_FIXED, -1, 0)
        yield
    finally:
        libc().munmap(start, size)

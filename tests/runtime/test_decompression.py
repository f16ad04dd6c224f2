from __future__ import annotations

import tracemalloc
import zlib

import pytest

from dataload.runtime.decompression import decompressed

DATA = bytes(range(256)) * 400


def test_all_bytes_up_to_the_limit_come_back() -> None:
    assert decompressed(zlib.compress(DATA), len(DATA)) == DATA
    assert decompressed(zlib.compress(b""), 0) == b""
    assert decompressed(zlib.compress(DATA, wbits=31), len(DATA), 31) == DATA


@pytest.mark.parametrize("data", [zlib.compress(DATA)[:-1], zlib.compress(DATA + b"x"), b"nonsense", b""])
def test_others_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut off, or more than 102,400 bytes|not compressed by zlib"):
        decompressed(data, len(DATA))


def test_no_more_memory_is_taken_than_the_limit() -> None:
    data = zlib.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 100 bytes"):
            decompressed(data, 100)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20

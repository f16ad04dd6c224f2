"""Pages of a file that are read in before their first access."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from dataload.runtime import filemap
from dataload.runtime.filemap import FileMap

UNKNOWN_ADVICE = 9999  # which each kernel answers as one before 5.14 answers MADV_POPULATE_READ


@pytest.fixture
def cut_short(tmp_path: Path) -> FileMap:
    """Return a map of more than its file has, which the kernel reports like an unreadable sector."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as opened:
        mapped = FileMap(opened.fileno(), 1 << 20)
    os.truncate(path, mmap.PAGESIZE)
    return mapped


def test_a_disk_that_cannot_read_is_an_error_and_no_signal(cut_short: FileMap) -> None:
    cut_short.read_in(0, mmap.PAGESIZE, "the first page")
    with pytest.raises(OSError, match="the disk cannot read the other pages") as caught:
        cut_short.read_in(2 * mmap.PAGESIZE + 1, 1 << 20, "the other pages")
    assert caught.value.errno == errno.EIO


def test_a_kernel_that_reads_no_pages_in_is_no_error(cut_short: FileMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filemap, "_POPULATE_READ", UNKNOWN_ADVICE)
    cut_short.read_in(0, 1 << 20, "all pages")

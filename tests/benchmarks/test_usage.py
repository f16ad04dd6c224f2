"""The peak memory of measured processes."""

from __future__ import annotations

import mmap
from pathlib import Path
from tempfile import NamedTemporaryFile

import psutil
import pytest

from dataload.benchmarks.machine import usage
from dataload.benchmarks.machine.usage import PeakMemory

SIZE = 64 << 20


def test_the_peak_is_that_of_anonymous_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "in_shared_memory", lambda: 0)  # Other tests use it.
    peak, process = PeakMemory(), psutil.Process()
    peak.sample([process])
    before = peak.num_bytes
    file = tmp_path / "cached"
    file.write_bytes(bytes(SIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        peak.sample([process])
    assert before <= peak.num_bytes < before + SIZE // 2
    filled = bytearray(b"1" * SIZE)
    peak.sample([process])
    del filled
    peak.sample([process])
    assert peak.num_bytes >= before + 0.9 * SIZE


def test_the_peak_counts_shared_memory_that_no_process_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the batches of torch's workers lie in a queue."""
    used = iter([SIZE, SIZE, 2 * SIZE, 0])
    monkeypatch.setattr(usage, "in_shared_memory", lambda: next(used))
    peak, process = PeakMemory(), psutil.Process()
    peak.sample([process])
    before = peak.num_bytes
    peak.sample([process])
    assert peak.num_bytes >= before + 0.8 * SIZE
    peak.num_bytes = before // 2
    peak.sample([process])  # /dev/shm has lost what was there before
    assert peak.num_bytes >= 0.8 * before


def test_files_in_shared_memory_are_in_use() -> None:
    with NamedTemporaryFile(dir="/dev/shm") as file:
        before = usage.in_shared_memory()
        file.write(bytes(4 * SIZE))
        assert usage.in_shared_memory() > before


def test_a_process_of_less_memory_than_before_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read `smaps_rollup` takes 20 ms of a process that maps 5 GB, which cannot map a batch meanwhile."""
    read: list[str] = []
    memory = usage.memory
    monkeypatch.setattr(
        usage, "memory", lambda pids, file, *fields: [read.append(file), memory(pids, file, *fields)][1]
    )
    monkeypatch.setattr(usage, "in_shared_memory", lambda: 0)
    peak, process = PeakMemory(), psutil.Process()
    peak.sample([process])
    assert read == ["status", "smaps_rollup"]
    peak.num_bytes += SIZE
    peak.sample([process])
    assert read == ["status", "smaps_rollup", "status"]

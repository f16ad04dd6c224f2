"""Processor time and memory of processes and their children."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from pathlib import Path
from time import process_time

import psutil

SAMPLE_SECONDS = 0.2


def cpu_seconds() -> float:
    """Return the user and system time of this process and all its children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = process_time() + children.ru_utime + children.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def peak_memory(process: psutil.Popen, patience: float) -> int:
    """Return the peak memory of a process and its children until it exits, for at most `patience` seconds."""
    peak, until = 0, time.monotonic() + patience
    while time.monotonic() < until:
        peak = max(peak, memory(process))
        with suppress(psutil.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
            break
    return peak


def memory(process: psutil.Process) -> int:
    """Return the memory of a process and its children in bytes.

    It is anonymous and shared memory, each page once, without the page cache.
    """
    with suppress(psutil.NoSuchProcess):
        return sum(_memory(member.pid) for member in [process, *process.children(recursive=True)])
    return 0


def _memory(pid: int) -> int:
    """Return the memory of a process in bytes, by proc_pid_smaps(5)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # The process has exited.
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))

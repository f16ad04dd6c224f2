"""Processor time and memory of processes and their children."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import process_time

import psutil

SAMPLE_SECONDS = 0.2  # between two samples of memory


def cpu_seconds() -> float:
    """Return the user and system time of this process and all its children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = process_time() + children.ru_utime + children.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


class PeakMemory:
    """The most memory that processes and their children used together, by samples.

    It is anonymous and shared memory, each page once, without the page cache. The batches of torch's workers lie in
    shared memory that no process maps while they wait in a queue. So what /dev/shm has gained counts, if it is more
    than the processes map. The kernel takes 20 ms to add up the memory of a process that maps 5 GB, and meanwhile the
    process cannot change its maps. So a sample asks for it only if the sum may be larger than before.

    Attributes:
        num_bytes: The most memory of a sample.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._before = in_shared_memory()

    def sample(self, processes: Iterable[psutil.Process]) -> None:
        """Take a sample."""
        pids = with_children(processes)
        gained = max(0, in_shared_memory() - self._before)
        if sum(memory(pids, "status", "RssAnon:", "RssShmem:")) + gained > self.num_bytes:
            anonymous, shared = memory(pids, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:")
            self.num_bytes = max(self.num_bytes, anonymous + max(shared, gained))


def in_shared_memory() -> int:
    """Return the bytes in use on /dev/shm, of all programs of this machine."""
    usage = os.statvfs("/dev/shm")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def with_children(processes: Iterable[psutil.Process]) -> list[int]:
    """Return the pids of processes and their children."""
    pids = list[int]()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            pids += [process.pid, *(child.pid for child in process.children(recursive=True))]
    return pids


def memory(pids: Iterable[int], file: str, *fields: str) -> list[int]:
    """Return the bytes of each of the fields of a file of proc(5), over all these processes."""
    total = dict.fromkeys(fields, 0)
    for pid in pids:
        with suppress(OSError):  # The process has exited.
            for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                name, *amount = line.split()
                if name in total:
                    total[name] += int(amount[0]) << 10
    return list(total.values())

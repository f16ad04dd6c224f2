"""The cores and the memory that a process may use, with control groups of version 1 and 2."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

MEMORY_DIVISOR = 8  # One part in eight of the usable memory is for row groups in flight, held and being decoded.
MOUNTED = Path("/sys/fs/cgroup")  # where the control groups are, see cgroups(7); only Linux has them
MEMBERSHIP = Path("/proc/self/cgroup")  # the control groups of this process


def usable_cores() -> int:
    """Return the number of cores that affinity and the quota of the container allow this process, at least 1."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(bound, host_cores())


def host_cores() -> int:
    """Return the number of cores of the host, or of the quota of the container, at least 1."""
    cores = os.cpu_count() or 1
    for file in _limit_files("cpu", "cpu.cfs_quota_us", "cpu.max"):
        with suppress(OSError, ValueError):  # The file is missing, or says "max".
            quota, *period = map(int, file.read_text().split())
            of_each = period or [int((file.parent / "cpu.cfs_period_us").read_text())]
            if quota > 0:  # -1: no limit
                cores = min(cores, quota // of_each[0])
    return max(1, cores)


def usable_memory() -> int:
    """Return the bytes of RAM that this process may use: those of the machine, or the limit of its control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files("memory", "memory.limit_in_bytes", "memory.max"):
        with suppress(OSError, ValueError):  # The file is missing, or says "max".
            limits.append(int(file.read_text()))
    return min(limits)


@cache  # A mixture of hundreds of datasets asks for each of them.
def _limit_files(controller: str, first: str, second: str) -> list[Path]:
    """Return the files that limit a resource of this process: those of its control group and of all groups above it.

    Args:
        controller: The name of the resource's controller.
        first: The name of the file in version 1.
        second: The name of the file in version 2.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root, name = (MOUNTED / controller, first) if controllers else (MOUNTED, second)
            folder = Path(os.path.normpath(f"{root}/{group}"))
            files += [root / name, *(above / name for above in (folder, *folder.parents) if above.is_relative_to(root))]
    return files

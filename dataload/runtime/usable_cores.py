"""The processor cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that affinity and the quota of the container allow this process, at least 1.

    Args:
        quota: The file with the quota and the period of the control group, see cgroups(7). Only Linux has it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text().split()
        return max(1, min(cores, int(share) // int(period)))
    except (OSError, ValueError):
        return cores

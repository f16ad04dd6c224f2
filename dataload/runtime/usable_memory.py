"""The memory that a process may use."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_memory(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of RAM that this process may use: those of the machine, or the limit of its control group.

    Args:
        cgroups: Where the control groups are mounted.
        membership: The file with the control groups of this process, see cgroups(7).
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files(cgroups, membership):
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # The file is missing, or says "max".
            continue
    return min(limits)


@cache  # A mixture of hundreds of datasets asks for each of them.
def _limit_files(cgroups: Path, membership: Path) -> list[Path]:
    """Return the files that limit the memory of this process: those of its control group and all groups above it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
            folder = Path(os.path.normpath(f"{root}/{group}"))
            files += [root / name, *(above / name for above in (folder, *folder.parents) if above.is_relative_to(root))]
    return files

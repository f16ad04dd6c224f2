"""The memory that a process may use, with the control groups of version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataload.runtime.usable_memory import usable_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/job/rank\n", {"job/memory.max": "1000000\n", "job/rank/memory.max": "max\n"}, 1_000_000),
        ("0::/job/rank\n", {"job/memory.max": "1000000\n", "job/rank/memory.max": "5000\n"}, 5000),
        ("0::/\n", {"memory.max": "7000\n"}, 7000),
        ("4:cpu:/x\n9:memory:/job\n", {"memory/job/memory.limit_in_bytes": "6000\n"}, 6000),
        ("0::/job\n", {}, MACHINE),
        ("0::/job\n", {"job/memory.max": f"{MACHINE * 2}\n"}, MACHINE),
        ("0::/../outside\n", {"memory.max": "7000\n"}, 7000),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    groups = written(tmp_path / "cgroup", files)
    of_this_process = written(tmp_path, {"membership": membership}) / "membership"
    assert usable_memory(groups, of_this_process) == expected


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert usable_memory(tmp_path, tmp_path / "missing") == MACHINE

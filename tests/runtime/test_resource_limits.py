"""The cores and the memory that a process may use, with control groups of version 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataload.runtime import resource_limits
from dataload.runtime.resource_limits import usable_cores, usable_memory

ALL = len(os.sched_getaffinity(0))
V1 = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


Limit = Callable[[str, dict[str, str]], None]


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    """Put this process into control groups. An empty membership is that of a system without them."""

    def use(membership: str, files: dict[str, str]) -> None:
        if membership:
            (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "cgroup" / name).write_text(content)
        monkeypatch.setattr(resource_limits, "MOUNTED", tmp_path / "cgroup")
        monkeypatch.setattr(resource_limits, "MEMBERSHIP", tmp_path / "membership")
        resource_limits._limit_files.cache_clear()

    yield use
    monkeypatch.undo()
    resource_limits._limit_files.cache_clear()


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, ALL),
        ("0::/\n", {"cpu.max": f"{(ALL + 1) * 100000} 100000\n"}, ALL),
        ("0::/\n", {"cpu.max": ""}, ALL),
        ("0::/job/rank\n", {"job/cpu.max": "100000 100000\n", "job/rank/cpu.max": "max 100000\n"}, 1),
        ("3:cpu,cpuacct:/\n", {V1[0]: "100000\n", V1[1]: "100000\n"}, 1),
        ("3:cpu,cpuacct:/\n", {V1[0]: "-1\n", V1[1]: "100000\n"}, ALL),
        ("9:memory:/\n", {V1[0]: "100000\n", V1[1]: "100000\n"}, ALL),
    ],
)
def test_the_quota_of_the_container_counts(limit: Limit, membership: str, files: dict[str, str], expected: int) -> None:
    limit(membership, files)
    assert usable_cores() == expected


def test_other_systems_count_all_cores(limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    limit("", {})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6


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
def test_the_smallest_limit_counts(limit: Limit, membership: str, files: dict[str, str], expected: int) -> None:
    limit(membership, files)
    assert usable_memory() == expected


def test_without_control_groups_the_machine_is_the_limit(limit: Limit) -> None:
    limit("", {})
    assert usable_memory() == MACHINE

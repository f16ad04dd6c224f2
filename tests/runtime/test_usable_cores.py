"""The cores that a process may use, by affinity and quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataload.runtime.usable_cores import usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("max 100000\n", ALL),
        (f"{(ALL + 1) * 100000} 100000\n", ALL),
        ("", ALL),
    ],
)
def test_the_quota_of_the_container_counts(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == expected


def test_other_systems_count_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path / "missing") == 6

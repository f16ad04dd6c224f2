from math import inf
from pathlib import Path

import psutil
import pytest

from dataload.benchmarks.machine import hot_memory
from dataload.benchmarks.machine.hot_memory import HUGE, HotMemory, keep


def memory_of(folder: Path, least: float) -> HotMemory:
    return HotMemory(folder, num_bytes=4 * HUGE, pause=0, control_bytes=1 << 20, least=least)


def test_a_machine_whose_memory_is_hot_is_left_alone(tmp_path: Path) -> None:
    with memory_of(tmp_path, least=0) as memory:
        assert memory.ensure() > 0
        assert not memory.is_kept
    assert not list(tmp_path.iterdir())


def test_a_process_keeps_memory_after_a_failed_control_and_ends_with_the_benchmark(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with memory_of(tmp_path, least=inf) as memory:
        assert 0 < memory.ensure() < inf
        assert memory.is_kept
        [child] = set(psutil.Process().children()) - before
    assert not child.is_running()


def test_the_default_is_half_of_what_the_control_group_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_memory, "usable_memory", lambda: 8 * HUGE)
    before = set(psutil.Process().children())
    with HotMemory(tmp_path, pause=0, control_bytes=1 << 20, least=inf) as memory:
        memory.ensure()
        [child] = set(psutil.Process().children()) - before
        assert child.cmdline()[-1] == str(4 * HUGE)


def test_a_benchmark_goes_on_without_a_process_that_gets_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(psutil.Process().children())
    with HotMemory(tmp_path, num_bytes=1 << 60, pause=0, control_bytes=1 << 20, least=inf) as memory:
        assert 0 < memory.ensure() < inf
        assert not memory.is_kept
        assert set(psutil.Process().children()) == before
    assert "runs without" in caplog.text


def test_one_page_of_each_huge_page_is_kept() -> None:
    before = psutil.Process().memory_info().rss
    memory = keep(64 * HUGE)
    kept = psutil.Process().memory_info().rss - before
    memory.close()
    assert kept < 4 * HUGE

from math import inf
from pathlib import Path

import psutil

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


def test_one_page_of_each_huge_page_is_kept() -> None:
    before = psutil.Process().memory_info().rss
    memory = keep(64 * HUGE)
    kept = psutil.Process().memory_info().rss - before
    memory.close()
    assert kept < 4 * HUGE

"""One thread makes a result, and the others wait for it without the resources that making it takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clusters import until
from tiers import LIMIT, data_of, fill_of, key

from dataload.cache.local.tier import LocalTier
from dataload.cache.memory import MemoryTier
from dataload.cache.single_flight import make_once
from dataload.cache.tier import Tier
from dataload.runtime.memory_budget import MemoryBudget


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_wait_for_another_thread_holds_no_reservation(kind: str, tmp_path: Path) -> None:
    tier: Tier = LocalTier(tmp_path / "cache", LIMIT) if kind == "local" else MemoryTier(LIMIT)
    budget, reserved, made = MemoryBudget(2), list[str](), list[str]()
    second_is_free = threading.Event()

    @contextmanager
    def reserve() -> Iterator[None]:
        with budget.reserve(1):
            reserved.append(threading.current_thread().name)
            yield

    def make() -> memoryview:
        made.append(threading.current_thread().name)
        assert second_is_free.wait(200)
        return tier.get_or_fill(key("x/0"), fill_of("x/0"))

    def ask() -> None:
        assert make_once(tier, key("lock"), lambda: tier.get(key("x/0")), make, reserve) == data_of("x/0")

    threads = [threading.Thread(target=ask, name=name) for name in ("first", "second")]
    threads[0].start()
    until(lambda: made)
    threads[1].start()
    until(lambda: "second" in reserved)
    try:
        until(lambda: budget.fits(1))
    finally:
        second_is_free.set()
        for thread in threads:
            thread.join(200)
    assert made == ["first"]

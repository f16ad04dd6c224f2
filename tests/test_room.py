"""What does not fit is said before it goes wrong."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from dataload.allowance import Allowance
from dataload.room import check_shared_memory


def test_batches_that_shared_memory_cannot_hold(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_shared_memory(500_000, str(small_disk))
    check_shared_memory(2_000_000, str(small_disk / "nothing"))
    assert not caplog.records
    check_shared_memory(2_000_000, str(small_disk))
    assert re.search(r"2000000 bytes of batches in .*, which has \d+ free: lower batch_size", caplog.text)


def test_an_allowance_is_never_overdrawn() -> None:
    allowance, held, most = Allowance(10), [0], [0]
    mutex = threading.Lock()

    def work(units: int) -> None:
        for _ in range(200):
            with allowance.hold(units):
                with mutex:
                    held[0] += min(units, 10)
                    most[0] = max(most[0], held[0])
                with mutex:
                    held[0] -= min(units, 10)

    threads = [threading.Thread(target=work, args=(units,)) for units in (1, 3, 4, 7, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] <= 10

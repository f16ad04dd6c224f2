"""The anonymous memory of processes over time, seen from outside: a sample takes no interpreter lock of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread
from typing import Self

import psutil

from dataload.benchmarks.machine.usage import memory, with_children

SAMPLE_SECONDS = 0.1  # between two samples


class PeakGrowth:
    """Samples the anonymous memory of processes and their children for the duration of a block.

    Args:
        pids: The processes.

    Attributes:
        num_bytes: The most that they had in addition to what they had before.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.num_bytes = 0
        self._processes = [psutil.Process(pid) for pid in pids]
        self._before = self._anonymous()
        self._end = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            self.num_bytes = max(self.num_bytes, self._anonymous() - self._before)

    def _anonymous(self) -> int:
        return sum(memory(with_children(self._processes), "status", "RssAnon:"))

"""The anonymous memory of processes over time, seen from outside: a sample takes no interpreter lock of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Self

import psutil

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
        total = 0
        for process in self._processes:
            with suppress(psutil.NoSuchProcess, OSError):  # It has exited.
                for each in (process, *process.children(recursive=True)):
                    lines = Path(f"/proc/{each.pid}/status").read_text().splitlines()
                    total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
        return total

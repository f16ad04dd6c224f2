"""Memory that a virtual machine owns already, for the time of a benchmark.

With free-page reporting, a host takes back memory that has been free for about two seconds. The next write to it waits
for the host: 2.7 s for each GB, measured, instead of 0.1 s. That costs a cache or a decoder far more than its own work.
The guest reports free blocks of 2 MiB and more only. So a process writes to much memory and frees all but one page of
each 2 MiB. The rest stays free for all processes, in blocks too small to report.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter, sleep
from typing import Self

import psutil

from dataload.runtime.resource_limits import usable_memory

HUGE, PAGE = 2 << 20, mmap.PAGESIZE
PART = bytes(1 << 20)
READY = "ready\n"
ATTEMPTS = 3
LEAST_BYTES_PER_SECOND = 1e9
SHARE = 0.5  # of the memory that is available

logger = logging.getLogger("dataload")


class HotMemory:
    """A process that keeps free memory with the machine, started once a control shows that it is needed.

    Args:
        folder: Folder of the file that the control writes.
        num_bytes: Memory to keep. Default: half of what is available to this process.
        pause: Seconds of idling before the control writes.
        control_bytes: Bytes that the control writes.
        least: Bytes per second that the control demands.

    Example:
        ```python
        with HotMemory(folder) as memory:
            rate = memory.ensure()
        ```
    """

    def __init__(
        self,
        folder: Path,
        num_bytes: int | None = None,
        pause: float = 10.0,
        control_bytes: int = 1 << 30,
        least: float = LEAST_BYTES_PER_SECOND,
    ) -> None:
        self._folder = folder
        self._num_bytes = num_bytes
        self._pause = pause
        self._control_bytes = control_bytes
        self._least = least
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def is_kept(self) -> bool:
        """Whether a process keeps memory."""
        return self._process is not None

    def ensure(self) -> float:
        """Return the bytes per second of a file written after a pause. If they are too few, keep memory and repeat.

        After three attempts, or if the memory cannot be kept, the rate of the last one is returned.
        """
        rate = self._control()
        for _ in range(ATTEMPTS - 1):
            if rate >= self._least:
                break
            self._keep()
            if not self.is_kept:
                break
            rate = self._control()
        return rate

    def _control(self) -> float:
        sleep(self._pause)
        with TemporaryFile(dir=self._folder, buffering=0) as file:
            started = perf_counter()
            for _ in range(-(-self._control_bytes // len(PART))):
                file.write(PART)
            return self._control_bytes / (perf_counter() - started)

    def _keep(self) -> None:
        self._end()
        num_bytes = self._num_bytes or int(SHARE * min(psutil.virtual_memory().available, usable_memory()))
        command = [sys.executable, "-m", __name__, str(num_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        if self._process.stdout.readline() != READY:
            self._end()
            logger.warning(
                "the process that keeps %d bytes of memory ended early; the benchmark runs without", num_bytes
            )

    def _end(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


def keep(num_bytes: int) -> mmap.mmap:
    """Write to memory, and free all but one page of each 2 MiB. Return the mapping, which holds these pages."""
    memory = _written(num_bytes + HUGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE
    for offset in range(first, first + num_bytes // HUGE * HUGE, HUGE):
        memory.madvise(mmap.MADV_DONTNEED, offset + PAGE, HUGE - PAGE)
    return memory


def touch_huge_pages(num_bytes: int) -> None:
    """Write to huge pages and free them, so that a process that asks for some within two seconds need not wait.

    `keep` cannot keep them: only free blocks of 2 MiB can become huge pages, and these are the ones that are reported.
    """
    _written(num_bytes + HUGE, mmap.MADV_HUGEPAGE).close()


def _written(num_bytes: int, *advice: int) -> mmap.mmap:
    """Return memory whose pages were all written to. advice: for madvise(2), before that."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for option in advice:
        memory.madvise(option)
    for offset in range(0, num_bytes, PAGE):
        memory[offset] = 1
    return memory


if __name__ == "__main__":
    memory = keep(int(sys.argv[1]))
    sys.stdout.write(READY)
    sys.stdout.flush()
    sys.stdin.read()  # until the benchmark closes the pipe or ends

"""The speed of the host, to compare figures of different hosts, or of one at different times."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from dataload.benchmarks.machine.hot_memory import HotMemory

LOOPS = 10_000_000
COPIED_BYTES = 1 << 28


def speed(memory: HotMemory) -> dict[str, float]:
    """Return seconds of ten million empty loops of Python, and bytes per second of a memory copy and a written file."""
    written = memory.ensure()
    started = perf_counter()
    for _ in range(LOOPS):
        pass
    looped = perf_counter() - started
    source, target = np.ones(COPIED_BYTES, np.uint8), np.ones(COPIED_BYTES, np.uint8)
    started = perf_counter()
    target[:] = source
    copied = COPIED_BYTES / (perf_counter() - started)
    return {"loop_seconds": looped, "copied_bytes_per_second": copied, "written_bytes_per_second": written}

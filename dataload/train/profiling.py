"""A torch.profiler trace of a few steps that names the stages of the loop and of the loader."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import profiler

from dataload.telemetry.spans import recorded_by

SKIPPED, WARMUP, TRACED = 1, 2, 10  # steps
MAX_RANGES = 1 << 20  # of other threads; older ranges are dropped


@contextmanager
def traced(folder: Path | None, rank: int) -> Iterator[Callable[[], None]]:
    """Trace early steps during the block. Yield a function to call after each step.

    After 13 steps, `folder` has the trace of the last 10 in Chrome's JSON format. A shorter run needs at least 4 steps
    and leaves a shorter trace. Each `stage` of each thread is a range in the trace. If there is a GPU, each stage is
    also an NVTX range for Nsight Systems.

    Args:
        folder: Where the trace is written; None for no trace.
        rank: The rank of this process, for the name of the file.
    """
    if folder is None:
        yield lambda: None
        return
    trace = _Trace(folder / f"rank{rank}.pt.trace.json")
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    schedule = profiler.schedule(wait=SKIPPED, warmup=WARMUP, active=TRACED, repeat=1)
    with (
        recorded_by(trace.range),
        profiler.profile(activities=activities, schedule=schedule, on_trace_ready=trace.write) as running,
    ):
        yield running.step


class _Trace:
    """A trace of all threads. torch records the training thread; `write` adds the ranges of other threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trainer = threading.get_ident()
        # Each range is (name, thread ID, start, end); times in nanoseconds since 1970.
        self._others: deque[tuple[str, int, int, int]] = deque(maxlen=MAX_RANGES)
        self._written = False

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        with torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext():
            if threading.get_ident() == self._trainer:
                with profiler.record_function(name):
                    yield
                return
            started = time.time_ns()
            try:
                yield
            finally:
                if not self._written:
                    self._others.append((name, threading.get_native_id(), started, time.time_ns()))

    def write(self, running: profiler.profile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._path))
        self._written = True
        trace = json.loads(self._path.read_text())
        events, origin = trace["traceEvents"], trace.get("baseTimeNanoseconds", 0)
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if "dur" in event]
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        for name, thread, started, ended in list(self._others):
            start, end = (started - origin) / 1000, (ended - origin) / 1000  # µs
            if start < last and end > first:
                source = {"pid": os.getpid(), "tid": thread}
                events.append(
                    {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, **source}
                )
        self._path.write_text(json.dumps(trace))

"""A trace of some steps by torch.profiler, with the stages of the loop and of the loader in it by name."""

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
REMEMBERED = 1 << 20  # ranges of other threads, at most


@contextmanager
def traced(folder: str | os.PathLike[str] | None, rank: int) -> Iterator[Callable[[], None]]:
    """Gives what to call after each step; after 13 the trace of the last 10 is in `folder`, as Chrome's JSON.

    A run of fewer steps, of 4 at least, leaves the trace of those. Each `stage` of each thread is a range in it; where
    there is a GPU it is an NVTX range besides, for Nsight Systems.
    """
    if folder is None:
        yield lambda: None
        return
    trace = _Trace(Path(folder, f"rank{rank}.pt.trace.json"))
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
    """torch records the thread that trains; the ranges of others are added to what it has written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trainer = threading.get_ident()
        self._others: deque[tuple[str, int, int, int]] = deque(
            maxlen=REMEMBERED
        )  # name, thread, ns since 1970: from, to
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
        whole = json.loads(self._path.read_text())
        events, since = whole["traceEvents"], whole.get("baseTimeNanoseconds", 0)
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if "dur" in event]
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        for name, thread, started, ended in list(self._others):
            start, end = (started - since) / 1000, (ended - since) / 1000  # µs
            if start < last and end > first:
                where = {"pid": os.getpid(), "tid": thread}
                events.append(
                    {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, **where}
                )
        self._path.write_text(json.dumps(whole))

"""A trace of some steps by torch.profiler, with the stages of the loop and of the loader in it by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import profiler

from dataload.stages import recorded_by

SKIPPED, WARMUP, TRACED = 1, 2, 10  # steps


@contextmanager
def traced(folder: str | os.PathLike[str] | None, rank: int) -> Iterator[Callable[[], None]]:
    """Gives what to call after each step; after 13 the trace of the last 10 is in `folder`, as Chrome's JSON.

    A run of fewer steps, of 4 at least, leaves the trace of those. Each `stage` is a range in it, and an NVTX range
    besides where there is a GPU, for Nsight Systems. torch sees the ranges of the thread that trains; those of the
    loader's threads are seen by Nsight alone.
    """
    if folder is None:
        yield lambda: None
        return
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    trace = profiler.profile(
        activities=activities,
        schedule=profiler.schedule(wait=SKIPPED, warmup=WARMUP, active=TRACED, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(os.fspath(folder), worker_name=f"rank{rank}"),
    )
    with recorded_by(_ranges), trace:
        yield trace.step


@contextmanager
def _ranges(name: str) -> Iterator[None]:
    with ExitStack() as ranges:
        ranges.enter_context(profiler.record_function(name))
        if torch.cuda.is_available():
            ranges.enter_context(torch.cuda.nvtx.range(name))
        yield

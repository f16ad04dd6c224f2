"""The figures of a first epoch: time, processor time, memory, bytes and requests."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from dataload.benchmarks.cold.epoch import IN_FLIGHT, Task
from dataload.benchmarks.cold.peak import PeakGrowth
from dataload.benchmarks.machine.hot_memory import touch_huge_pages
from dataload.benchmarks.origin import Origin
from dataload.runtime.child_process import as_child

MOST_SECONDS = 300  # of an epoch
HUGE_PAGES = 1 << 30  # bytes of huge pages that the machine has ready at the start: more than most systems take


def measure(system: str, task: Task, origin: Origin, folder: Path) -> dict[str, Any]:
    """Run one epoch of a system with an empty cache below `folder`, in a process for each rank.

    Returns:
        The figures of the host.

    Raises:
        RuntimeError: A process failed, or took longer than `MOST_SECONDS`.
    """
    origin.reset()
    server = psutil.Process(origin.pid)
    before = sum(server.cpu_times()[:2])
    with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as cache:
        tasks = [replace(task, rank=rank, cache_dir=cache) for rank in range(task.ranks)]
        command = [sys.executable, *as_child("dataload.benchmarks.cold.epoch", system)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = [subprocess.Popen([*command, json.dumps(asdict(each))], **pipes) for each in tasks]
        try:
            found, memory = _figures(system, running)
        finally:
            for process in running:
                process.kill()
                process.communicate()
    origin_cpu = sum(server.cpu_times()[:2]) - before
    stats = origin.stats()
    return {
        "seconds": max(figures["seconds"] for figures in found),
        "first": max(figures["first"] for figures in found),
        "rows": sum(figures["rows"] for figures in found),
        "cpu": sum(figures["cpu"] for figures in found),
        "memory": memory,
        "bytes": stats["get_bytes"] / sum(path.stat().st_size for path in Path(task.files).glob("*.parquet")),
        "requests": stats["get_requests"],
        "duplicates": stats["duplicate_gets"],
        "in_flight": stats["most_gets_at_once"],
        "busy": busy(origin.gets_over_time(), origin.behaviour.latency),
        "origin_cpu": origin_cpu,
    }


def _figures(system: str, running: list[subprocess.Popen[str]]) -> tuple[list[dict[str, Any]], int]:
    """Start the epoch in all processes together. Return what they print, and the most memory that they gain in all."""
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    touch_huge_pages(HUGE_PAGES)
    found, end = [], time.monotonic() + MOST_SECONDS
    with PeakGrowth([process.pid for process in running]) as peak:
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in running:
            try:
                shown, _ = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"{system} took more than {MOST_SECONDS} s") from error
            if process.returncode:
                raise RuntimeError(f"{system} failed with exit status {process.returncode}")
            found.append(json.loads(shown))
    return found, peak.num_bytes


def busy(changes: list[tuple[float, int]], latency: float) -> float:
    """Return the mean share of `IN_FLIGHT` requests under way, except in the first 0.5 s and the last two latencies.

    It is NaN if the requests do not last that long.

    Args:
        changes: (seconds, requests under way from then on).
        latency: Latency of a request in seconds.
    """
    begin, end = (changes[0][0] + 0.5, changes[-1][0] - 2 * latency) if changes else (0.0, 0.0)
    if end <= begin:
        return math.nan
    total = 0.0
    for (at, count), (until, _) in pairwise(changes):
        total += max(0.0, min(until, end) - max(at, begin)) * min(count, IN_FLIGHT)
    return total / (IN_FLIGHT * (end - begin))


def bound(found: dict[str, dict[str, float]], system: str) -> float:
    """Return the seconds that the wire, or the processors of this machine, need at least.

    A system without requests does not use the wire, so its processor time alone counts.

    Args:
        found: The figures of each system.
        system: The system whose processor time counts, with that of the origin beside it.
    """
    cpu = found[system]["cpu"] + found[system]["origin_cpu"]
    wire = found["bare GETs"]["seconds"] if found[system]["requests"] and "bare GETs" in found else 0.0
    return max(wire, cpu / len(os.sched_getaffinity(0)))

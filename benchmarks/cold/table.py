"""The lines of a Markdown table of first epochs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dataload.benchmarks.cold.first_batch import FIRST, bar
from dataload.benchmarks.cold.measurement import bound

COLUMNS = ("shape", "row groups, MB", "origin", "system", "seconds", "first batch, s", "its bar, s", "CPU-s/GB",
           "CPU ms/group", "memory, MB", "bytes", "duplicates", "requests", "in flight", "/ bound")  # fmt: skip
NAMES = 4  # columns of text
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * NAMES}{'--:|' * (len(COLUMNS) - NAMES)}"


def lines(
    cell: Sequence[str],
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    errors: Mapping[str, str],
    files: Path,
    latency: float,
) -> Iterator[str]:
    """Yield a line for each system, with the medians of its figures.

    Args:
        cell: The shape, the size of row groups, and the origin.
        found: The figures of each run, by system.
        errors: What went wrong, by system.
        files: Folder of the data.
        latency: Latency of a request in seconds.
    """
    paths = list(files.glob("*.parquet"))
    gigabytes = sum(path.stat().st_size for path in paths) / 1e9
    row_groups = sum(pq.read_metadata(path).num_row_groups for path in paths)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
        if runs
    }
    first = medians.pop(FIRST, None)
    for name, middle in medians.items():
        seconds = [run["seconds"] for run in found[name]]
        is_ours = first is not None and name == "dataload"
        shown = (
            f"{middle['seconds']:.2f} ({min(seconds):.2f}–{max(seconds):.2f})",
            f"{middle['first']:.2f}", f"{bar(latency, first['seconds']):.2f}" if first and is_ours else "–",
            f"{middle['cpu'] / gigabytes:.2f}", f"{1000 * middle['cpu'] / row_groups:.2f}",
            f"{middle['memory'] / 1e6:.0f}", f"{middle['bytes']:.3f}", f"{middle['duplicates']:.0f}",
            f"{middle['requests']:.0f}", "–" if math.isnan(middle["busy"]) else f"{middle['busy']:.0%}",
            f"{middle['seconds'] / bound(medians, name):.2f}",
        )  # fmt: skip
        yield f"| {' | '.join((*cell, name, *shown))} |"
    for name, error in errors.items():
        yield f"| {' | '.join((*cell, name, error))} |"

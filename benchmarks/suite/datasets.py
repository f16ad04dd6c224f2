"""The datasets of a run, in Parquet and in the formats of the systems."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dataload.benchmarks.suite.host import last_line
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.convert import price_of
from dataload.benchmarks.systems.registry import Entry
from dataload.benchmarks.workloads import Truth, Workload, write
from dataload.runtime.child_process import as_child

CONVERSION_SECONDS = 1800.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The size and the folders of a run, its interpreters, and its time.

    Args:
        size: Size of the workloads.
        folder: Absolute path of the data, which is kept, and of temporary files.
        peers_python: Interpreter of the peers' environment; None if it does not exist.
        seconds: Limit of the whole run. Measurements that have not started by then are reported as not run.
        converts_again: Whether to make the conversions of earlier runs again.
    """

    size: str
    folder: Path
    peers_python: Path | None
    seconds: float = math.inf
    converts_again: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def data(self) -> Path:
        """The folder that the origin serves."""
        return self.folder / "data"

    @property
    def seconds_left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def python(self, entry: Entry) -> Path | None:
        """Return the interpreter of a system."""
        return Path(sys.executable) if entry.environment == "own" else self.peers_python


@dataclass(frozen=True)
class Dataset:
    """A workload in row groups of one size, as written to disk."""

    name: str
    workload: Workload
    group_megabytes: float
    folder: Path
    truth: Truth
    conversions: dict[str, Result]


def prepare(
    name: str, workload: Workload, group: float, place: Place, entries: tuple[Entry, ...], say: Callable[[str], object]
) -> Dataset:
    """Write a dataset, and convert it to the systems' own formats, unless an earlier run did.

    A conversion of an earlier run counts only if nothing that it was made of has changed.
    """
    folder = place.data / BUCKET / place.size / f"{workload.name}-{group:g}"
    say(f"{name}: {workload.rows:,} rows")
    truth = write(workload, folder / "parquet")
    conversions: dict[str, Result] = {}
    for entry in entries:
        python = place.python(entry)
        if not entry.converts or python is None:
            continue
        price = price_of(entry, folder / "parquet", folder / entry.module)
        if price is None or place.converts_again:
            say(f"{name}: converting for {entry.name}")
            task = (entry.name, workload.name, place.size, folder / "parquet", folder / entry.module)
            patience = min(CONVERSION_SECONDS, max(0.0, place.seconds_left))
            error = _converted(python, task, patience)
            price = error or price_of(entry, folder / "parquet", folder / entry.module)
        conversions[entry.name] = price or {"error": "no result"}
    return Dataset(name, workload, group, folder, truth, conversions)


def _converted(python: Path, task: tuple[object, ...], patience: float) -> Result | None:
    """Run a conversion. Return its error, or None."""
    command = [str(python), *as_child("dataload.benchmarks.systems.convert", *map(str, task))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {patience:.0f} s"}
    return {"error": last_line(done.stderr)} if done.returncode else None


def described(dataset: Dataset) -> Result:
    """Return a dataset as JSON values."""
    workload, accelerator = dataset.workload, dataset.workload.accelerator
    return asdict(dataset.truth) | {
        "workload": workload.name,
        "row_group_megabytes": dataset.group_megabytes,
        "batch_size": workload.batch_size,
        "accelerator": asdict(accelerator) | {"unit": accelerator.unit, "rows_per_second": accelerator.rows_per_second},
        "conversions": dataset.conversions,
    }

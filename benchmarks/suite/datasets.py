"""The datasets of a run, in Parquet and in the formats of the systems."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dataload.benchmarks.accelerators import load
from dataload.benchmarks.origin.behaviour import S3
from dataload.benchmarks.suite.host import HostError, last_line
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.convert import seconds_of
from dataload.benchmarks.systems.registry import Entry
from dataload.benchmarks.workloads import Truth, Workload, write
from dataload.runtime.child_process import as_child

CONVERSION_SECONDS = 3600.0
PART = 1 << 24


@dataclass(frozen=True)
class Place:
    """The size of the datasets, their folder, and the interpreters.

    Args:
        size: Size of the workloads.
        folder: Absolute path of the data, which is kept, and of temporary files.
        peers_python: Interpreter of the peers' environment; None if it does not exist.
    """

    size: str
    folder: Path
    peers_python: Path | None

    @property
    def data(self) -> Path:
        """The folder that the origin serves."""
        return self.folder / "data"

    @property
    def scratch(self) -> Path:
        """The folder of the job that runs."""
        return self.folder / "job"

    def python(self, entry: Entry) -> Path | None:
        """Return the interpreter of a system; None if its environment does not exist."""
        return Path(sys.executable) if entry.environment == "own" else self.peers_python


@dataclass(frozen=True)
class Dataset:
    """A workload in row groups of one size, as written to disk."""

    name: str
    workload: Workload
    group_megabytes: float
    folder: Path
    truth: Truth

    @property
    def rows_per_second(self) -> float:
        """Rows that the accelerators of every system consume."""
        assert S3.host_bytes_per_second
        return load(S3.host_bytes_per_second, self.truth.parquet_bytes / self.truth.rows)

    @property
    def epoch_seconds(self) -> float:
        """Seconds that the accelerators compute in an epoch."""
        return self.truth.rows / self.rows_per_second

    def described(self) -> dict[str, Any]:
        """Return the dataset and its load as JSON values."""
        accelerator = self.workload.accelerator
        return asdict(self.truth) | {
            "workload": self.workload.name,
            "row_group_megabytes": self.group_megabytes,
            "batch_size": self.workload.batch_size,
            "rows_per_second": self.rows_per_second,
            "epoch_seconds": self.epoch_seconds,
            "accelerators": self.rows_per_second / accelerator.rows_per_second,
            "accelerator": accelerator.model,
            "source": accelerator.source,
        }


def prepare(workload: Workload, group: float, place: Place) -> Dataset:
    """Write a dataset, unless an earlier run did."""
    folder = place.data / BUCKET / place.size / f"{workload.name}-{group:g}"
    return Dataset(f"{workload.name}, {group:g} MB", workload, group, folder, write(workload, folder / "parquet"))


def convert(dataset: Dataset, entry: Entry, place: Place, say: Callable[[str], object]) -> float:
    """Convert a dataset to a system's own format, unless an earlier run did. Return the seconds that it took.

    A conversion of an earlier run counts only if nothing that it was made of has changed.

    Raises:
        HostError: The conversion failed.
        TimeoutExpired: It was not done within CONVERSION_SECONDS.
    """
    files, folder = dataset.folder / "parquet", dataset.folder / entry.module
    if (seconds := seconds_of(entry, files, folder)) is None:
        say(f"{dataset.name}: converting for {entry.name}")
        task = (entry.name, dataset.workload.name, place.size, files, folder)
        command = [str(place.python(entry)), *as_child("dataload.benchmarks.systems.convert", *map(str, task))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_SECONDS, check=False)
        seconds = seconds_of(entry, files, folder)
        if done.returncode or seconds is None:
            raise HostError(f"not converted: {last_line(done.stderr)}")
    return seconds


def ready(folder: Path) -> None:
    """Have the files of a folder in the page cache and on disk, so that no job waits for the disk of the origin."""
    os.sync()
    buffer = bytearray(PART)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

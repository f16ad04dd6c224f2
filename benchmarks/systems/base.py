"""What every system is asked to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dataload.benchmarks import s3
from dataload.benchmarks.batches import Batch
from dataload.benchmarks.workloads import Workload

BUCKET = "bench"


@dataclass(frozen=True)
class Setting:
    """One measurement's circumstances.

    endpoint_url: of the origin; prefix: the folder of the workload's Parquet files in BUCKET.
    converted: the folder in BUCKET of the same rows in the system's own format, where `convert` made one.
    files: the folder of the Parquet files on this machine's disk: for floors and conversions alone.
    cache_dir: an empty folder on disk that the system may fill as it likes, and keeps from epoch to epoch.
    step_seconds: that an accelerator takes for a batch, during which the processors are free; 0: there is none.
    in_flight: requests that a client may have under way at once.
    """

    workload: Workload
    endpoint_url: str
    prefix: str
    converted: str
    files: Path
    cache_dir: Path
    num_workers: int
    seed: int = 0
    step_seconds: float = 0.0
    in_flight: int = 16

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    @property
    def converted_url(self) -> str:
        return f"s3://{BUCKET}/{self.converted}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Arguments for s3fs."""
        return s3.storage_options(self.endpoint_url)


class System(Protocol):
    """A way to read a workload, shuffled, in batches. Made by a class or function that takes a Setting.

    A module may also have `convert(workload, files, folder)`: writes the rows of the Parquet `files` to `folder` in the
    system's own format. It is done once, before anything is measured, and its time and bytes are listed beside.
    """

    def epoch(self, number: int) -> Iterator[Batch]:
        """The rows of epoch `number` (0, 1, …) once each, in that epoch's shuffled order, as Consumer takes them."""
        ...

    def close(self) -> None:
        """Ends workers and threads."""
        ...

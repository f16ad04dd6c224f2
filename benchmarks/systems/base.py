"""The interface of a measured system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dataload.benchmarks.batches import Batch
from dataload.benchmarks.origin import s3
from dataload.benchmarks.workloads import Workload

BUCKET = "bench"


@dataclass(frozen=True)
class Setting:
    """The settings of one measurement.

    Args:
        workload: The workload to read.
        endpoint_url: URL of the origin.
        prefix: Folder of the workload's Parquet files in BUCKET.
        converted: Folder in BUCKET of the same rows in the system's own format, if it has one.
        files: Folder of the Parquet files on the local disk, for floors and conversions only.
        cache_dir: An empty folder on the local disk that the system keeps for all epochs.
        num_workers: Worker processes.
        rank: Rank of this process. All ranks are on one host and share `cache_dir`.
        ranks: Number of ranks.
        seed: Seed of the shuffle.
    """

    workload: Workload
    endpoint_url: str
    prefix: str
    converted: str
    files: Path
    cache_dir: Path
    num_workers: int
    rank: int = 0
    ranks: int = 1
    seed: int = 0

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
        """Arguments for `s3fs.S3FileSystem`."""
        return s3.storage_options(self.endpoint_url)


class System(Protocol):
    """A system that reads a workload in shuffled batches. Its class takes a Setting.

    Its module may have `convert(workload, files, folder)`, which writes the rows of the Parquet `files` to `folder` in
    the system's own format. The conversion runs once before the measurements, and the report lists its cost.
    """

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield this rank's rows of epoch `number` (0, 1, …) in shuffled batches that Consumer accepts.

        All ranks together yield every row once. The environment is that of torchrun.
        """
        ...

    def close(self) -> None:
        """Stop workers and threads."""
        ...

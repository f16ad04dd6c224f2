"""What the systems that end in torch's DataLoader share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dataload.benchmarks.batches import Batch, Row, stacked
from dataload.benchmarks.workloads import Workload

SHARED_FROM = 1 << 18  # bytes: smaller arrays go through the pipe, without a segment of shared memory for each


def collated(rows: list[Row]) -> Batch:
    """A collate function that is faster than torch's: one copy into one array for each column."""
    return portable(stacked(rows))


def portable(batch: Any) -> Batch:
    """A batch as it goes from a worker fastest: large arrays as tensors, which travel through shared memory."""
    in_worker = get_worker_info() is not None
    return {name: _tensor(value) if in_worker else value for name, value in batch.items()}


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.nbytes >= SHARED_FROM:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return value


def options(num_workers: int) -> dict[str, Any]:
    """Arguments for a DataLoader."""
    return {"num_workers": num_workers, "persistent_workers": num_workers > 0}


def buffer_rows(workload: Workload) -> int:
    """Rows in a shuffle buffer: what the libraries' documentation shows, fewer where the rows are large."""
    return min(10_000, max(1_000, workload.rows_per_group))


def keep_temporary_files_in(folder: Path) -> None:
    """For this process and those it starts."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

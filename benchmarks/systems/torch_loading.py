"""Helpers for the systems that use torch's DataLoader."""

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

SHARED_FROM = 1 << 18  # bytes; smaller arrays pass through the pipe instead of shared memory


def collated(rows: list[Row]) -> Batch:
    """Collate rows with one copy into one array for each column, which is faster than torch's function."""
    return portable(stacked(rows))


def portable(batch: Any) -> Batch:
    """Return a batch that a worker sends fast: large arrays become tensors, which pass through shared memory."""
    in_worker = get_worker_info() is not None
    return {name: _tensor(value) if in_worker else value for name, value in batch.items()}


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.nbytes >= SHARED_FROM:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return value


def options(num_workers: int) -> dict[str, Any]:
    """Return arguments for a DataLoader."""
    return {"num_workers": num_workers, "persistent_workers": num_workers > 0}


def buffer_rows(workload: Workload) -> int:
    """Return the rows of a shuffle buffer: the libraries' documented size, or fewer large rows."""
    return min(10_000, max(1_000, workload.rows_per_group))


def keep_temporary_files_in(folder: Path) -> None:
    """Set the folder of temporary files for this process and its children."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

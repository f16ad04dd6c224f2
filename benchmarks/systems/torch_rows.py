"""The loader of the tutorials: all columns in memory, a dataset of single rows, and torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from dataload.benchmarks.batches import Batch, Row, values
from dataload.benchmarks.systems.base import Setting
from dataload.benchmarks.systems.torch_loading import collated, options


class TorchRows:
    """A DataLoader that reads single rows from memory in a full shuffle."""

    def __init__(self, setting: Setting) -> None:
        rows = Rows(setting)
        self._sampler: DistributedSampler[Row] = DistributedSampler(
            rows, setting.ranks, setting.rank, seed=setting.seed
        )
        self._loader = DataLoader(
            rows,
            setting.batch_size,
            sampler=self._sampler,
            collate_fn=collated,
            **options(setting.num_workers),
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        self._sampler.set_epoch(number)
        return iter(self._loader)

    def close(self) -> None:
        del self._loader


class Rows(Dataset[Row]):
    """The rows of a workload, read from the origin once, with the workload's functions applied at each access."""

    def __init__(self, setting: Setting) -> None:
        filesystem = fsspec.filesystem("s3", **setting.storage_options)
        table = pq.read_table(setting.url.removeprefix("s3://"), filesystem=filesystem)
        self._columns = {name: _joined([values(chunk) for chunk in table[name].chunks]) for name in table.column_names}
        self._transform = setting.workload.from_file

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> Row:
        row = {name: column[index] for name, column in self._columns.items()}
        return self._transform(row) if self._transform else row


def _joined(parts: list[Any]) -> Any:
    """Join the parts of a column, whose bytes may be more than the offsets of one array of Arrow's can count."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else [*chain.from_iterable(parts)]

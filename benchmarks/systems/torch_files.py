"""What one writes without a library: files copied to the local disk, torch's DataLoader and DistributedSampler.

The sampler draws row groups. To draw rows, each batch would decode as many row groups as it has rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from time import sleep

import fsspec
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from dataload.benchmarks.batches import Batch, batches_of
from dataload.benchmarks.systems.base import Setting
from dataload.benchmarks.systems.torch_loading import options, portable

LOOK_SECONDS = 0.05  # between two looks for the files of other ranks


class TorchFiles:
    """A DataLoader over the row groups of local files, whose workers decode and shuffle."""

    def __init__(self, setting: Setting) -> None:
        groups = Groups(copied(setting), setting)
        self._sampler: DistributedSampler[list[Batch]] = DistributedSampler(
            groups, setting.ranks, setting.rank, seed=setting.seed
        )
        self._loader: DataLoader[list[Batch]] = DataLoader(
            groups, batch_size=None, sampler=self._sampler, collate_fn=_as_is, **options(setting.num_workers)
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        self._sampler.set_epoch(number)
        return chain.from_iterable(self._loader)

    def close(self) -> None:
        del self._loader


class Groups(Dataset[list[Batch]]):
    """The row groups of files, each as its batches in a random order of its rows."""

    def __init__(self, files: list[Path], setting: Setting) -> None:
        self._workload = setting.workload
        self._groups = [(path, number) for path in files for number in range(pq.read_metadata(path).num_row_groups)]

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> list[Batch]:
        path, number = self._groups[index]
        with pq.ParquetFile(path, memory_map=True) as file:
            rows = file.read_row_group(number)
        shuffled = rows.take(torch.randperm(len(rows)).numpy())
        return [portable(batch) for batch in batches_of(shuffled, self._workload)]


def copied(setting: Setting) -> list[Path]:
    """Copy the files to the local disk, each by one rank, and wait for those of the other ranks."""
    filesystem = fsspec.filesystem("s3", **setting.storage_options)
    names = sorted(filesystem.glob(f"{setting.url}/*.parquet"))
    paths = [setting.cache_dir / PurePosixPath(name).name for name in names]
    mine = slice(setting.rank, None, setting.ranks)
    arriving = [path.with_suffix(".arriving") for path in paths[mine]]
    filesystem.get(names[mine], [str(path) for path in arriving])
    for path in arriving:
        path.rename(path.with_suffix(".parquet"))
    while not all(path.exists() for path in paths):
        sleep(LOOK_SECONDS)
    return paths


def _as_is(batches: list[Batch]) -> list[Batch]:
    return batches

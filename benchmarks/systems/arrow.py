"""pyarrow.dataset alone. It shuffles row groups, and rows within a pool of row groups."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dataload.benchmarks.batches import Batch, batches_of
from dataload.benchmarks.systems.base import Setting
from dataload.benchmarks.systems.torch_loading import options, portable

POOL = 16  # row groups of a shuffle pool, over all workers


class Arrow:
    """Reads through Arrow's own S3 client in every epoch. It keeps nothing."""

    def __init__(self, setting: Setting) -> None:
        self._loader: DataLoader[Batch] = DataLoader(
            _Shuffled(setting), batch_size=None, collate_fn=portable, **options(setting.num_workers)
        )

    def epoch(self, number: int) -> Iterator[Batch]:  # noqa: ARG002 - the workers count epochs
        return iter(self._loader)

    def close(self) -> None:
        del self._loader


class _Shuffled(IterableDataset[Batch]):
    """The batches of one worker. The worker opens filesystem and footers, because neither survives a fork."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._epoch = 0
        self._groups: list[ds.ParquetFileFragment] = []

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        number, workers = self._setting.rank * workers + number, self._setting.ranks * workers
        rng = np.random.default_rng([self._setting.seed, self._epoch])
        self._epoch += 1
        groups = self._groups = self._groups or self._open()
        mine = [groups[index] for index in rng.permutation(len(groups))[number::workers]]
        workload = self._setting.workload
        left_over: pa.Table | None = None
        for pool in self._pools(mine, max(1, POOL // workers)):
            rows = pool if left_over is None else pa.concat_tables([left_over, pool])
            shuffled = rows.combine_chunks().take(rng.permutation(len(rows)))
            whole = len(rows) // workload.batch_size * workload.batch_size
            yield from batches_of(shuffled.slice(0, whole), workload)
            left_over = shuffled.slice(whole)
        if left_over is not None and len(left_over):
            yield from batches_of(left_over, workload)

    def _open(self) -> list[ds.ParquetFileFragment]:
        access, address = self._setting.storage_options, urlsplit(self._setting.endpoint_url)
        filesystem = pyarrow.fs.S3FileSystem(
            access_key=access["key"],
            secret_key=access["secret"],
            region=access["client_kwargs"]["region_name"],
            scheme=address.scheme,
            endpoint_override=address.netloc,
        )
        dataset = ds.dataset(self._setting.url.removeprefix("s3://"), filesystem=filesystem, format="parquet")
        return [group for file in dataset.get_fragments() for group in file.split_by_row_group()]

    def _pools(self, groups: list[ds.ParquetFileFragment], size: int) -> Iterator[pa.Table]:
        """Yield tables of `size` row groups in order. Arrow reads ahead."""
        if not groups:
            return
        first = groups[0]
        dataset = ds.FileSystemDataset(groups, first.physical_schema, first.format, first.filesystem)
        pool: list[pa.RecordBatch] = []
        ends = iter(np.cumsum([group.row_groups[0].num_rows for group in groups])[size - 1 :: size].tolist())
        end, seen = next(ends, None), 0
        for batch in dataset.scanner(fragment_readahead=size).to_batches():
            pool.append(batch)
            seen += len(batch)
            if seen == end:
                yield pa.Table.from_batches(pool)
                pool, end = [], next(ends, None)
        if pool:
            yield pa.Table.from_batches(pool)

"""LitData: samples in chunks, which it prefetches whole and keeps on disk.

Chunks are not compressed: LitData fetches compressed chunks twice, which made cold epochs a quarter slower.
The first read of a row decodes its whole chunk. Otherwise LitData reads a chunk that two workers share again for every
window of up to 256 rows, which was up to 6 times slower. Chunks are small enough to fit in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from litdata import StreamingDataLoader, StreamingDataset, optimize
from litdata.streaming import downloader

from dataload.benchmarks.batches import Batch, Row, rows_of
from dataload.benchmarks.systems.base import Setting
from dataload.benchmarks.systems.conversion import columns_of_file, file_rows
from dataload.benchmarks.systems.torch_loading import collated, keep_temporary_files_in, options
from dataload.benchmarks.workloads import Workload

downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001 - LitData has no option for an origin without TLS

MOST_ROWS = 1 << 13


def convert(workload: Workload, files: Path, folder: Path) -> None:
    optimize(
        partial(_rows, workload),
        sorted(map(str, files.glob("*.parquet"))),
        str(folder),
        chunk_size=min(MOST_ROWS, file_rows(workload, files)),
        num_workers=len(os.sched_getaffinity(0)),
        start_method="fork",
        verbose=False,
    )


def _rows(workload: Workload, path: str) -> Iterator[Row]:
    for group in columns_of_file(workload, Path(path)):
        yield from map(_plain, rows_of(group))


def _plain(row: Row) -> Row:
    """Replace numpy's integers by Python's, which the writer encodes faster."""
    return {name: int(value) if name in ("label", "user") else value for name, value in row.items()}


class LitData:
    def __init__(self, setting: Setting) -> None:
        keep_temporary_files_in(setting.cache_dir)
        access = setting.storage_options
        dataset = StreamingDataset(
            setting.converted_url,
            cache_dir=str(setting.cache_dir / "chunks"),
            shuffle=True,
            batch_decode="all",
            seed=setting.seed,
            drop_last=False,  # with ranks it is True by default, and an epoch lacks rows
            transform=setting.workload.transform,
            storage_options={
                "endpoint_url": setting.endpoint_url,
                "aws_access_key_id": access["key"],
                "aws_secret_access_key": access["secret"],
                "region_name": access["client_kwargs"]["region_name"],
            },
        )
        self._loader = StreamingDataLoader(
            dataset, batch_size=setting.batch_size, collate_fn=collated, **options(setting.num_workers)
        )

    def epoch(self, number: int) -> Iterator[Batch]:  # noqa: ARG002 - the loader counts epochs
        return iter(self._loader)

    def close(self) -> None:
        del self._loader

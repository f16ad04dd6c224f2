"""Hugging Face datasets: `Streaming` reads Parquet files in place, `MapStyle` converts them to Arrow files on disk.

Both return Arrow tables. The numpy format was about as fast; Python rows and tensors were slower. Streaming was half
as fast again without s3fs's read-ahead, which fetches more than Arrow requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from dataload.benchmarks.batches import Batch, Row, transformed, values
from dataload.benchmarks.systems.base import Setting
from dataload.benchmarks.systems.torch_loading import buffer_rows, keep_temporary_files_in, options, portable

datasets.disable_progress_bars()
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False


class Streaming:
    """Streaming with row groups as shards, which gives workers and the shuffle more shards than files.

    The shuffle buffer fills from one shard after another. The default of ten shards at a time was 12 times slower, and
    leaves workers a tenth of the shards.
    """

    def __init__(self, setting: Setting) -> None:
        keep_temporary_files_in(setting.cache_dir)
        ahead = pa.dataset.ParquetFragmentScanOptions(
            cache_options=pa.CacheOptions(prefetch_limit=1, range_size_limit=128 << 20)
        )
        self._rows = (
            split_dataset_by_node(
                _load(setting, streaming=True, fragment_scan_options=ahead).reshard(), setting.rank, setting.ranks
            )
            .shuffle(seed=setting.seed, buffer_size=buffer_rows(setting.workload), max_buffer_input_shards=1)
            .with_format("arrow")
        )
        self._made = partial(made, transform=setting.workload.from_file)
        self._batch_size = setting.batch_size
        self._loader: DataLoader[pa.Table] | None = None
        if setting.num_workers:
            self._rows = self._rows.batch(setting.batch_size)
            self._loader = DataLoader(
                self._rows,
                batch_size=None,
                collate_fn=partial(_made_of_lists, transform=setting.workload.from_file),
                **options(setting.num_workers),
            )

    def epoch(self, number: int) -> Iterator[Batch]:
        self._rows.set_epoch(number)
        if self._loader is not None:
            return iter(self._loader)
        return map(self._made, self._rows.iter(self._batch_size))

    def close(self) -> None:
        del self._loader, self._rows


class MapStyle:
    """Map-style reads of whole batches by row numbers. The DataLoader's own batching reads row by row."""

    def __init__(self, setting: Setting) -> None:
        keep_temporary_files_in(setting.cache_dir)
        rows, workload = _load(setting, num_proc=setting.num_workers or None), setting.workload
        if workload.prepare:
            rows = _mapped(rows, workload.prepare, setting.num_workers)
        self._sampler: Any = DistributedSampler(rows, setting.ranks, setting.rank, seed=setting.seed)
        self._loader = DataLoader(
            rows.with_format("arrow"),
            sampler=BatchSampler(self._sampler, setting.batch_size, drop_last=False),
            batch_size=None,
            collate_fn=partial(made, transform=workload.transform),
            **options(setting.num_workers),
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        self._sampler.set_epoch(number)
        return iter(self._loader)

    def close(self) -> None:
        del self._loader


def _load(setting: Setting, **arguments: Any) -> Any:
    return datasets.load_dataset(
        "parquet",
        data_files=f"{setting.url}/*.parquet",
        split="train",
        cache_dir=str(setting.cache_dir),
        storage_options=setting.storage_options | {"default_cache_type": "none"},
        **arguments,
    )


def _mapped(rows: Any, prepare: Callable[[Row], Row], num_proc: int) -> Any:
    features = {name: _feature(value) for name, value in prepare(rows[0]).items()}
    return rows.map(prepare, features=datasets.Features(features), num_proc=num_proc or None)


def _feature(value: Any) -> Any:
    shape, kind = np.shape(value), str(np.asarray(value).dtype)
    return getattr(datasets, f"Array{len(shape)}D")(shape, kind) if shape else datasets.Value(kind)


def _made_of_lists(row: pa.Table, transform: Callable[[Row], Row] | None) -> Batch:
    """Return a batch for a table of one row whose values are the columns as lists."""
    return made(pa.table({name: row[name].combine_chunks().flatten() for name in row.column_names}), transform)


def made(table: pa.Table, transform: Callable[[Row], Row] | None) -> Batch:
    """Return a batch of the rows of a table."""
    whole = table.combine_chunks()
    batch = {name: _values(whole[name].chunk(0)) for name in whole.column_names}
    return portable(transformed(batch, transform))


def _values(column: pa.Array) -> Any:
    # The numpy format would return integers of 64 bits.
    return column.to_numpy(zero_copy_only=False) if isinstance(column, pa.ExtensionArray) else values(column)

"""MosaicML Streaming: samples in MDS shards, which it fetches whole and keeps on disk.

Shards are compressed with zstd if the Parquet files are. Streaming unpacks a shard once on arrival, so that cold epochs
fetch less and warm epochs pay nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dataload.benchmarks.batches import Batch, Row
from dataload.benchmarks.systems.base import Setting
from dataload.benchmarks.systems.conversion import file_bytes, rows
from dataload.benchmarks.systems.torch_loading import collated, keep_temporary_files_in, options
from dataload.benchmarks.workloads import FEATURES, TOKENS, Workload

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # torchvision was built for another torch. The modules that import it here use none of its operators.
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

__all__ = ["Mosaic", "Stream", "StreamingDataLoader", "StreamingDataset", "convert"]

ENCODINGS = {
    "image": "bytes",
    "label": "int64",
    "text": "str",
    "tokens": f"ndarray:int32:{TOKENS}",
    "user": "int64",
    "x": f"ndarray:float32:{len(FEATURES)}",
}


def convert(workload: Workload, files: Path, folder: Path) -> None:
    samples = rows(workload, files)
    first = next(samples)
    with MDSWriter(
        out=str(folder),
        columns={name: _encoding(name, value) for name, value in first.items()},
        compression="zstd" if workload.compression == "zstd" else None,
        size_limit=file_bytes(workload, files),
        progress_bar=False,
    ) as writer:
        writer.write(first)
        for sample in samples:
            writer.write(sample)


def _encoding(name: str, value: Any) -> str:
    if name == "image" and not isinstance(value, bytes):
        return f"ndarray:{value.dtype}:{','.join(map(str, value.shape))}"
    return ENCODINGS[name]


class Mosaic:
    def __init__(self, setting: Setting) -> None:
        keep_temporary_files_in(setting.cache_dir)
        if setting.rank == 0:
            clean_stale_shared_memory()  # of a job that the time limit ended: otherwise the next one is refused
        access = setting.storage_options
        os.environ |= {
            "S3_ENDPOINT_URL": setting.endpoint_url,
            "AWS_ACCESS_KEY_ID": access["key"],
            "AWS_SECRET_ACCESS_KEY": access["secret"],
            "AWS_DEFAULT_REGION": access["client_kwargs"]["region_name"],
        }
        self._dataset = _Transformed(
            setting.workload.transform,
            remote=setting.converted_url,
            local=str(setting.cache_dir / "shards"),
            shuffle=True,
            shuffle_seed=setting.seed,
            batch_size=setting.batch_size,
        )
        for stream in self._dataset.streams:
            stream._downloader.clean_up()  # noqa: SLF001 - workers that share its connection mix up shards
        self._loader = StreamingDataLoader(
            self._dataset, batch_size=setting.batch_size, collate_fn=collated, **options(setting.num_workers)
        )

    def epoch(self, number: int) -> Iterator[Batch]:  # noqa: ARG002 - the dataset counts epochs
        return iter(self._loader)

    def close(self) -> None:
        if hasattr(self._dataset, "_iterator"):
            self._dataset._iterator.exit()  # noqa: SLF001 - an interrupted epoch leaves threads waiting
        del self._loader, self._dataset


class _Transformed(StreamingDataset):  # type: ignore[misc]
    def __init__(self, transform: Callable[[Row], Row] | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._transform = transform

    def __getitem__(self, at: int) -> Any:
        row = super().__getitem__(at)
        return self._transform(row) if self._transform else row

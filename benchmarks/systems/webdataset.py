"""WebDataset: samples in tar shards, which curl fetches over HTTP. It keeps shards on disk and shuffles in a buffer.

A member of a tar file costs more than a small row, so each member packs many small rows, which are unpacked before the
shuffle buffer. Shards are not compressed: each epoch would decompress them again.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import webdataset

from dataload.benchmarks.batches import Batch, Row, rows_of
from dataload.benchmarks.systems.base import BUCKET, Setting
from dataload.benchmarks.systems.conversion import columns, file_rows
from dataload.benchmarks.systems.torch_loading import buffer_rows, collated, options
from dataload.benchmarks.workloads import Workload

LIST = "shards.txt"
PACK = 256


def convert(workload: Workload, files: Path, folder: Path) -> None:
    pattern = str(folder / "shard-%06d.tar")
    samples = enumerate(_samples(workload, files))
    number, sample = next(samples)
    rows = file_rows(workload, files)
    maxcount = -(-rows // PACK) if "pyd" in sample else rows
    with webdataset.ShardWriter(pattern, maxcount=maxcount, maxsize=1 << 60, verbose=0, mtime=0) as writer:
        writer.write({"__key__": f"{number:09d}", **sample})
        for number, sample in samples:
            writer.write({"__key__": f"{number:09d}", **sample})
    (folder / LIST).write_text("\n".join(sorted(path.name for path in folder.glob("*.tar"))))


def _samples(workload: Workload, files: Path) -> Iterator[dict[str, Any]]:
    for group in columns(workload, files):
        if "image" in group:
            for row in rows_of(group):
                kind = "jpg" if isinstance(row["image"], bytes) else "npy"
                yield {kind: row["image"], "cls": int(row["label"])}
        else:
            for first in range(0, len(group["label"]), PACK):
                yield {"pyd": {name: column[first : first + PACK] for name, column in group.items()}}


class WebDataset:
    def __init__(self, setting: Setting) -> None:
        shards = f"{setting.endpoint_url}/{BUCKET}/{setting.converted}"
        with urlopen(f"{shards}/{LIST}") as answer:
            urls = [f"{shards}/{name}" for name in answer.read().decode().split()]
        dataset = webdataset.WebDataset(
            urls,
            shardshuffle=len(urls),
            nodesplitter=webdataset.split_by_node,
            detshuffle=True,  # without it, every epoch has the same order of shards
            seed=setting.seed,
            cache_dir=str(setting.cache_dir),
            empty_check=False,
        ).compose(_rows, webdataset.detshuffle(buffer_rows(setting.workload), seed=setting.seed))
        if setting.workload.transform:
            dataset = dataset.compose(partial(map, setting.workload.transform))  # its own map adds a key to each row
        dataset = dataset.batched(setting.batch_size, collation_fn=collated)
        self._loader = webdataset.WebLoader(dataset, batch_size=None, **options(setting.num_workers))

    def epoch(self, number: int) -> Iterator[Batch]:  # noqa: ARG002 - the shuffles count epochs
        return iter(self._loader)

    def close(self) -> None:
        del self._loader


def _rows(samples: Iterable[dict[str, Any]]) -> Iterator[Row]:
    for sample in samples:
        if "pyd" in sample:
            yield from rows_of(pickle.loads(sample["pyd"]))
        else:
            image = sample["jpg"] if "jpg" in sample else np.load(BytesIO(sample["npy"]))
            yield {"image": image, "label": int(sample["cls"])}

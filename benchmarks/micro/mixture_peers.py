"""Mixtures of dataload and its peers, each in a process and an environment of its own: see test_mixtures.py.

The label of a row is the number of its source.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.benchmarks.consumer import Consumer
from dataload.benchmarks.workloads import Workload, tokens, workloads

WEIGHTS = (0.5, 0.3, 0.2)
BATCH = 256
EPOCHS = 3  # after the first
WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}

Epochs = Iterator[Iterator[dict[str, Any]]]


def workload_of(source: int, size: str) -> Workload:
    """Return a third of the tokens."""
    whole = workloads(size)["tokens"]
    return replace(whole, make=partial(labelled, source=source), rows=whole.rows // len(WEIGHTS))


def labelled(rng: np.random.Generator, rows: int, source: int) -> pa.Table:
    made = tokens(np.random.default_rng([source, int(rng.integers(1 << 32))]), rows)
    return made.set_column(1, "label", pa.array(np.full(rows, source)))


def ours(folders: list[Path], cache: Path) -> Epochs:
    from dataload import CacheConfig, make_loader, mix

    mixture = mix([str(folder / "parquet") for folder in folders], WEIGHTS, cache=CacheConfig(str(cache), "4GB"))
    loader = make_loader(mixture, BATCH, **WORKERS)
    while True:
        yield iter(loader)


def hugging_face(folders: list[Path], cache: Path) -> Epochs:
    """Yield epochs of `interleave_datasets`, map-style: users shuffle and interleave again before each epoch.

    Iterable datasets (`to_iterable_dataset`), which their pages recommend for speed, were 3 to 7 times slower here.
    """
    import datasets
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    from dataload.benchmarks.systems import huggingface

    sources = [
        datasets.load_dataset("parquet", data_files=f"{folder}/parquet/*", split="train", cache_dir=str(cache))
        for folder in folders
    ]
    for epoch in range(EPOCHS + 1):
        shuffled = [source.shuffle(seed=epoch) for source in sources]
        rows = datasets.interleave_datasets(shuffled, probabilities=[*WEIGHTS], seed=epoch).with_format("arrow")
        batches = BatchSampler(SequentialSampler(rows), BATCH, drop_last=False)
        collate = partial(huggingface.made, transform=None)
        yield iter(DataLoader(rows, sampler=batches, batch_size=None, collate_fn=collate, num_workers=2))


def litdata(folders: list[Path], cache: Path) -> Epochs:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    from dataload.benchmarks.systems.torch_loading import collated

    def source(number: int, folder: Path) -> Any:
        return StreamingDataset(str(folder / "litdata"), str(cache / f"{number}"), shuffle=True, batch_decode="all")

    mixture = CombinedStreamingDataset(
        [source(*each) for each in enumerate(folders)], weights=WEIGHTS, iterate_over_all=False
    )
    loader = StreamingDataLoader(mixture, batch_size=BATCH, collate_fn=collated, **WORKERS)
    while True:
        yield iter(loader)


def mosaic(folders: list[Path], _: Path) -> Epochs:
    from dataload.benchmarks.systems.mosaic import Stream, StreamingDataLoader, StreamingDataset
    from dataload.benchmarks.systems.torch_loading import collated

    streams = [
        Stream(local=str(folder / "mosaic"), proportion=weight) for folder, weight in zip(folders, WEIGHTS, strict=True)
    ]
    dataset = StreamingDataset(streams=streams, shuffle=True, batch_size=BATCH)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=collated, **WORKERS)
    while True:
        yield iter(loader)


SYSTEMS: dict[str, Callable[[list[Path], Path], Epochs]] = {
    each.__name__: each for each in (ours, hugging_face, litdata, mosaic)
}


def measured(name: str, size: str, folder: Path, cache: Path) -> dict[str, float]:
    """Return the rows per second, and how many rows a source is off its share at the worst batch.

    The consumer reads every byte.
    """
    folders = [folder / f"{source}" for source in range(len(WEIGHTS))]
    if name in ("litdata", "mosaic"):
        from dataload.benchmarks.systems import litdata, mosaic

        for source, each in enumerate(folders):
            (each / name).mkdir()
            {"litdata": litdata, "mosaic": mosaic}[name].convert(
                workload_of(source, size), each / "parquet", each / name
            )
    epochs, consumer = SYSTEMS[name](folders, cache), Consumer()
    for batch in next(epochs):
        consumer.take(batch)
    started, rows, error = perf_counter(), 0, 0.0
    for _ in range(EPOCHS):
        counts = np.zeros(len(WEIGHTS))
        for batch in next(epochs):
            consumer.take(batch)
            counts += np.bincount(np.asarray(batch["label"]), minlength=len(WEIGHTS))
            error = max(error, float(np.abs(counts - np.multiply(WEIGHTS, counts.sum())).max()))
        rows += int(counts.sum())
    return {"rows/s": rows / (perf_counter() - started), "quota error, rows": error, "rows of an epoch": rows / EPOCHS}


if __name__ == "__main__":
    name, size, folder, cache = sys.argv[1:]
    sys.stdout.write("\n" + json.dumps(measured(name, size, Path(folder), Path(cache))))

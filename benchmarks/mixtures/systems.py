"""The systems that mix sources, each in a process of its own: `python -m dataload.benchmarks.mixtures.systems`.

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

Batch = dict[str, Any]
Epochs = Iterator[Iterator[Batch]]


def workload_of(source: int, size: str) -> Workload:
    """Return a third of the tokens. The label of its rows is the number of the source."""
    whole = workloads(size)["tokens"]
    return replace(whole, make=partial(_labelled, source=source), rows=whole.rows // len(WEIGHTS))


def _labelled(rng: np.random.Generator, rows: int, source: int) -> pa.Table:
    made = tokens(np.random.default_rng([source, int(rng.integers(1 << 32))]), rows)
    return made.set_column(1, "label", pa.array(np.full(rows, source)))


def ours(folder: Path, cache: Path, workers: int) -> Epochs:
    """Yield epochs, which yield batches."""
    from dataload import mix
    from dataload.loader import make_loader

    sources = [str(folder / str(source) / "parquet") for source in range(len(WEIGHTS))]
    mixture = mix(sources, WEIGHTS, cache_dir=str(cache), cache_bytes="4GB")
    loader = make_loader(mixture, BATCH, **_options(workers))
    while True:
        yield iter(loader)


def interleaved(folder: Path, cache: Path, workers: int) -> Epochs:
    """Yield the same of `interleave_datasets` of Hugging Face datasets, map-style.

    Users of these datasets shuffle again before each epoch. So `shuffle`, `interleave_datasets` and the start of new
    workers are part of the time of an epoch. Iterable datasets (`to_iterable_dataset`), which their pages recommend for
    speed, were 3 to 7 times slower here. `flatten_indices` was no faster.
    """
    import datasets
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    from dataload.benchmarks.systems import huggingface

    sources = [_of_huggingface(folder / str(source) / "parquet", cache) for source in range(len(WEIGHTS))]
    for epoch in range(EPOCHS + 1):
        shuffled = [source.shuffle(seed=epoch) for source in sources]
        rows = datasets.interleave_datasets(shuffled, probabilities=[*WEIGHTS], seed=epoch).with_format("arrow")
        batches = BatchSampler(SequentialSampler(rows), BATCH, drop_last=False)
        collate = partial(huggingface.made, transform=None)
        yield iter(DataLoader(rows, sampler=batches, batch_size=None, collate_fn=collate, num_workers=workers))


def _of_huggingface(folder: Path, cache: Path) -> Any:
    import datasets

    return datasets.load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train", cache_dir=str(cache))


def litdata(folder: Path, cache: Path, workers: int) -> Epochs:
    """Yield the same of LitData's CombinedStreamingDataset."""
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    from dataload.benchmarks.systems.torch_loading import collated

    def source(number: int) -> Any:
        chunks = str(cache / str(number))
        return StreamingDataset(str(folder / str(number) / "litdata"), chunks, shuffle=True, batch_decode="all")

    sources = [source(number) for number in range(len(WEIGHTS))]
    mixture = CombinedStreamingDataset(sources, weights=WEIGHTS, iterate_over_all=False)
    loader = StreamingDataLoader(mixture, batch_size=BATCH, collate_fn=collated, **_options(workers))
    while True:
        yield iter(loader)


def mosaic(folder: Path, _: Path, workers: int) -> Epochs:
    """Yield the same of MosaicML's streams. An epoch has as many rows as all sources."""
    from dataload.benchmarks.systems.mosaic import Stream, StreamingDataLoader, StreamingDataset
    from dataload.benchmarks.systems.torch_loading import collated

    streams = [
        Stream(local=str(folder / str(source) / "mosaic"), proportion=weight) for source, weight in enumerate(WEIGHTS)
    ]
    dataset = StreamingDataset(streams=streams, shuffle=True, batch_size=BATCH)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=collated, **_options(workers))
    while True:
        yield iter(loader)


SYSTEMS: dict[str, Callable[[Path, Path, int], Epochs]] = {
    "dataload, mix": ours,
    "Hugging Face, interleave_datasets": interleaved,
    "LitData, CombinedStreamingDataset": litdata,
    "MosaicML, streams": mosaic,
}


def convert(size: str, folder: Path) -> None:
    """Convert the sources to the formats of LitData and MosaicML."""
    from dataload.benchmarks.systems import litdata, mosaic

    for source in range(len(WEIGHTS)):
        for system in (litdata, mosaic):
            at = folder / str(source) / system.__name__.rpartition(".")[2]
            at.mkdir()
            system.convert(workload_of(source, size), folder / str(source) / "parquet", at)


def measured(name: str, workers: int, folder: Path, cache: Path) -> None:
    """Measure a system in this process. Write the result as JSON.

    The consumer reads every byte. The rate is all rows of the epochs after the first over their time. The rows are the
    mean of these epochs.
    """
    epochs, consumer = SYSTEMS[name](folder, cache, workers), Consumer()
    for batch in next(epochs):
        consumer.take(batch)
    seconds, rows, error = 0.0, 0, 0.0
    for _ in range(EPOCHS):
        started, counts = perf_counter(), np.zeros(len(WEIGHTS))
        for batch in next(epochs):
            consumer.take(batch)
            counts += np.bincount(np.asarray(batch["label"]), minlength=len(WEIGHTS))
            error = max(error, float(np.abs(counts - np.multiply(WEIGHTS, counts.sum())).max()))
        seconds, rows = seconds + perf_counter() - started, rows + int(counts.sum())
    sys.stdout.write(json.dumps({"rate": rows / seconds, "error": error, "rows": rows / EPOCHS}) + "\n")


def _options(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "persistent_workers": workers > 0}


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(sys.argv[2], Path(sys.argv[3]))
    else:
        measured(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))

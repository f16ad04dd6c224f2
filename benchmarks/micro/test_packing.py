"""Packed sequences beside a bare gather of as many bytes, other packers, and a loader of documents. In CPU time."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import make_dataset, make_loader
from dataload.dataset import Dataset

TOKENS, LENGTH, BATCH, GROUPS = 40_000_000, 2048, 8, 32
ROUNDS = 5  # of each, in turn: the best one counts, because other processes may disturb the others
LINKS, DOCUMENTS_OF_A_FILE = 2000, 500_000  # files of one content, and documents of it: 10**9 in all


class Documents:
    """Documents of random lengths, as arrays and as a file.

    Args:
        folder: The folder of the file and its cache.
        tokens: Number of tokens.
        mean: Mean length of a document.
    """

    def __init__(self, folder: Path, tokens: int, mean: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = rng.lognormal(np.log(mean) - 0.5, 1, tokens // mean).astype(np.int64) + 1
        self.offsets = np.concatenate(([0], np.cumsum(self.lengths)))
        self.values = rng.integers(0, 50_000, self.offsets[-1], np.int32)
        table = pa.table({"tokens": pa.LargeListArray.from_arrays(self.offsets, self.values)})
        pq.write_table(
            table, folder / "a.parquet", row_group_size=-(-len(self.lengths) // GROUPS), use_dictionary=False
        )
        self.dataset = make_dataset(folder / "a.parquet", cache_dir=folder / "cache", cache_bytes="4GB")

    def lists(self, count: int) -> list[Any]:
        """Return the first documents."""
        return [self.values[self.offsets[n] : self.offsets[n + 1]] for n in range(count)]


def epoch_of(loader: Any) -> None:
    for _ in loader:
        pass


def bare_gather(documents: Documents, columns: int) -> Callable[[], None]:
    """Return a call that gathers all documents of as many columns in random order, in batches, by NumPy alone."""
    stored = [documents.values, *(documents.values.copy() for _ in range(columns - 1))]
    order = np.random.default_rng(1).permutation(len(documents.lengths))
    starts, stops = documents.offsets[:-1][order].tolist(), documents.offsets[1:][order].tolist()
    at_once = max(1, BATCH * LENGTH * len(starts) // len(documents.values))

    def gather() -> None:
        for first in range(0, len(starts), at_once):
            part = slice(first, first + at_once)
            for values in stored:
                np.concatenate([values[start:stop] for start, stop in zip(starts[part], stops[part], strict=True)])

    return gather


def packing_alone(loader: Any) -> Callable[[], None]:
    """Return a call that makes the columns of an epoch's batches, those of 32 at a time as a loader does, without one.

    As in a loader, each call is of another epoch, whose documents are put in order anew.
    """
    rows, runs = loader.dataset.rowstore, [run.ravel() for run, _, _ in loader.rank_sampler.runs(0, 0)]
    parts = [run[first : first + 32 * BATCH] for run in runs for first in range(0, len(run), 32 * BATCH)]
    epochs = count(1)

    def pack() -> None:
        draw = (1, next(epochs))
        for part in parts:
            rows.gather(part, draw=draw).columns()

    return pack


def fastest(*calls: Callable[[], object]) -> list[float]:
    """Return the least CPU seconds of each call, which take turns."""
    least = [np.inf] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            gc.collect()
            began = process_time()
            call()
            least[number] = min(least[number], process_time() - began)
    return least


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("mean", [100, 500, 2000])
def test_beside_a_bare_gather(mean: int, split: bool, scaled: Any, tmp_path: Path, record_property: Any) -> None:
    """A batch has the tokens, segment_ids and position_ids: as many bytes as three stored columns of int32."""
    documents = Documents(tmp_path, scaled(TOKENS), mean)
    loader = make_loader(documents.dataset.pack(LENGTH, split=split), BATCH)
    epoch_of(loader)
    ours, alone, bytes_of_all = fastest(lambda: epoch_of(loader), packing_alone(loader), bare_gather(documents, 3))
    record_property("ns/token", f"{ours / len(documents.values) * 1e9:.2f}")
    record_property("of a gather of as many bytes", f"{bytes_of_all / ours:.2f}")
    record_property("without a loader", f"{bytes_of_all / alone:.2f}")


def _hugging_face(lists: list[Any], folder: Path) -> Callable[[], Iterator[int]]:
    """`group_texts` of the examples of transformers, once, and the batches in each epoch."""
    datasets = pytest.importorskip("datasets")

    def group_texts(batch: Any) -> Any:
        joined = [token for tokens in batch["tokens"] for token in tokens]
        total = len(joined) // LENGTH * LENGTH
        return {"tokens": [joined[first : first + LENGTH] for first in range(0, total, LENGTH)]}

    def epoch() -> Iterator[int]:
        rows = datasets.Dataset.from_dict({"tokens": lists}, features=features)
        rows = rows.map(group_texts, batched=True, load_from_cache_file=False, keep_in_memory=True)
        for batch in rows.with_format("torch").iter(BATCH):
            yield batch["tokens"].numel()

    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32"))})
    datasets.disable_progress_bars()
    return epoch


def _trl(strategy: str) -> Callable[[list[Any], Path], Callable[[], Iterator[int]]]:
    def packer(lists: list[Any], folder: Path) -> Callable[[], Iterator[int]]:
        data_utils = pytest.importorskip("trl.data_utils", exc_type=ImportError)
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()

        def epoch() -> Iterator[int]:
            rows = datasets.Dataset.from_dict({"tokens": lists}, features=features)
            rows = data_utils.pack_dataset(rows, LENGTH, strategy, {"load_from_cache_file": False})
            for batch in rows.with_format("torch").iter(BATCH):
                yield sum(each.numel() for each in batch["tokens"])

        features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32"))})
        return epoch

    return packer


def _grain(kind: str) -> Callable[[list[Any], Path], Callable[[], Iterator[int]]]:
    def packer(lists: list[Any], folder: Path) -> Callable[[], Iterator[int]]:
        grain = pytest.importorskip("grain")

        def epoch() -> Iterator[int]:
            rows = grain.MapDataset.source([{"tokens": each} for each in lists]).shuffle(0).to_iter_dataset()
            if kind == "whole":
                packed = grain.experimental.BestFitPackIterDataset(
                    rows, length_struct={"tokens": LENGTH}, num_packing_bins=64
                )
            else:
                packed = grain.experimental.ConcatThenSplitIterDataset(rows, length_struct={"tokens": LENGTH})
            for batch in packed.batch(BATCH):
                yield torch.from_numpy(batch["tokens"]).numel()

        return epoch

    return packer


PEERS = {
    "Hugging Face": _hugging_face,
    "TRL wrapped": _trl("wrapped"),
    "TRL bfd_split": _trl("bfd_split"),
    "Grain split": _grain("split"),
    "Grain whole": _grain("whole"),
}


@pytest.mark.parametrize("name", PEERS)
def test_beside_other_packers(name: str, scaled: Any, tmp_path: Path, record_property: Any) -> None:
    """They pack documents in memory; documents longer than a sequence are cut before."""
    documents = Documents(tmp_path, scaled(TOKENS // 8), 500)
    lists = [each[:LENGTH] for each in documents.lists(len(documents.lengths))]
    theirs = PEERS[name](lists, tmp_path)
    loader = make_loader(documents.dataset.pack(LENGTH, split="whole" not in name and "bfd" not in name), BATCH)
    epoch_of(loader)
    seconds, ours = fastest(lambda: sum(theirs()), lambda: epoch_of(loader))
    record_property("tokens/s", f"{sum(map(len, lists)) / seconds:,.0f}")
    record_property("ours, times as many", f"{seconds / sum(map(len, lists)) * len(documents.values) / ours:.1f}")


def _first_batch(dataset: Dataset, batch: int) -> Callable[[], None]:
    def call() -> None:
        steps = iter(make_loader(dataset, batch))
        next(steps)
        steps.close()

    return call


def test_first_batch(scaled: Any, tmp_path: Path, record_property: Any) -> None:
    """Warm, with loaders that are made anew: of documents, and of sequences that have as many tokens."""
    documents = Documents(tmp_path, scaled(TOKENS), 500)
    epoch_of(make_loader(documents.dataset, BATCH))
    packed = documents.dataset.pack(LENGTH)
    plain, sequences = fastest(_first_batch(documents.dataset, BATCH * LENGTH // 500), _first_batch(packed, BATCH))
    record_property("ms", f"{1000 * sequences:.1f}")
    record_property("of the loader of documents", f"{sequences / plain:.2f}")


def test_a_billion_documents(scaled: Any, tmp_path: Path, record_property: Any) -> None:
    """2,000 links to one file, of 100 row groups of 5,000 documents each. The row groups of a batch are open."""
    offsets = np.arange(DOCUMENTS_OF_A_FILE + 1) * 4
    table = pa.table({"tokens": pa.LargeListArray.from_arrays(offsets, np.arange(offsets[-1], dtype=np.int32))})
    pq.write_table(table, tmp_path / "one.parquet", row_group_size=5000)
    (tmp_path / "links").mkdir()
    for number in range(scaled(LINKS)):
        (tmp_path / "links" / f"{number:05}.parquet").hardlink_to(tmp_path / "one.parquet")
    documents = make_dataset(tmp_path / "links", cache_dir=tmp_path / "cache")
    began = process_time()
    packed = documents.pack(LENGTH)
    sequences = len(packed)
    record_property("s to read the footers", f"{process_time() - began:.2f}")
    sampler = make_loader(packed, BATCH).rank_sampler

    def order_of(epoch: int) -> Any:
        sampler.set_epoch(epoch)
        return next(sampler.runs(epoch, 0))[0][0]

    def sequences_of(rows: Any, draw: Any) -> None:
        packed.rowstore.gather(rows, draw=draw).columns()

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        began = process_time()
        found = call(*arguments)
        seconds.append(process_time() - began)
        return found

    sequences_of(order_of(0), (0, 0))
    parts = []
    for epoch in range(1, ROUNDS):
        seconds: list[float] = []
        rows = timed(order_of, epoch)
        sequences_of(rows, (1, epoch))  # fetches and opens the row groups
        timed(sequences_of, rows, (0, epoch))
        parts.append(sum(seconds))
    record_property("documents", f"{len(documents):,}")
    record_property("sequences", f"{sequences:,}")
    record_property("ms to set_epoch and a first batch", f"{1000 * min(parts):.1f}")
    tracemalloc.start()
    sequences_of(order_of(ROUNDS), (0, ROUNDS))
    record_property("MB", f"{tracemalloc.get_traced_memory()[1] / 1e6:.1f}")
    tracemalloc.stop()

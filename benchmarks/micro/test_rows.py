"""Warm epochs beside their floors: a gather from memory, a copy of the bytes, and a scan by pyarrow. In CPU time.

The epochs wait for nothing, and other jobs of the machine disturb CPU time less than the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset, make_loader, mix
from dataload.benchmarks.batches import Batch, transformed, values
from dataload.benchmarks.workloads import Workload

BATCH = 256
RUN_BYTES = 1 << 20  # fits into the cache of a core
DISTINCT, TEXT_BYTES = 500, 120

pytestmark = pytest.mark.benchmark(timer=process_time)

CHOICES: dict[str, Callable[[Any], Any]] = {
    "all rows": lambda whole: whole,
    "half of the rows": lambda whole: whole.select(np.random.default_rng(0).random(len(whole)) < 0.5),
    "three sources": lambda whole: mix(whole.split([1 / 3] * 3)),
}


class Gather:
    """Shuffled batches from rows in memory. One gather makes many small batches; bytes are not copied."""

    def __init__(self, workload: Workload, files: Path) -> None:
        self._workload = workload
        table = pq.read_table(files)
        columns = {name: values(table[name].combine_chunks()) for name in table.column_names}
        columns = transformed(columns, workload.prepare)
        if workload.features:
            columns["x"] = np.stack([columns.pop(name) for name in workload.features], axis=1)
        self._lists = {
            name: np.array([*column, None], object)[:-1] for name, column in columns.items() if isinstance(column, list)
        }
        self._arrays = {name: column for name, column in columns.items() if name not in self._lists}
        batch_bytes = workload.batch_size * sum(array[0].nbytes for array in self._arrays.values())
        self._batches_at_once = max(1, RUN_BYTES // batch_bytes)

    def epoch(self, number: int) -> Iterator[Batch]:
        size, at_once = self._workload.batch_size, self._batches_at_once
        order = np.random.default_rng(number).permutation(self._workload.rows)
        for first in range(0, len(order), at_once * size):
            run = order[first : first + at_once * size]
            arrays = {name: np.take(array, run, axis=0, mode="clip") for name, array in self._arrays.items()}
            lists: dict[str, list[Any]] = {name: array[run].tolist() for name, array in self._lists.items()}
            for start in range(0, len(run), size):
                batch: Batch = {name: array[start : start + size] for name, array in arrays.items()}
                batch |= {name: values[start : start + size] for name, values in lists.items()}
                yield transformed(batch, self._workload.transform)


def drain(batches: Iterable[Any]) -> int:
    """Return the number of rows of an epoch."""
    return sum(len(next(iter(batch.values()))) for batch in batches)


def epochs(benchmark: Any, per_second: Any, epoch: Callable[[], Iterable[Any]]) -> None:
    per_second("rows", benchmark.pedantic(lambda: drain(epoch()), rounds=9, warmup_rounds=2))


@pytest.mark.parametrize("name", ["table", "tokens", "text", "images"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("threads", [None, 0])
def test_epoch(
    benchmark: Any, files: Any, name: str, choice: str, threads: int | None, tmp_path: Path, per_second: Any
) -> None:
    workload, folder = files(name)
    benchmark.group = f"warm epoch: {name}"
    whole = make_dataset(folder, cache=CacheConfig(str(tmp_path), "4GB"))
    group = {"x": list(workload.features)} if workload.features else None
    loader = make_loader(CHOICES[choice](whole), BATCH, group=group, num_threads=threads)
    epochs(benchmark, per_second, lambda: loader)


@pytest.mark.parametrize("name", ["table", "tokens", "text", "images"])
@pytest.mark.parametrize("floor", ["gather", "copy", "scan"])
def test_floor(benchmark: Any, files: Any, name: str, floor: str, per_second: Any) -> None:
    workload, folder = files(name)
    benchmark.group = f"warm epoch: {name}"
    table = pq.read_table(folder).combine_chunks()
    if floor == "gather":
        gather = Gather(workload, folder)
        epochs(benchmark, per_second, lambda: gather.epoch(0))
    elif floor == "copy":
        buffers = [np.frombuffer(each, np.uint8) for column in table for each in column.chunk(0).buffers() if each]
        benchmark(lambda: [each.copy() for each in buffers])
        per_second("rows", len(table))
    else:
        dataset = pyarrow.dataset.dataset(folder, format="parquet")
        per_second("rows", benchmark(lambda: sum(map(len, dataset.to_batches()))))


@pytest.mark.benchmark(group="chat messages", timer=process_time)
@pytest.mark.parametrize("system", ["dataload", "Hugging Face, map-style"])
def test_chat(benchmark: Any, scaled: Any, system: str, tmp_path: Path, per_second: Any) -> None:
    """Conversations of one to seven messages, each with a role and 20 to 300 letters, as Python objects."""
    file = str(tmp_path / "chat.parquet")
    pq.write_table(conversations(scaled(200_000)), file, row_group_size=4000)
    if system == "dataload":
        batches: Any = make_loader(file, BATCH, cache=CacheConfig(str(tmp_path / "cache"), "4GB"))
    else:
        datasets = pytest.importorskip("datasets")
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler

        datasets.disable_progress_bars()
        with suppress(ImportError):
            import tqdm

            tqdm.tqdm.monitor_interval = 0  # Else it starts a thread.
        rows = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
        sampler = BatchSampler(RandomSampler(rows), BATCH, drop_last=False)
        batches = DataLoader(rows, sampler=sampler, batch_size=None, collate_fn=lambda batch: batch)
    epochs(benchmark, per_second, lambda: batches)


@pytest.mark.benchmark(group="text of 500 distinct values", timer=process_time)
def test_shared_text(benchmark: Any, scaled: Any, tmp_path: Path, per_second: Any, record_property: Any) -> None:
    """Parquet stores such text as dictionary codes."""
    count, file = scaled(200_000), tmp_path / "text.parquet"
    values = pa.array([f"{number:0{TEXT_BYTES}d}" for number in range(DISTINCT)])
    codes = pa.array(np.random.default_rng(0).integers(0, DISTINCT, count))
    pq.write_table(pa.table({"text": values.take(codes)}), file, row_group_size=100_000)
    loader = make_loader(file, BATCH, cache=CacheConfig(str(tmp_path / "cache"), "4GB"))
    epochs(benchmark, per_second, lambda: loader)
    cached = sum(path.stat().st_size for path in (tmp_path / "cache/blobs").rglob("*") if path.is_file())
    record_property("bytes a row in Parquet", f"{file.stat().st_size / count:.1f}")
    record_property("bytes a row in the cache", f"{cached / count:.1f}")


def conversations(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 8, rows)
    lengths = rng.integers(20, 300, int(counts.sum()))
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     etaoinshr", np.uint8)
    starts, ends = (np.concatenate(([0], np.cumsum(sizes))).astype(np.int32) for sizes in (counts, lengths))
    characters = letters[rng.integers(0, len(letters), int(ends[-1]))]
    content = pa.StringArray.from_buffers(len(lengths), pa.py_buffer(ends), pa.py_buffer(characters))
    role = pa.array(["system", "user", "assistant"]).take(pa.array(rng.integers(0, 3, len(lengths))))
    messages = pa.StructArray.from_arrays([role, content], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array(starts), messages)})

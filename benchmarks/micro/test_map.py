"""Tokenize once: `Dataset.map` beside `map` of Hugging Face datasets, with one tokenizer, trained on Python's library.

The first pass is opening the data, tokenizing, and a shuffled epoch that reads each token. Later epochs are shuffled,
too, and only delivered. Compare systems that deliver the same form: an array for each text, or one of all texts (flat).
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from xxhash import xxh3_64_intdigest

from dataload import CacheConfig, make_dataset, make_loader

BATCH, ROUNDS = 64, 3
TEXT_BYTES = 2_000  # of a row


@functools.cache
def tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def tokens(batch: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the numbers of the tokens of each text."""
    found = tokenizer(path).encode_batch(list(batch["text"]))
    return {"tokens": [np.array(each.ids, np.int32) for each in found]}


def ours(file: str, path: str, folder: str, **options: Any) -> Iterator[Iterator[Any]]:
    """Yield epochs, which yield batches: an array for each text, or the values and lengths of all of them."""
    dataset = make_dataset(file, cache=CacheConfig(folder, "2GB"))
    mapped = dataset.map(functools.partial(tokens, path=path), version="a tokenizer of the benchmark")
    loader = make_loader(mapped, BATCH, **options)
    while True:
        if options.get("ragged") == "flat":
            yield ((batch["tokens"].values, batch["tokens"].offsets.diff()) for batch in loader)
        else:
            yield (batch["tokens"] for batch in loader)


def theirs(file: str, path: str, folder: str, form: str) -> Iterator[Iterator[Any]]:
    """Yield the same of Hugging Face datasets, in one of their formats."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_parquet(file, cache_dir=folder)
    mapped = dataset.map(functools.partial(tokens, path=path), batched=True, num_proc=2, remove_columns="text")
    mapped = mapped.with_format("torch" if form == "torch" else "arrow")
    for epoch in range(1 + ROUNDS):
        columns = (batch["tokens"] for batch in mapped.shuffle(seed=epoch).iter(batch_size=BATCH))
        if form == "torch":
            yield columns
        else:
            batches = map(flat, columns)
            yield map(rows_of, batches) if form == "arrays" else batches


def flat(column: Any) -> tuple[Any, Any]:
    """Return the values and lengths of a chunked array of lists."""
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(), lists.value_lengths().to_numpy()


def rows_of(batch: Any) -> list[Any]:
    """Return the array of each text."""
    if isinstance(batch, list):
        return batch
    values, lengths = batch
    return np.split(np.asarray(values), np.cumsum(np.asarray(lengths))[:-1])


SYSTEMS: dict[str, Callable[[str, str, str], Iterator[Iterator[Any]]]] = {
    "dataload, arrays": ours,
    "dataload, arrays, num_threads=0": functools.partial(ours, num_threads=0),
    "dataload, flat": functools.partial(ours, ragged="flat"),
    "dataload, flat, num_threads=0": functools.partial(ours, ragged="flat", num_threads=0),
    "datasets, torch format, arrays": functools.partial(theirs, form="torch"),
    "datasets, Arrow, split into arrays": functools.partial(theirs, form="arrays"),
    "datasets, Arrow, flat": functools.partial(theirs, form="flat"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, str, int]:
    """Return a Parquet file of texts, a trained tokenizer, and the digest of the tokens of all rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("text")
    file, path = str(folder / "text.parquet"), str(folder / "tokenizer.json")
    library = "".join(
        each.read_text(errors="ignore") for each in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    )
    rows = 300 if request.config.getoption("size") == "tiny" else 20_000
    starts = (np.arange(rows) * TEXT_BYTES) % (len(library) - TEXT_BYTES)
    texts = [library[start : start + TEXT_BYTES] for start in starts.tolist()]
    pq.write_table(pa.table({"text": texts}), file, row_group_size=1000)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel()
    trained.train_from_iterator(texts[:2000], trainers.BpeTrainer(vocab_size=8000, show_progress=False))
    trained.save(path)
    return file, path, digest(tokens({"text": texts}, path)["tokens"])


def digest(rows: list[Any]) -> int:
    """Return a digest of rows in any order."""
    return sum(xxh3_64_intdigest(np.asarray(row, np.int32).data) for row in rows)


@pytest.mark.parametrize("system", SYSTEMS)
def test_later_epoch(
    benchmark: Any, text: tuple[str, str, int], system: str, tmp_path: Path, record_property: Any
) -> None:
    benchmark.group = f"later epoch, {'flat' if 'flat' in system else 'arrays'}"
    file, path, expected = text
    started = perf_counter()
    epochs = SYSTEMS[system](file, path, str(tmp_path))
    found = sum(digest(rows_of(batch)) for batch in next(epochs))
    record_property("first pass, s", f"{perf_counter() - started:.2f}")
    assert found == expected
    benchmark.pedantic(lambda: [None for _ in next(epochs)], rounds=ROUNDS)

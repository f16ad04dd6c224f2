"""Tokenize once: `python -m dataload.benchmarks.text.tokenize`.

`Dataset.map` beside `map` of Hugging Face datasets with two processes, in turns, each in a process of its own. All
call one tokenizer, which is trained here on the sources of Python's library. The first pass is opening the data,
tokenizing and a shuffled epoch that reads each token. Later epochs are shuffled, too, and only delivered. A system is
compared with those that deliver the same form: an array for each text, or one of all texts (flat).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table
from xxhash import xxh3_64_intdigest

from dataload.benchmarks.summary import ranged
from dataload.dataset import make_dataset
from dataload.loader import make_loader

BATCH = 64
EPOCHS = 3  # later ones of a process
TEXT_BYTES = 2_000  # of a row

Result = dict[str, Any]
Flat = tuple[Any, Any]
Epochs = Iterator[Iterator[list[Any] | Flat]]


@functools.cache
def tokenizer(path: str) -> Any:
    """Return the tokenizer of a file."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def tokens(batch: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the numbers of the tokens of each text."""
    found = tokenizer(path).encode_batch(list(batch["text"]))
    return {"tokens": [np.array(each.ids, np.int32) for each in found]}


def ours(file: str, path: str, folder: str, **options: Any) -> Epochs:
    """Yield epochs, which yield batches: an array for each text, or the values and lengths of all of them."""
    dataset = make_dataset(file, cache_dir=folder, cache_bytes="2GB")
    mapped = dataset.map(functools.partial(tokens, path=path), version="a tokenizer of the benchmark")
    loader = make_loader(mapped, BATCH, **options)
    while True:
        if options.get("ragged") == "flat":
            yield ((batch["tokens"].values, batch["tokens"].offsets.diff()) for batch in loader)
        else:
            yield (batch["tokens"] for batch in loader)


def peers(file: str, path: str, folder: str, form: str) -> Epochs:
    """Yield the same of Hugging Face datasets, in one of their formats."""
    import datasets

    datasets.disable_progress_bars()
    dataset: Any = datasets.Dataset.from_parquet(file, cache_dir=folder)
    call = functools.partial(tokens, path=path)
    mapped = dataset.map(call, batched=True, num_proc=2, remove_columns="text")
    mapped = mapped.with_format("torch" if form == "torch" else "arrow")
    for epoch in range(EPOCHS + 1):
        columns = (batch["tokens"] for batch in mapped.shuffle(seed=epoch).iter(batch_size=BATCH))
        if form == "torch":
            yield columns
        else:
            batches = map(flat, columns)
            yield map(rows_of, batches) if form == "arrays" else batches


def flat(column: Any) -> Flat:
    """Return the values and lengths of a chunked array of lists."""
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(), lists.value_lengths().to_numpy()


def rows_of(batch: list[Any] | Flat) -> list[Any]:
    """Return the array of each text."""
    if isinstance(batch, list):
        return batch
    values, lengths = batch
    return np.split(np.asarray(values), np.cumsum(lengths)[:-1])


SYSTEMS: dict[str, Callable[[str, str, str], Epochs]] = {
    "dataload, arrays": ours,
    "dataload, arrays, num_threads=0": functools.partial(ours, num_threads=0),
    "dataload, flat": functools.partial(ours, ragged="flat"),
    "dataload, flat, num_threads=0": functools.partial(ours, ragged="flat", num_threads=0),
    "datasets, torch format, arrays": functools.partial(peers, form="torch"),
    "datasets, Arrow, split into arrays": functools.partial(peers, form="arrays"),
    "datasets, Arrow, flat": functools.partial(peers, form="flat"),
}
OURS, PEERS = ([name for name in SYSTEMS if name.startswith(maker)] for maker in ("dataload", "datasets"))


def main(
    rows: Annotated[int, typer.Option(help="Texts of 2,000 bytes.")] = 20_000,
    rounds: Annotated[int, typer.Option(help="Rounds of all systems.")] = 3,
) -> None:
    """Measure the systems, and print their times and ratios."""
    found: dict[str, list[Result]] = {name: [] for name in SYSTEMS}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file, path = Path(folder) / "text.parquet", Path(folder) / "tokenizer.json"
        texts = library(rows)
        pq.write_table(pa.table({"text": texts}), file, row_group_size=1000)
        train(texts[:2000], path)
        for number in range(rounds):
            for name in [*SYSTEMS][:: -1 if number % 2 else 1]:
                found[name].append(in_process(name, file, path, folder))
    table = Table("system", "first pass, s", "a later epoch, s", "tokens")
    for name, results in found.items():
        table.add_row(
            name,
            *(ranged([each[key] for each in results], "{:.2f}") for key in ("first", "later")),
            f"{results[0]['tokens'][0]:,}",
        )
    Console().print(table)
    assert len({tuple(each["tokens"]) for results in found.values() for each in results}) == 1
    for own, peer in product(OURS, PEERS):
        if ("flat" in own) == ("flat" in peer):
            first, later = (
                ranged([b[key] / a[key] for a, b in zip(found[own], found[peer], strict=True)], "{:.2f}")
                for key in ("first", "later")
            )
            Console().print(f"{own}: {first} x as fast as {peer} in the first pass, {later} x later")


def library(rows: int) -> list[str]:
    """Return parts of the sources of Python's library, again from the begin if there are too few."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    text = "".join(path.read_text(errors="ignore") for path in sources)
    starts = (np.arange(rows) * TEXT_BYTES) % (len(text) - TEXT_BYTES)
    return [text[start : start + TEXT_BYTES] for start in starts.tolist()]


def train(texts: list[str], path: Path) -> None:
    """Train a tokenizer of 8,000 tokens by byte pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel()
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, show_progress=False))
    trained.save(str(path))


def in_process(name: str, file: Path, path: Path, folder: str) -> Result:
    """Return the seconds of the first pass and of a later epoch, and the tokens of an epoch."""
    with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as cache:
        command = [sys.executable, "-m", __spec__.name, name, str(file), str(path), cache]
        environ = {**os.environ, "HF_HOME": cache, "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
        result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def counted(epoch: Iterator[list[Any] | Flat]) -> tuple[int, int]:
    """Return the number of tokens, and a digest of the rows in any order."""
    count = digest = 0
    for rows in map(rows_of, epoch):
        count += sum(map(len, rows))
        digest += sum(xxh3_64_intdigest(np.asarray(row, np.int32).data) for row in rows)
    return count, digest


def delivered(epoch: Iterator[list[Any] | Flat]) -> int:
    """Return the number of tokens. Reading all of them would take as long as delivering them."""
    return sum(sum(map(len, batch)) if isinstance(batch, list) else len(batch[0]) for batch in epoch)


def measured(name: str, *paths: str) -> None:
    """Measure a system in this process."""
    started = perf_counter()
    epochs = SYSTEMS[name](*paths)
    found = counted(next(epochs))
    first, started = perf_counter() - started, perf_counter()
    for _ in range(EPOCHS):
        assert delivered(next(epochs)) == found[0]
    sys.stdout.write(json.dumps({"first": first, "later": (perf_counter() - started) / EPOCHS, "tokens": found}))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SYSTEMS:
        measured(*sys.argv[1:])
    else:
        typer.run(main)

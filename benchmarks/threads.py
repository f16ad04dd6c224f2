"""Transforms in threads: `python -m dataload.benchmarks.threads`.

Each system decodes photographs and takes random resized crops, in warm epochs, in a process of its own. All of them use
Pillow, and one `dataload.images`. The systems run in turns. A table shows images per second, CPU-seconds per 1,000
images, the most memory, and the most bytes in /dev/shm. The memory counts each page of a process and its workers once,
without the page cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console
from rich.table import Table

from dataload import images
from dataload.benchmarks.batches import Row, values
from dataload.benchmarks.images.photos import CROP, photos, random_crop
from dataload.benchmarks.machine.usage import cpu_seconds, in_shared_memory, peak_memory
from dataload.benchmarks.summary import ranged
from dataload.loader import make_loader

BATCH = 64
EPOCHS = 2  # timed ones of a process, after one that is not
SECONDS = 600.0  # limit of a process
PEER = "DataLoader, 2 workers, Pillow"

Result = dict[str, float]
Transform = Callable[..., dict[str, Any]]


def decoded(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a batch with its photographs decoded and cropped."""
    pixels = np.stack([random_crop(image, rng) for image in batch["image"]])
    return {**batch, "image": torch.from_numpy(pixels)}


def decoded_faster(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return the same by `dataload.images`."""
    return {**batch, "image": images.random_resized_crop(batch["image"], rng, CROP)}


def ours(threads: int, transform: Transform, file: str, cache_dir: str) -> Iterator[Iterator[Any]]:
    loader = make_loader(file, BATCH, transform=transform, num_threads=threads, cache_dir=cache_dir, cache_bytes="4GB")
    while True:
        yield iter(loader)


def peer(file: str, cache_dir: str) -> Iterator[Iterator[Any]]:  # noqa: ARG001 (it has its rows in memory)
    from torch.utils.data import DataLoader

    rows: Any = _Rows(file)
    loader: Any = DataLoader(rows, BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    while True:
        yield iter(loader)


class _Rows(torch.utils.data.Dataset[Row]):
    """Photographs in memory, decoded one by one."""

    def __init__(self, file: str) -> None:
        table = pq.read_table(file)
        self._columns = {name: values(table[name].combine_chunks()) for name in table.column_names}
        self._rng = np.random.default_rng()

    def __len__(self) -> int:
        return len(self._columns["label"])

    def __getitem__(self, index: int) -> Row:
        row = {name: column[index] for name, column in self._columns.items()}
        return {**row, "image": torch.from_numpy(random_crop(row["image"], self._rng).copy())}


SYSTEMS: dict[str, Callable[[str, str], Iterator[Iterator[Any]]]] = {
    **{f"dataload, {threads} threads, Pillow": partial(ours, threads, decoded) for threads in (0, 1, 2)},
    "dataload, 2 threads, its images": partial(ours, 2, decoded_faster),
    PEER: peer,
}


def main(
    rows: Annotated[int, typer.Option(help="Photographs.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Rounds of all systems.")] = 3,
) -> None:
    found: dict[str, list[Result]] = {name: [] for name in SYSTEMS}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "photos.parquet"
        pq.write_table(photos(np.random.default_rng(0), rows), file, row_group_size=100, compression="none")
        for number in range(rounds):
            names = [*SYSTEMS]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(in_process(name, file, Path(folder)))
    table = Table("system", "images/s", "x DataLoader", "CPU-s per 1,000", "memory, MB", "/dev/shm, MB")
    for name, results in found.items():
        ratios = [ours["rate"] / peers["rate"] for ours, peers in zip(results, found[PEER], strict=True)]
        table.add_row(
            name,
            ranged([result["rate"] for result in results], "{:,.0f}"),
            ranged(ratios, "{:.2f}"),
            ranged([result["cpu"] for result in results], "{:.2f}"),
            ranged([result["memory"] / 1e6 for result in results], "{:,.0f}"),
            ranged([result["shared"] / 1e6 for result in results], "{:,.0f}"),
        )
    Console().print(table)


def in_process(name: str, file: Path, folder: Path) -> Result:
    """Run a system in a process of its own. Return its rate, CPU-seconds per 1,000 rows, and bytes of memory."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    with TemporaryDirectory(dir=folder) as cache_dir:
        command = [sys.executable, "-m", __spec__.name, name, str(file), cache_dir, str(answer)]
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, env=os.environ)
        memory = peak_memory(process, SECONDS)
    result: Result = json.loads(answer.read_text())
    return {**result, "memory": memory}


def measured(name: str, file: str, cache_dir: str, answer: str) -> None:
    """Measure a system in this process."""
    epochs = SYSTEMS[name](file, cache_dir)
    for _ in next(epochs):
        pass
    rows, shared, before, cpu, started = 0, 0, in_shared_memory(), cpu_seconds(), perf_counter()
    for _ in range(EPOCHS):
        for batch in next(epochs):
            rows += len(batch["label"])
            shared = max(shared, in_shared_memory() - before)
    seconds = perf_counter() - started
    used = cpu_seconds() - cpu
    Path(answer).write_text(json.dumps({"rate": rows / seconds, "cpu": used / rows * 1000, "shared": shared}))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SYSTEMS:
        measured(*sys.argv[1:])
    else:
        typer.run(main)

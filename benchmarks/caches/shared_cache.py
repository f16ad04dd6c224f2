"""Two datasets in one cache, both read at once: `python -m dataload.benchmarks.caches.shared_cache [--share 1.2]`.

Each of them fits into the cache, both together do not. An S3 server counts the bytes of each epoch of both. The cases
are one process that reads them by turns or together; a loader that starts when the other has filled the cache; a
process for each dataset, alone, with two workers, and with two ranks, which wait for each other at each batch or not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table

from dataload.benchmarks.origin import Origin, s3
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache.config import CacheConfig
from dataload.dataset import make_dataset
from dataload.loader import Loader, make_loader
from dataload.world import World

GROUPS, ROWS, COLUMNS = 60, 2000, 16  # row groups of a dataset, rows and columns of a row group
BATCHES = 10 * GROUPS  # of an epoch
EPOCHS = 5
NAMES = ("one", "other")
# By name: ranks of each dataset, workers of each rank, and batches after which all processes wait for each other.
PROCESSES = {
    "two processes": (1, 0, BATCHES),
    "two processes with two workers each": (1, 2, BATCHES),
    "two ranks each, in step": (2, 0, 1),
    "two ranks each, each at its own pace": (2, 0, BATCHES),
}


def loader_of(
    name: str, endpoint_url: str, cache: CacheConfig, rank: int = 0, ranks: int = 1, workers: int = 0
) -> Loader:
    url = f"s3://{BUCKET}/{name}"
    dataset = make_dataset(url, storage_options=s3.storage_options(endpoint_url), cache=cache)
    options: dict[str, Any] = {"num_workers": workers, "transform": _identity} if workers else {}
    return make_loader(dataset, ROWS // 10 // ranks, window=2, world=World(rank, ranks, rank, ranks), **options)


def _identity(batch: Any) -> Any:
    return batch


def process(name: str, endpoint_url: str, folder: str, limit: int, rank: int, ranks: int, workers: int) -> None:
    """Read as many batches as each line of standard input says."""
    loader = loader_of(name, endpoint_url, CacheConfig(folder, limit), rank, ranks, workers)
    answer = partial(print, "done", flush=True)
    answer()
    batches = chain.from_iterable(repeat(loader))
    for line in sys.stdin:
        _exhaust(islice(batches, int(line)))
        answer()


def _exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


class Case:
    """An origin with both datasets, and a cache."""

    def __init__(self, origin: Origin, folder: str, limit: int, size: int) -> None:
        self._origin, self._folder, self._limit, self._size = origin, folder, limit, size

    def epochs(self, read: Callable[[], None]) -> list[float]:
        """Return what each epoch of both datasets fetches after the first, in sizes of a dataset."""
        found = []
        for _ in range(EPOCHS):
            self._origin.reset()
            read()
            found.append(self._origin.stats()["get_bytes"] / self._size)
        return found[1:]

    def in_one_process(self, *, together: bool = False, late: bool = False) -> list[float]:
        one = self.loader(NAMES[0])
        if late:
            _exhaust(one)
        other = self.loader(NAMES[1])
        return self.epochs(lambda: _exhaust(zip(one, other, strict=True) if together else chain(one, other)))

    def in_processes(self, ranks: int, workers: int, step: int) -> list[float]:
        call = "from dataload.benchmarks.caches.shared_cache import process; process(*json.loads(sys.argv[1]))"
        program = f"import json, sys; {call}"
        children = []
        for name in NAMES:
            for rank in range(ranks):
                given = json.dumps([name, self._origin.endpoint_url, self._folder, self._limit, rank, ranks, workers])
                command = [sys.executable, "-c", program, given]
                children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

        def wait() -> None:
            for child in children:
                assert child.stdout is not None
                child.stdout.readline()

        def read(batches: int) -> None:
            for child in children:
                assert child.stdin is not None
                child.stdin.write(f"{batches}\n")
                child.stdin.flush()
            wait()

        def epoch() -> None:
            for _ in range(BATCHES // step):
                read(step)

        wait()
        found = self.epochs(epoch)
        for child in children:
            child.communicate()
        return found

    def loader(self, name: str) -> Loader:
        return loader_of(name, self._origin.endpoint_url, CacheConfig(self._folder, self._limit))


def main(share: Annotated[float, typer.Option(help="size of the cache, in datasets")] = 1.2) -> None:
    """Measure what two datasets in one cache fetch."""
    with TemporaryDirectory() as folder:
        table = pa.table(
            {f"x{number}": np.random.default_rng(number).random(GROUPS * ROWS) for number in range(COLUMNS)}
        )
        for name in NAMES:
            path = Path(folder) / "origin" / BUCKET / name / "0.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(table, path, row_group_size=ROWS, compression="none", use_dictionary=False)
        size = sum(path.stat().st_size for path in (Path(folder) / "origin").rglob("*.parquet")) // len(NAMES)
        results = Table(
            "case", "datasets fetched an epoch", "mean", title=f"two datasets in a cache of {share:g} datasets"
        )
        with Origin(Path(folder) / "origin") as origin:

            def measure(name: str, read: Callable[[Case], list[float]]) -> None:
                with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as cache:
                    found = read(Case(origin, cache, int(share * table.nbytes), size))
                results.add_row(name, ", ".join(f"{each:.2f}" for each in found), f"{np.mean(found):.2f}")

            measure("one process, by turns", lambda case: case.in_one_process())
            measure("one process, together", lambda case: case.in_one_process(together=True))
            measure("one process, the other starts later", lambda case: case.in_one_process(late=True))
            for name, shape in PROCESSES.items():
                measure(name, lambda case, shape=shape: case.in_processes(*shape))  # type: ignore[misc]
            with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as cache:
                case = Case(origin, cache, int(share * table.nbytes), size)
                loaders = [case.loader(name) for name in NAMES]
                region = loaders[0].dataset.rowstore.blobs.by_dataset[0].tier.division().region / table.nbytes
        Console().print(results)
        Console().print(f"{2 - share + region:.2f} datasets cannot stay; {region:.2f} of these pass through the region")


if __name__ == "__main__":
    typer.run(main)

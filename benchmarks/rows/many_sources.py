"""200 sources of 10 files beside one dataset of all files: `python -m dataload.benchmarks.rows.many_sources`.

Prints, each in a process of its own, the seconds to open the files, the seconds to the first batch after that, rows per
second of a warm epoch, and the most threads and open files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.dataset import MapStyle

SOURCES, FILES, ROWS, BATCH = 200, 10, 500, 256


def write(folder: Path) -> None:
    """Write the files of all sources."""
    values = np.random.default_rng(0).random((ROWS, 8), np.float32)
    table = pa.table({f"f{column}": values[:, column] for column in range(8)})
    for source in range(SOURCES):
        (folder / f"{source}").mkdir()
        for file in range(FILES):
            pq.write_table(table, folder / f"{source}" / f"{file}.parquet")


def measure(folder: Path, *, mixed: bool) -> dict[str, float]:
    """Return the figures of this process."""
    cache, process, most = CacheConfig(str(folder / f"cache-{mixed}"), "4GB"), psutil.Process(), [0, 0]
    began = perf_counter()
    paths = [str(folder / f"{source}") for source in range(SOURCES)]
    data: MapStyle
    if mixed:
        data = mix(paths, cache=cache)
    else:
        data = make_dataset([f"{path}/{file}.parquet" for path in paths for file in range(FILES)], cache=cache)
    opened = perf_counter()
    loader = make_loader(data, BATCH, world=World(0, 1))
    first = 0.0
    for number, _ in enumerate(loader):
        first = first or perf_counter() - opened
        if number % 10 == 0:
            most = [max(most[0], threading.active_count()), max(most[1], process.num_fds())]
    again = perf_counter()
    rows = sum(len(batch["f0"]) for batch in loader)
    warm = rows / (perf_counter() - again)
    return {"open": opened - began, "first": first, "rows": warm, "threads": most[0], "files": most[1]}


def main() -> None:
    table = Table("", "open, s", "first batch, s", "warm rows/s", "threads", "open files")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write(Path(folder))
        for name in ("one", "mixed"):
            command = [sys.executable, "-m", __spec__.name, name, folder]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            figures = f"{found['open']:.2f}", f"{found['first']:.2f}", f"{found['rows']:,.0f}"
            table.add_row(name, *figures, f"{found['threads']}", f"{found['files']}")
    Console().print(table)


if __name__ == "__main__":
    if len(sys.argv) == 3:  # a process of `main`
        sys.stdout.write(json.dumps(measure(Path(sys.argv[2]), mixed=sys.argv[1] == "mixed")))
    else:
        main()

"""Mixtures beside other libraries: `python -m dataload.benchmarks.mixtures`.

Three sources of tokens on the local disk are mixed by weights and shuffled, in turns, each system in a process of its
own. A table shows the rows per second of an epoch after the first, and the quota error: how many rows a source is ahead
of its share, or behind, at the worst batch of the epoch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dataload.benchmarks.mixtures import systems
from dataload.benchmarks.mixtures.systems import SYSTEMS, WEIGHTS, workload_of
from dataload.benchmarks.summary import ranged
from dataload.benchmarks.workloads import write

CAPTION = (
    "Epochs of Hugging Face datasets include shuffle, interleave_datasets and new workers: their users shuffle again "
    "before each epoch. The workers of dataload have nothing to do without a transform: its threads read."
)
PEERS_PYTHON = Path(".venv-peers/bin/python")


def main(
    size: Annotated[str, typer.Option(help="Size of the tokens: tiny, small, middle or full.")] = "middle",
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of all systems.")] = 3,
    peers_python: Annotated[Path, typer.Option(help="Python of the peers' environment (make peers).")] = PEERS_PYTHON,
) -> None:
    """Measure all systems, and print rates and quota errors."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for source in range(len(WEIGHTS)):
            write(workload_of(source, size), Path(folder) / str(source) / "parquet")
        _run(peers_python, "convert", size, folder)
        for number in range(rounds):
            for name in [*SYSTEMS][:: -1 if number % 2 else 1]:
                python = Path(sys.executable) if SYSTEMS[name] is systems.ours else peers_python
                found[name].append(json.loads(_run(python, name, str(workers), folder)))
    table = Table("system", "rows/s", "quota error, rows", "rows of an epoch", caption=CAPTION)
    for name, results in found.items():
        cells = (ranged([each[key] for each in results], "{:,.0f}") for key in ("rate", "error", "rows"))
        table.add_row(name, *cells)
    Console().print(table)


def _run(python: Path, *arguments: str) -> str:
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        environment = {**os.environ, "HF_HOME": cache, "HF_DATASETS_OFFLINE": "1", "TMPDIR": cache}
        command = [str(python), "-m", systems.__name__, *arguments, cache]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return (done.stdout.splitlines() or [""])[-1]


if __name__ == "__main__":
    typer.run(main)

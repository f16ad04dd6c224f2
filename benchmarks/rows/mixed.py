"""Warm epochs of a dataset and of a mixture of its thirds: `python -m dataload.benchmarks.rows.mixed`.

Prints rows per second of CPU time, in turns in one process. The mixture has the same rows.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dataload import CacheConfig, make_dataset, mix
from dataload.benchmarks.rows.nested import BATCH, ROUNDS, rate, with_median
from dataload.benchmarks.workloads import workloads, write
from dataload.loader import make_loader

NAMES = ("table", "tokens", "images")


def main(size: Annotated[str, typer.Option(help="Size of the workloads: tiny, small or full.")] = "small") -> None:
    table = Table("workload", "one dataset, rows/s", "three sources, rows/s", "ratio")
    for name in NAMES:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            ratios = measure(name, size, Path(folder), table)
        with_median(table, ratios)
    Console().print(table)


def measure(name: str, size: str, folder: Path, table: Table) -> list[float]:
    """Add the rates of some rounds to the table. Return their ratios."""
    workload = workloads(size)[name]
    write(workload, folder / "data")
    whole = make_dataset(folder / "data", cache=CacheConfig(cache_dir=str(folder / "cache"), cache_bytes="4GB"))
    group = {"x": list(workload.features)} if name == "table" else None
    loaders = [make_loader(dataset, BATCH, group=group) for dataset in (whole, mix(whole.split([1 / 3] * 3)))]
    column = "x" if group else whole.schema.names[0]
    ratios = []
    for number in range(1 + ROUNDS):
        one, mixed = (rate(loader, column) for loader in loaders)
        if number:  # The first epochs decode.
            ratios.append(mixed / one)
            table.add_row(name, f"{one:,.0f}", f"{mixed:,.0f}", f"{ratios[-1]:.2f}")
    return ratios


if __name__ == "__main__":
    typer.run(main)

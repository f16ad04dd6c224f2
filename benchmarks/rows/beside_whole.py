"""Warm epochs of a dataset, and of another choice of its rows, in turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from dataload import CacheConfig, make_dataset
from dataload.benchmarks.rows.nested import BATCH, ROUNDS, rate, with_median
from dataload.benchmarks.workloads import workloads, write
from dataload.dataset import Dataset, MapStyle
from dataload.loader import make_loader

NAMES = ("table", "tokens", "images")


def compare(whole: str, other: str, choose: Callable[[Dataset], MapStyle], size: str) -> None:
    """Print rows per second of CPU time of three workloads.

    Args:
        whole: Heading of the dataset.
        other: Heading of the other choice.
        choose: Returns it.
        size: Size of the workloads: tiny, small, middle or full.
    """
    table = Table("workload", f"{whole}, rows/s", f"{other}, rows/s", "ratio")
    for name in NAMES:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            ratios = _measure(name, size, Path(folder), choose, table)
        with_median(table, ratios)
    Console().print(table)


def _measure(name: str, size: str, folder: Path, choose: Callable[[Dataset], MapStyle], table: Table) -> list[float]:
    """Add the rates of some rounds to the table. Return their ratios."""
    workload = workloads(size)[name]
    write(workload, folder / "data")
    whole = make_dataset(folder / "data", cache=CacheConfig(cache_dir=str(folder / "cache"), cache_bytes="4GB"))
    group = {"x": list(workload.features)} if name == "table" else None
    loaders = [make_loader(dataset, BATCH, group=group) for dataset in (whole, choose(whole))]
    column = "x" if group else whole.schema.names[0]
    ratios = []
    for number in range(1 + ROUNDS):
        one, other = (rate(loader, column) for loader in loaders)
        if number:  # The first epochs decode.
            ratios.append(other / one)
            table.add_row(name, f"{one:,.0f}", f"{other:,.0f}", f"{ratios[-1]:.2f}")
    return ratios

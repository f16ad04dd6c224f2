"""Warm epochs of a dataset and of a random half of its rows: `python -m dataload.benchmarks.rows.selected`.

Prints rows per second of CPU time, in turns in one process. Each row is a gather, so half of the rows should come at
the same rate.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from dataload.benchmarks.rows.beside_whole import compare
from dataload.dataset import Dataset


def main(
    size: Annotated[str, typer.Option(help="Size of the workloads: tiny, small, middle or full.")] = "small",
) -> None:
    """Measure both."""
    compare("all rows", "half of the rows", _half, size)


def _half(whole: Dataset) -> Dataset:
    return whole.select(np.random.default_rng(0).random(len(whole)) < 0.5)


if __name__ == "__main__":
    typer.run(main)

"""Warm epochs of a dataset and of a mixture of its thirds: `python -m dataload.benchmarks.rows.mixed`.

Prints rows per second of CPU time, in turns in one process. The mixture has the same rows.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dataload import mix
from dataload.benchmarks.rows.beside_whole import compare


def main(
    size: Annotated[str, typer.Option(help="Size of the workloads: tiny, small, middle or full.")] = "small",
) -> None:
    """Measure both."""
    compare("one dataset", "three sources", lambda whole: mix(whole.split([1 / 3] * 3)), size)


if __name__ == "__main__":
    typer.run(main)

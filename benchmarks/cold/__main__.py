"""The first epoch, by size of row groups: `python -m dataload.benchmarks.cold`.

For each shape of data, size of row groups and origin, the table compares the first epoch from an empty cache with
pyarrow's own S3 client, which scans the same files in order and keeps nothing, and with bare ranged GETs. Every
measurement runs in its own process, and the systems take turns. A measurement that fails is named in the table, and
the others go on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from dataload.benchmarks.cold.epoch import SYSTEMS, Task
from dataload.benchmarks.cold.first_batch import FIRST, needed
from dataload.benchmarks.cold.measurement import measure
from dataload.benchmarks.cold.shapes import ONE_A_FILE, SHAPES, write
from dataload.benchmarks.cold.table import HEADER, lines
from dataload.benchmarks.origin import Behaviour, Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.runtime.resource_limits import MEMORY_DIVISOR, usable_memory

ORIGINS = {
    "near": Behaviour(latency=0.03, bytes_per_second=90e6),
    "far": Behaviour(latency=0.1, bytes_per_second=40e6),
    "unlimited": Behaviour(),
}


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Shapes of the data; default: all but files.")] = None,
    group: Annotated[list[float] | None, typer.Option(help="Sizes of row groups in MB.")] = None,
    origin: Annotated[list[str] | None, typer.Option(help="Origins; default: all.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="Systems; default: all.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a batch of the loader.")] = 256,
    ranks: Annotated[int, typer.Option(help="Ranks of the host.")] = 1,
    cache_share: Annotated[float | None, typer.Option(help="Cache limit, as a share of the data.")] = None,
    window: Annotated[int | None, typer.Option(help="Row groups that the loader shuffles together.")] = None,
    megabytes: Annotated[int, typer.Option(help="Size of a dataset in MB.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Measurements of each system.")] = 5,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
    output: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Measure first epochs by the size of row groups. Print a line of a Markdown table for each as soon as it is known.

    Raises:
        Exit: A measurement failed.
    """
    budget = usable_memory() // MEMORY_DIVISOR / 1e6
    typer.echo(f"Medians (lowest–highest) of {rounds} with {megabytes} MB. Memory for row groups: {budget:.0f} MB.\n")
    typer.echo(HEADER)
    data, every, failed = folder.absolute() / "data", list[dict[str, Any]](), False
    for kind, size in product(shape or [name for name in SHAPES if name != ONE_A_FILE], group or [1, 10, 50, 130, 500]):
        prefix = f"cold/{kind}-{size:g}-{megabytes}"
        files = data / BUCKET / prefix
        write(kind, int(size * 1e6), megabytes * 10**6, files)
        limit = (
            None
            if cache_share is None
            else int(cache_share * sum(path.stat().st_size for path in files.glob("*.parquet")))
        )
        for place in origin or ORIGINS:
            with Origin(data, behaviour=ORIGINS[place]) as server:
                task = Task(server.endpoint_url, prefix, str(files), batch_size, ranks, limit, window)
                found, errors = _measured(system or list(SYSTEMS), rounds, task, server, folder.absolute())
            failed = failed or bool(errors)
            for line in lines((kind, f"{size:g}", place), found, errors, files, ORIGINS[place].latency):
                typer.echo(line)
            every += [
                {"shape": kind, "group": size, "origin": place, "batch_size": batch_size, "system": name, "runs": runs}
                for name, runs in found.items()
                if name != FIRST and runs
            ]
            if output is not None:
                output.write_text(json.dumps(every))
    if failed:
        raise typer.Exit(1)


def _measured(
    names: list[str], rounds: int, task: Task, server: Origin, folder: Path
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Measure the systems in turns. Return the figures of each run and the last error, by system."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*names, FIRST)}
    errors: dict[str, str] = {}
    for _, name in product(range(rounds), found):
        try:
            if name == FIRST:
                run = measure("bare GETs", replace(task, ranges=needed(task, server)), server, folder)
            else:
                run = measure(name, task, server, folder)
        except Exception as error:  # noqa: BLE001 (whatever happens, the other measurements go on)
            errors[name] = repr(error)
        else:
            found[name].append(run)
    return found, errors


if __name__ == "__main__":
    typer.run(main)

"""The first epoch, by size of row groups: `python -m dataload.benchmarks.cold`.

For each shape of data, size of row groups and origin, the table compares the first epoch from an empty cache with
pyarrow's own S3 client, which scans the same files in order and keeps nothing, and with bare ranged GETs. Every
measurement runs in its own process, and the systems take turns.
"""

from __future__ import annotations

import json
import math
import statistics
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dataload.benchmarks.cold.epoch import SYSTEMS
from dataload.benchmarks.cold.measurement import bound, measure
from dataload.benchmarks.cold.plot import draw
from dataload.benchmarks.cold.shapes import SHAPES, write
from dataload.benchmarks.origin import Behaviour, Origin
from dataload.benchmarks.systems.base import BUCKET

ORIGINS = {
    "near": Behaviour(latency=0.03, bytes_per_second=90e6),
    "far": Behaviour(latency=0.1, bytes_per_second=40e6),
    "unlimited": Behaviour(),
}


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Shapes of the data; default: all.")] = None,
    group: Annotated[list[float] | None, typer.Option(help="Sizes of row groups in MB.")] = None,
    origin: Annotated[list[str] | None, typer.Option(help="Origins; default: all.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="Systems; default: all.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a batch of the loader.")] = 256,
    ranks: Annotated[int, typer.Option(help="Ranks of the host.")] = 1,
    cache_share: Annotated[float | None, typer.Option(help="Cache limit, as a share of the data.")] = None,
    megabytes: Annotated[int, typer.Option(help="Size of a dataset in MB.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Measurements of each system.")] = 5,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
    output: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
    plot: Annotated[Path | None, typer.Option(help="An image file for the requests in flight over time.")] = None,
) -> None:
    """Measure first epochs by the size of row groups."""
    table = Table("shape", "row groups, MB", "origin", "system", "seconds", "low", "high", "first batch, s", "CPU s/GB",
                  "CPU ms/group", "memory, MB", "bytes", "duplicates", "requests", "in flight", "/ bound",
                  title="Medians")  # fmt: skip
    data, every = folder.absolute() / "data", []
    for kind, size in product(shape or SHAPES, group or [1, 10, 50, 130, 500]):
        prefix = f"cold/{kind}-{size:g}-{megabytes}"
        files = data / BUCKET / prefix
        write(kind, int(size * 1e6), megabytes * 10**6, files)
        row_groups = max(1, megabytes * 10**6 // int(size * 1e6))
        gigabytes = sum(path.stat().st_size for path in files.glob("*.parquet")) / 1e9
        for place in origin or ORIGINS:
            with Origin(data, behaviour=ORIGINS[place]) as server:
                names = system or list(SYSTEMS)
                found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
                setting = folder.absolute(), ranks, cache_share, batch_size
                for _, name in product(range(rounds), names):
                    found[name].append(measure(name, server, prefix, files, *setting))
            medians = {
                name: {key: statistics.median(run[key] for run in figures) for key in figures[0] if key != "over_time"}
                for name, figures in found.items()
            }
            for name, figures in found.items():
                middle = medians[name]
                seconds = [run["seconds"] for run in figures]
                table.add_row(
                    kind, f"{size:g}", place, name, f"{middle['seconds']:.2f}", f"{min(seconds):.2f}",
                    f"{max(seconds):.2f}", f"{middle['first']:.2f}", f"{middle['cpu'] / gigabytes:.2f}",
                    f"{1000 * middle['cpu'] / row_groups:.2f}",
                    f"{middle['memory'] / 1e6:.0f}", f"{middle['bytes']:.3f}", f"{middle['duplicates']:.0f}",
                    f"{middle['requests']:.0f}", "–" if math.isnan(middle["busy"]) else f"{middle['busy']:.0%}",
                    f"{middle['seconds'] / bound(medians, name):.2f}",
                )  # fmt: skip
                every.append({"shape": kind, "group": size, "origin": place, "batch_size": batch_size,
                              "system": name, "runs": figures})  # fmt: skip
                if output is not None:
                    output.write_text(json.dumps(every))
                if plot is not None:
                    draw(every, plot)
    Console(width=180).print(table)


if __name__ == "__main__":
    typer.run(main)

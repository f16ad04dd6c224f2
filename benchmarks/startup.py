"""The time until the first batch: `python -m dataload.benchmarks.startup [--workload NAME]`.

Each time is that of a new process that has imported torch, over a warm cache, with an S3 that answers after 30 ms. The
processes import compiled modules, as from an installed package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from dataload.benchmarks.origin import Behaviour, Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.workloads import check_names, workloads, write

LATENCY = 0.03  # seconds
PROGRAM = """
import json, sys
from time import perf_counter, process_time
import torch

arguments = json.loads(sys.argv[1])
started, processor = perf_counter(), process_time()
from dataload import CacheConfig, make_loader
imported = perf_counter()
loader = make_loader(
    arguments["url"],
    arguments["batch_size"],
    cache=CacheConfig(arguments["cache_dir"], engine=arguments["engine"]),
    storage_options=arguments["storage_options"],
)
made = perf_counter()
batches = iter(loader)
next(batches)
first, processor = perf_counter(), process_time() - processor
if arguments["whole"]:
    for _ in batches:
        pass
print(json.dumps({
    "import dataload": imported - started,
    "make_loader": made - imported,
    "first batch": first - made,
    "all of these": first - started,
    "processor time": processor,
}))
"""


def main(
    workload: Annotated[str, typer.Option(help="The dataset: images, tokens, table or text.")] = "table",
    size: Annotated[str, typer.Option(help='Its size: "tiny", "small", "middle" or "full".')] = "middle",
    engine: Annotated[str, typer.Option(help='"auto", "obstore" or "fsspec".')] = "auto",
    rounds: Annotated[int, typer.Option(help="Number of processes.", min=1)] = 7,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
) -> None:
    """Measure the time until the first batch in processes over a warm cache. Print a Markdown table."""
    check_names([workload], size)
    data, prefix, chosen = folder.absolute() / "data", f"startup/{size}/{workload}", workloads(size)[workload]
    write(chosen, data / BUCKET / prefix)
    with Origin(data, behaviour=Behaviour(latency=LATENCY)) as origin, TemporaryDirectory() as cache_dir:
        arguments = {
            "url": f"s3://{BUCKET}/{prefix}/",
            "batch_size": chosen.batch_size,
            "cache_dir": cache_dir,
            "engine": engine,
            "storage_options": origin.storage_options,
        }
        _seconds({**arguments, "whole": True})  # fills the cache
        found = [_seconds({**arguments, "whole": False}) for _ in range(rounds)]
    typer.echo(f"Seconds, medians of {rounds} processes (lowest–highest): {workload}, {size}, engine {engine}.\n")
    typer.echo("| part | seconds |\n| --- | --: |")
    for part in found[0]:
        seconds = [each[part] for each in found]
        typer.echo(f"| {part} | {median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f}) |")


def _seconds(arguments: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each part of the program in a new process."""
    # With this variable, each process would compile dataload again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    typer.run(main)

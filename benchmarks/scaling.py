"""How epochs scale with cores and ranks: `python -m dataload.benchmarks.scaling`.

Each line restricts the ranks to some cores, and reads files of the local disk: a first epoch from an empty cache, which
decodes and caches, and then warm epochs. With more ranks than one, each reads its part. The interpreter lock (GIL) is
asked for every millisecond in rank 0; its share is the time for which it was not to be had. Run it by a free-threaded
Python to see what the lock costs: without one, there is no share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from dataload.benchmarks.cold.shapes import write
from dataload.benchmarks.machine.usage import cpu_seconds
from dataload.runtime.child_process import as_child

GROUP_MB, BATCH_SIZE = 10, 256
WARM_SECONDS = 2.0
MODULE = "dataload.benchmarks.scaling"
HEADER = ["", "cores", "ranks", "cold GB/s", "cold CPU-s/GB", "cold GIL", "warm rows/s", "warm GIL"]


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Shapes of the data; default: images and numbers.")] = None,
    megabytes: Annotated[int, typer.Option(help="Size of a dataset in MB.")] = 2000,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Print a line of a Markdown table for each number of cores and ranks as soon as it is known."""
    every = sorted(os.sched_getaffinity(0))
    lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    title = f"{len(every)} cores, Python {sys.version.split()[0]}{'' if lock else ', free-threaded'}; {megabytes} MB"
    typer.echo(title if not as_json else json.dumps({"machine": title}))
    if not as_json:
        typer.echo(f"\n| {' | '.join(HEADER)} |\n| --- |{' --: |' * (len(HEADER) - 1)}")
    for kind in shape or ["images", "numbers"]:
        files = folder.absolute() / "data" / "scaling" / f"{kind}-{GROUP_MB}-{megabytes}"
        write(kind, GROUP_MB * 10**6, megabytes * 10**6, files)
        stored = sum(path.stat().st_size for path in files.glob("*.parquet"))
        for cores in _powers(len(every)):
            for ranks in _powers(cores, 4):
                with TemporaryDirectory(dir=folder) as cache:
                    found = _run(files, cache, every[:cores], ranks)
                cold, cpu = max(each["cold_seconds"] for each in found), sum(each["cpu"] for each in found)
                line = {
                    "cold": stored / 1e9 / cold,
                    "cpu": cpu / (stored / 1e9),
                    "cold_lock": found[0]["cold_lock"],
                    "warm": sum(each["warm"] for each in found),
                    "warm_lock": found[0]["warm_lock"],
                }
                if as_json:
                    typer.echo(json.dumps({"shape": kind, "cores": cores, "ranks": ranks, **line}))
                else:
                    locks = ["–" if line[name] is None else f"{line[name]:.0%}" for name in ("cold_lock", "warm_lock")]
                    cells = [f"{line['cold']:.2f}", f"{line['cpu']:.1f}", locks[0], f"{line['warm']:,.0f}", locks[1]]
                    typer.echo(f"| {kind} | {cores} | {ranks} | {' | '.join(cells)} |")


def _powers(most: int, base: int = 2) -> list[int]:
    """Return 1, base, base squared and so on below `most`, and `most`."""
    powers = [1]
    while powers[-1] * base < most:
        powers.append(powers[-1] * base)
    return [*powers, *([most] if most > 1 else [])]


def _run(files: Path, cache: str, cores: list[int], ranks: int) -> list[dict[str, Any]]:
    """Run the ranks together on these cores. Return the figures of each."""
    task = {"files": str(files), "cache": cache, "cores": cores, "ranks": ranks}
    command = [sys.executable, *as_child(MODULE, "rank")]
    running = [
        subprocess.Popen([*command, json.dumps({**task, "rank": rank})], stdin=-1, stdout=-1, text=True)
        for rank in range(ranks)
    ]
    for each in running:
        assert each.stdout is not None
        each.stdout.readline()
    for each in running:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [json.loads(each.communicate()[0]) for each in running]


def work(task: dict[str, Any]) -> None:
    """Read as one rank, once standard input has a line. Print the figures as JSON."""
    os.sched_setaffinity(0, task["cores"])
    from dataload import CacheConfig, World, make_loader

    ranks, rank = task["ranks"], task["rank"]
    world, cache = World(rank, ranks, rank, ranks), CacheConfig(task["cache"], "1TB")
    loader = make_loader(task["files"], BATCH_SIZE, world=world, cache=cache)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    lock, before, began = _Lock(), cpu_seconds(), time.perf_counter()
    rows = sum(len(next(iter(batch.values()))) for batch in loader)
    cold_seconds, cpu, cold_lock = time.perf_counter() - began, cpu_seconds() - before, lock.share()
    epochs, began = 0, time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        for _ in loader:
            pass
        epochs += 1
    warm = epochs * rows / (time.perf_counter() - began)
    figures = {"cold_seconds": cold_seconds, "cpu": cpu, "cold_lock": cold_lock, "warm": warm}
    sys.stdout.write(json.dumps({**figures, "warm_lock": lock.share()}))


class _Lock:
    """Measures how busy the interpreter lock is."""

    def __init__(self) -> None:
        self._knocker: Any = None
        with suppress(ImportError):  # of a free-threaded Python
            from gilknocker import KnockKnock

            self._knocker = KnockKnock(polling_interval_micros=1000)
            self._knocker.start()

    def share(self) -> float | None:
        """Return the share of the time since the last call; None without a lock to ask for."""
        if self._knocker is None:
            return None
        share = float(self._knocker.contention_metric)
        self._knocker.reset_contention_metric()
        return share


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        work(json.loads(sys.argv[2]))
    else:
        typer.run(main)

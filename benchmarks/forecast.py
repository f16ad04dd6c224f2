"""Forecasts of the busy share beside what is then measured: `python -m dataload.benchmarks.forecast`.

`dataload doctor --measure` measures this host once for each dataset, at one origin. `dataload plan` then forecasts jobs
at other origins, with other accelerators, epochs and caches, and each job runs. The origin shares the processors with
the job, so the processor time of its bytes is added to that of the host.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer

from dataload.benchmarks.cold.shapes import write
from dataload.benchmarks.origin import Behaviour, Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.runtime.child_process import as_child

MEASURED_AT = Behaviour(latency=0.03, bytes_per_second=90e6, host_bytes_per_second=1.25e9)
CLOSE = 0.1
BATCHES = 400  # an epoch, about


@dataclass(frozen=True)
class Setting:
    """A job to forecast and to run.

    Args:
        shape: Shape of the data; see `dataload.benchmarks.cold.shapes`.
        group: Megabytes of a row group.
        gbps: Gigabits a second from the origin.
        latency_ms: Milliseconds that a request waits.
        ranks: Ranks, each with an accelerator.
        load: Rows that the accelerators compute in a second, as a share of those that `gbps` brings.
        epochs: Epochs.
        cache: The cache, as a share of the data.
        window: Row groups that the loader shuffles together; None: its default.
    """

    shape: str
    group: int
    gbps: float
    latency_ms: float
    ranks: int
    load: float
    epochs: int
    cache: float = 2.0
    window: int | None = None


SETTINGS = [
    *(Setting("images", 10, gbps, 30, 1, 0.6, epochs) for gbps in (1, 4, 10) for epochs in (1, 3)),
    *(Setting("images", 50, gbps, latency, 1, 0.9, 2) for gbps in (2, 8) for latency in (5, 100)),
    *(Setting("tokens", 10, gbps, 30, ranks, 0.5, 2) for gbps in (1, 4) for ranks in (1, 2)),
    *(Setting("numbers", group, 2, 30, 1, load, 2) for group in (10, 100) for load in (0.3, 1.0)),
    *(Setting("images", 10, 4, 30, 1, 0.5, 3, cache, window=4) for cache in (0.4, 0.7)),
]


def main(
    megabytes: Annotated[int, typer.Option(help="Size of a dataset in MB.")] = 1000,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
    output: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Print a line of a Markdown table for each setting as soon as it has run, and how many forecasts were close.

    Raises:
        Exit: A forecast was off by more than a tenth of the measured share.
    """
    typer.echo("|  | row groups | Gbit/s | ms | ranks | load | epochs | cache | busy | forecast | off by |")
    typer.echo("| --- |" + " --: |" * 10)
    hosts, found = dict[tuple[str, int], dict[str, Any]](), list[dict[str, Any]]()
    for setting in SETTINGS:
        files = folder.absolute() / "data" / BUCKET / f"cold/{setting.shape}-{setting.group}-{megabytes}"
        write(setting.shape, setting.group * 10**6, megabytes * 10**6, files)
        key = setting.shape, setting.group
        hosts[key] = hosts.get(key) or _measured(files, folder.absolute())
        busy, forecast = _run(setting, files, folder.absolute(), hosts[key])
        found.append({**asdict(setting), "busy": busy, "forecast": forecast, "host": hosts[key]})
        cells = [setting.shape, f"{setting.group} MB", *map("{:g}".format, list(asdict(setting).values())[2:-1])]
        typer.echo(f"| {' | '.join(cells)} | {busy:.2f} | {forecast:.2f} | {forecast / busy - 1:+.0%} |")
        if output is not None:
            output.write_text(json.dumps(found))
    off = [abs(each["forecast"] / each["busy"] - 1) for each in found]
    close = sum(each <= CLOSE for each in off)
    typer.echo(f"\n{close} of {len(off)} within {CLOSE:.0%}; off by {median(off):.1%} (median), {max(off):.1%} at most")
    if close < len(off):
        raise typer.Exit(1)


def _measured(files: Path, folder: Path) -> dict[str, Any]:
    """Return the speed of this host, with the processor time of the origin for the same bytes."""
    with _served(files, MEASURED_AT) as origin, TemporaryDirectory(dir=folder) as cache:
        batch = max(1, json.loads(_dataload(origin, files, "plan", cache))["rows"] // BATCHES)
        server = psutil.Process(origin.pid)
        before = sum(server.cpu_times()[:2])
        measured = Path(cache, "measured.json")
        _dataload(origin, files, "doctor", cache, f"--measure={measured}", f"--batch-size={batch}")
        host: dict[str, Any] = json.loads(measured.read_text())
        seconds = sum(server.cpu_times()[:2]) - before
        served = origin.stats()["get_bytes"] / 1e9
    return {**host, "cpu_seconds_per_gb": host["cpu_seconds_per_gb"] + seconds / served}


def _run(setting: Setting, files: Path, folder: Path, host: dict[str, Any]) -> tuple[float, float]:
    """Return the busy share of a job, and the forecast."""
    rate = setting.gbps / 8 * 1e9
    behaviour = Behaviour(latency=setting.latency_ms / 1e3, bytes_per_second=90e6, host_bytes_per_second=rate)
    stored = sum(path.stat().st_size for path in files.glob("*.parquet"))
    limit = str(int(setting.cache * stored))
    with _served(files, behaviour) as origin, TemporaryDirectory(dir=folder) as cache:
        rows = json.loads(_dataload(origin, files, "plan", cache))["rows"]
        batch = max(1, rows // BATCHES // setting.ranks)
        step_ms = 1e3 * batch * setting.ranks * stored / rows / (setting.load * rate)
        measured = Path(cache, "measured.json")
        measured.write_text(json.dumps(host))
        options = {"accelerators": setting.ranks, "step-ms": step_ms, "batch-size": batch, "epochs": setting.epochs}
        options |= {"gbps": setting.gbps, "latency-ms": setting.latency_ms, "measured": measured, "cache-bytes": limit}
        options |= {} if setting.window is None else {"window": setting.window}
        words = [f"--{name}={value}" for name, value in options.items()]
        forecast = json.loads(_dataload(origin, files, "plan", str(Path(cache, "plan")), *words))["forecast"]
        job = {"url": _url(files), "batch_size": batch, "step": step_ms / 1e3, "epochs": setting.epochs}
        job |= {"options": {"cache_dir": str(Path(cache, "job")), "cache_bytes": limit}, "ranks": setting.ranks}
        job["options"] |= {"storage_options": origin.storage_options, "window": setting.window}
        seconds = _job_seconds(job)
    ideal = forecast["busy_share"] * forecast["seconds"]
    return ideal / seconds, forecast["busy_share"]


def _job_seconds(job: dict[str, Any]) -> float:
    """Run a job in a process for each rank. Return the seconds from the start of the processes to the last step."""
    command, started = [sys.executable, *as_child("dataload.benchmarks.forecast", "job")], time.time()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, **pipes) for _ in range(job["ranks"])]
    for rank, process in enumerate(ranks):
        assert process.stdin is not None
        process.stdin.write(json.dumps({**job, "rank": rank}))
        process.stdin.close()
        process.stdin = None
    return max(float(process.communicate()[0]) for process in ranks) - started


def work(job: dict[str, Any]) -> None:
    """Run one rank of a job. Print when its last step ends, in seconds of `time.time`."""
    from dataload import World, make_loader

    world = World(job["rank"], job["ranks"], job["rank"], job["ranks"])
    loader = make_loader(job["url"], job["batch_size"], world=world, **job["options"])
    free_at = 0.0
    for _ in range(job["epochs"]):
        for _ in loader:
            now = time.time()
            free_at = max(now, free_at) + job["step"]
            if (ahead := free_at - now - job["step"]) > 0:  # The next batch is ready while a step computes.
                time.sleep(ahead)
    sys.stdout.write(f"{max(time.time(), free_at)}\n")


def _served(files: Path, behaviour: Behaviour) -> Origin:
    return Origin(files.parents[2], behaviour=behaviour)


def _url(files: Path) -> str:
    return f"s3://{BUCKET}/{files.parent.name}/{files.name}"


def _dataload(origin: Origin, files: Path, command: str, cache: str, *words: str) -> str:
    options = ["--storage-options", json.dumps(origin.storage_options), "--cache-dir", cache, "--json"]
    program = [sys.executable, "-m", "dataload", command, _url(files), *words, *options]
    return subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    if sys.argv[1:] == ["job"]:
        work(json.load(sys.stdin))
    else:
        typer.run(main)

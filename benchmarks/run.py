"""The command: `dataload bench`, `make bench`, or `python benchmarks/run.py`."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dataload.benchmarks.systems.registry import ENTRIES, Entry
from dataload.errors import ConfigError, DataloadError

README = Path("README.md")
QUICK_WORKLOADS = "images,tokens"
QUICK_SECONDS = 160.0


def bench(
    quick: Annotated[bool, typer.Option(help="Run for less than three minutes: small data, one round.")] = False,
    size: Annotated[str, typer.Option(help='Size of the workloads: "tiny", "small" or "full".')] = "full",
    workloads: Annotated[str, typer.Option(help="Names of workloads, comma-separated; default: all.")] = "",
    systems: Annotated[str, typer.Option(help="Parts of systems' names, comma-separated; default: all.")] = "",
    workers: Annotated[str, typer.Option(help="Worker counts, comma-separated.")] = "0,2",
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the systems alternate in each.")] = 3,
    wire: Annotated[bool, typer.Option(help="Give the origin a network's latency and bandwidth.")] = False,
    step: Annotated[float, typer.Option(min=0, help="Milliseconds of an emulated accelerator step.")] = 0.0,
    folder: Annotated[Path, typer.Option(help="Folder of the data, which is kept for later runs.")] = Path(".bench"),
    peers_python: Annotated[Path, typer.Option(help="Python of the peers' environment.")] = Path(
        ".venv-peers/bin/python"
    ),
    results: Annotated[Path, typer.Option(help="Folder for JSON, table and plot.")] = Path("benchmarks/results"),
    readme: Annotated[bool, typer.Option(help="Publish the results as latest, and in README.md.")] = False,
    compare: Annotated[Path | None, typer.Option(help="Compare with the JSON of another run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure dataload beside other loaders.

    Floors show the limits of this machine.
    """
    try:
        from dataload.benchmarks import render
        from dataload.benchmarks.machine.circumstances import circumstances
        from dataload.benchmarks.machine.hot_memory import HotMemory
        from dataload.benchmarks.measure import Limits
        from dataload.benchmarks.suite import Suite
        from dataload.benchmarks.summary import summarise
    except ImportError as error:
        raise ConfigError(f"bench needs more packages ({error.name}): pip install 'dataload[bench]'") from error

    other = _read(compare) if compare else None  # before `latest` is overwritten
    peers = peers_python.absolute() if peers_python.exists() else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # also stops a running measurement
    hot = HotMemory(folder.absolute())
    suite = Suite(
        size="small" if quick else size,
        workloads=tuple(_parts(workloads or (QUICK_WORKLOADS if quick else ""))),
        entries=_entries(systems),
        workers=(0,) if quick else _counts(workers),
        rounds=1 if quick else rounds,
        limits=Limits(3, 0.5, 3) if quick else Limits(30, 1, 10),
        wire=wire,
        folder=folder.absolute(),
        peers_python=peers,
        step_seconds=step / 1e3,
        seconds=QUICK_SECONDS if quick else math.inf,
        memory=hot,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with hot:
        found = circumstances(peers) | suite.run(lambda line: typer.echo(line, err=True))
    found["summary"] = summarise(found)

    kept = results / _name(found, restricted=bool(workloads or systems) and not readme, quick=quick)
    _save(found, kept)
    if readme:
        render.into_readme(README, render.headline(found))
    typer.echo(json.dumps(found) if as_json else f"{render.headline(found)}\n\nMore in {kept}.md, .json and .png")
    if other:
        typer.echo("\n".join(_differences(found, other, compare)), err=True)
    if wrong := _wrong(found["summary"]):
        raise DataloadError(f"dataload did not deliver: {'; '.join(wrong)}")


def _save(found: dict[str, Any], path: Path) -> None:
    """Write the results as JSON, table and plot, each with its own suffix."""
    from dataload.benchmarks import render

    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(render.markdown(found))
    render.plot(found, path.with_suffix(".png"))


def _differences(found: dict[str, Any], other: Any, path: Path | None) -> list[str]:
    """Return the lines of a comparison with another run, whose results are at `path`."""
    from dataload.benchmarks.summary import compare

    both = compare(found, other)
    total = (
        f"the ranges of {len(both.apart)} of {both.shared} figures do not overlap those of {path}; "
        f"expected by chance: {both.by_chance:.0f}"
    )
    return [*both.one_sided, *both.apart, total]


def _name(found: dict[str, Any], *, restricted: bool, quick: bool) -> str:
    """Return the name of the result files. Only a full run may overwrite published results."""
    if quick:
        return "quick"
    whole = not restricted and found["size"] == "full" and not found["step_seconds"]
    return ("wire" if found["wire"] else "latest") if whole else "partial"


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _counts(workers: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in _parts(workers)):
        raise ConfigError(f"--workers={workers}: must be counts, such as 0,2")
    return tuple(int(count) for count in _parts(workers))


def _read(results: Path) -> Any:
    try:
        return json.loads(results.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare={results}: cannot be read as the JSON of a run: {error}") from error


def _entries(systems: str) -> tuple[Entry, ...]:
    """Return the systems whose names contain one of the parts; by default all except checks."""
    parts = [part.lower() for part in _parts(systems)]
    if not parts:
        return tuple(entry for entry in ENTRIES if entry.kind != "check")
    exact = {entry.name.lower() for entry in ENTRIES} & set(parts)
    chosen = tuple(
        entry
        for entry in ENTRIES
        if entry.name.lower() in exact or any(part in entry.name.lower() for part in parts if part not in exact)
    )
    if not chosen:
        raise ConfigError(f"no system is called {systems!r}; there are: {'; '.join(entry.name for entry in ENTRIES)}")
    return chosen


def _wrong(summary: list[dict[str, Any]]) -> list[str]:
    """Return the errors of dataload. The table has those of other systems."""
    return [
        f"{entry['workload']}, {entry['workers']} workers: {error}"
        for entry in summary
        if entry["system"] == "dataload"
        for error in [*entry["errors"], *entry["problems"]]
    ]


if __name__ == "__main__":
    typer.run(bench)

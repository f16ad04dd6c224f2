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
    quick: Annotated[bool, typer.Option(help="A look in under three minutes: little data, one round.")] = False,
    size: Annotated[str, typer.Option(help='"tiny", "small" or "full".')] = "full",
    workloads: Annotated[str, typer.Option(help="Names, comma-separated; default: all.")] = "",
    systems: Annotated[str, typer.Option(help="Parts of names, comma-separated; default: all.")] = "",
    workers: Annotated[str, typer.Option(help="Worker counts, comma-separated.")] = "0,2",
    rounds: Annotated[int, typer.Option(min=1, help="How often each system runs, in turns.")] = 3,
    wire: Annotated[bool, typer.Option(help="An origin with a network's latency and rates.")] = False,
    step: Annotated[float, typer.Option(min=0, help="Milliseconds of an emulated accelerator for each batch.")] = 0.0,
    folder: Annotated[Path, typer.Option(help="For the data: made once, kept for the next time.")] = Path(".bench"),
    peers_python: Annotated[Path, typer.Option(help="Of the peers' environment.")] = Path(".venv-peers/bin/python"),
    results: Annotated[Path, typer.Option(help="Folder for JSON, table and plot.")] = Path("benchmarks/results"),
    readme: Annotated[bool, typer.Option(help="Publish: as latest, the short table in README.md.")] = False,
    compare: Annotated[Path | None, typer.Option(help="JSON of another run: do the ranges overlap?")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure dataload beside other loaders.

    And beside what this machine can do at best.
    """
    try:
        from dataload.benchmarks import render
        from dataload.benchmarks.circumstances import circumstances
        from dataload.benchmarks.measure import Limits
        from dataload.benchmarks.suite import Suite
        from dataload.benchmarks.summary import compare as compared
        from dataload.benchmarks.summary import summarise
    except ImportError as error:
        raise ConfigError(f"bench needs more packages ({error.name}): pip install 'dataload[bench]'") from error

    other = _read(compare) if compare else None  # before `latest` is written anew
    peers = peers_python.absolute() if peers_python.exists() else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that a measurement under way is ended, too
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
    )
    found = circumstances(peers) | suite.run(lambda line: typer.echo(line, err=True))
    found["summary"] = summarise(found)

    kept = results / _name(found, restricted=bool(workloads or systems) and not readme, quick=quick)
    results.mkdir(parents=True, exist_ok=True)
    kept.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    kept.with_suffix(".md").write_text(render.markdown(found))
    render.plot(found, kept.with_suffix(".png"))
    if readme:
        render.into_readme(README, render.headline(found))
    typer.echo(json.dumps(found) if as_json else f"{render.headline(found)}\n\nMore in {kept}.md, .json and .png")
    if other:
        both = compared(found, other)
        total = (
            f"{len(both.apart)} of {both.shared} figures are apart from {compare}; by chance alone {both.by_chance:.0f}"
        )
        typer.echo("\n".join([*both.one_sided, *both.apart, total]), err=True)
    if wrong := _wrong(found["summary"]):
        raise DataloadError(f"dataload did not deliver: {'; '.join(wrong)}")


def _name(found: dict[str, Any], *, restricted: bool, quick: bool) -> str:
    """Of the files: what is published is only replaced by a whole run."""
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
    """The entries whose names contain one of the parts; without any, all but the checks of the instrument itself."""
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
    """What went wrong with our own; what goes wrong with others stands in the table."""
    return [
        f"{entry['workload']}, {entry['workers']} workers: {said}"
        for entry in summary
        if entry["system"] == "dataload"
        for said in [*entry["errors"], *entry["problems"]]
    ]


if __name__ == "__main__":
    typer.run(bench)

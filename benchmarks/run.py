"""The command: `dataload bench`, `make bench`, or `python benchmarks/run.py`."""

from __future__ import annotations

import json
import math
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataload.benchmarks.systems.registry import ENTRIES, Entry
from dataload.errors import ConfigError, DataloadError
from dataload.extras import check_extra

if TYPE_CHECKING:
    from dataload.benchmarks.suite.datasets import Place

PAGE, PROGRAM = Path("docs/comparison.md"), Path("benchmarks/run.py")  # of a clone
USUAL = {"size": "full", "workloads": "images,tokens,text,table,photos", "ranks": "1,4", "groups": "10,128"}
QUICK = {"size": "small", "workloads": "images,tokens", "ranks": "1", "groups": "10"}
PUBLISHED_ROUNDS = 3
PARTS = ("conditions", "datasets", "runs", "speed")  # of the results of a run

Result = dict[str, Any]


def bench(
    quick: Annotated[bool, typer.Option(help="Run for a few minutes: small data, one rank.")] = False,
    size: Annotated[
        str | None, typer.Option(help='Size of a dataset: "tiny", "small", "middle" (200 MB), "full" (2.5 to 4 GB).')
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(help=f"Names of workloads, comma-separated; default: {USUAL['workloads']}.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help=f"Megabytes of row groups, comma-separated; default: {USUAL['groups']}.")
    ] = None,
    systems: Annotated[str, typer.Option(help="Parts of systems' names, comma-separated; default: all.")] = "",
    ranks: Annotated[
        str | None, typer.Option(help=f"Numbers of ranks, comma-separated; default: {USUAL['ranks']}.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of rounds, in which the systems take turns; default: 1, or 3 to publish."),
    ] = None,
    goes_on: Annotated[
        bool,
        typer.Option(
            "--continue", help="Measure what the results lack. They must be of this commit, host, size and versions."
        ),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the data, kept for later runs; default: .bench in a clone, else none is kept."),
    ] = None,
    peers_python: Annotated[Path, typer.Option(help="Python of the peers' environment.")] = Path(
        ".venv-peers/bin/python"
    ),
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder for JSON, tables and picture; default: benchmarks/results in a clone, else none is written."
        ),
    ] = None,
    publish: Annotated[bool, typer.Option(help="Publish the results as latest, in docs/comparison.md.")] = False,
    render: Annotated[
        Path | None, typer.Option(help="Render the JSON of a run again, also of one that ended early.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure how busy dataload and other loaders keep accelerators.

    All takes hours and 100 GB of disk. Each measurement is kept at once: interrupt it, and go on by --continue, with
    other workloads, systems or ranks if you like. Outside a clone, the data and the results are kept only in a --folder
    and --results that you name.
    """
    check_extra("bench", "bench")
    from dataload.benchmarks.suite import report
    from dataload.benchmarks.suite.datasets import Place

    name, in_clone = "latest" if publish else "quick" if quick else "partial", PROGRAM.exists()
    if publish and not in_clone:
        raise ConfigError("--publish changes docs/comparison.md of a clone: run it there")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # also stops a running measurement
    with ExitStack() as stack:
        base = Path() if in_clone else Path(stack.enter_context(TemporaryDirectory(prefix="dataload-bench-")))
        path = (results or base / "benchmarks/results") / name
        if render is not None:
            found = _read("--render", render)
        else:
            chosen = {"size": size, "workloads": workloads, "ranks": ranks, "groups": groups}
            asked = (QUICK if quick else USUAL) | {name: value for name, value in chosen.items() if value is not None}
            python = peers_python.absolute() if peers_python.exists() else None
            place = Place(asked["size"], (folder or base / ".bench").absolute(), python)
            given = {
                "workloads": _named_workloads(asked["workloads"], asked["size"]),
                "groups": _numbers("groups", asked["groups"], float),
                "entries": _entries(systems),
                "ranks": _numbers("ranks", asked["ranks"], int),
                "rounds": rounds or (PUBLISHED_ROUNDS if publish else 1),
            }
            found = _measured(place, given, path, goes_on)
        more = "--results FOLDER keeps all tables, a picture and JSON"
        if results or in_clone:
            more = f"More in {path}.md, .json and .png"
            _publish(found, path)
        if publish:
            report.put_between_marks(PAGE, report.headline(found))
    typer.echo(json.dumps(found) if as_json else f"{report.headline(found)}\n\n{more}")
    if render is None and (wrong := _wrong(found)):
        raise DataloadError(f"dataload did not deliver: {'; '.join(wrong)}")


def _measured(place: Place, given: dict[str, Any], path: Path, goes_on: bool) -> Result:
    """Run a suite. The JSON file at `path` has the results so far."""
    from dataload.benchmarks.machine.circumstances import conditions
    from dataload.benchmarks.machine.hot_memory import HotMemory
    from dataload.benchmarks.origin.behaviour import S3
    from dataload.benchmarks.suite.suite import Suite

    fixed = {"size": place.size, "origin": asdict(S3)} | conditions(place.peers_python)
    found: Result = {"datasets": {}, "runs": [], "speed": []}
    if goes_on:
        found = _read("--continue", path.with_suffix(".json"))
        _check_same(found["conditions"], fixed, path)
        fixed["versions"] = found["conditions"]["versions"] | fixed["versions"]
    found |= {"date": datetime.now(UTC).date().isoformat(), "conditions": fixed}
    if missing := [entry.name for entry in given["entries"] if not place.python(entry)]:
        typer.echo(f"not measured: {', '.join(missing)}: their environment is made by `make peers`", err=True)
    given = {**given, "entries": tuple(entry for entry in given["entries"] if place.python(entry))}
    for folder in (place.folder, path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with HotMemory(place.folder) as memory:
        Suite(place, **given).run(
            found, memory, lambda line: typer.echo(line, err=True), lambda partial: _save(partial, path)
        )
    return found


def _check_same(earlier: Result, now: Result, path: Path) -> None:
    """Raise ConfigError if the results are of other conditions. The peers' environment may have come since."""
    pairs = [(name, earlier[name], now[name]) for name in now if name != "versions"]
    before = earlier["versions"]
    pairs += [(f"version of {name}", before[name], found) for name, found in now["versions"].items() if name in before]
    for name, old, new in pairs:
        if old != new:
            raise ConfigError(
                f"--continue: the {name} of {path}.json is {old}, and now {new}: measure again without --continue"
            )


def _publish(found: Result, path: Path) -> None:
    """Write the results as JSON, tables and picture, each with its own suffix."""
    from dataload.benchmarks.suite import picture, report

    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(report.markdown(found))
    picture.draw(found, path.with_suffix(".png"))
    _save(found, path)


def _save(found: Result, path: Path) -> None:
    """Write the results so far as JSON. An interrupted write leaves the earlier ones."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found, indent=1) + "\n")
    unfinished.rename(path.with_suffix(".json"))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        numbers = tuple(kind(part) for part in _parts(text))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"--{option}={text}: must be numbers above 0, such as 1,4")
    return numbers


def _named_workloads(text: str, size: str) -> tuple[str, ...]:
    from dataload.benchmarks.workloads import check_names

    names = tuple(_parts(text))
    check_names(names, size)
    return names


def _read(option: str, path: Path) -> Any:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {path} cannot be read as the JSON of a run: {error}") from error
    if missing := [name for name in PARTS if name not in found]:
        raise ConfigError(f"{option}: {path} has no {missing[0]!r}, so it is not of this version: measure again")
    return found


def _entries(systems: str) -> tuple[Entry, ...]:
    """Return the systems whose names contain one of the parts; by default all."""
    parts = [part.lower() for part in _parts(systems)]
    if not parts:
        return ENTRIES
    exact = {entry.name.lower() for entry in ENTRIES} & set(parts)
    chosen = tuple(
        entry
        for entry in ENTRIES
        if entry.name.lower() in exact or any(part in entry.name.lower() for part in parts if part not in exact)
    )
    if not chosen:
        raise ConfigError(f"no system is called {systems!r}; there are: {'; '.join(entry.name for entry in ENTRIES)}")
    return chosen


def _wrong(found: Result) -> list[str]:
    """Return the errors of dataload. The tables have those of other systems."""
    return [
        f"{run['dataset']}, ranks {run['ranks']}: {error}"
        for run in found["runs"]
        if run["system"] == "dataload"
        for error in [run["error"], *run["problems"][:1]]
        if error
    ]


if __name__ == "__main__":
    typer.run(bench)

"""The command: `dataload bench`, `make bench`, or `python benchmarks/run.py`."""

from __future__ import annotations

import json
import math
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataload.benchmarks.systems.registry import ENTRIES, Entry
from dataload.errors import ConfigError, DataloadError
from dataload.extras import check_extra

if TYPE_CHECKING:
    from dataload.benchmarks.suite.datasets import Place

COMPARISON, PROGRAM = Path("docs/comparison.md"), Path("benchmarks/run.py")  # of a clone
USUAL = {"size": "middle", "workloads": "images,tokens,table,text", "ranks": "1,4,2", "minutes": math.inf, "limit": 6.0}
QUICK = {"size": "small", "workloads": "images,tokens", "ranks": "1", "minutes": 3.0, "limit": 2.0}

PARTS = ("datasets", "runs", "feeds")  # of the results of a run


def bench(
    quick: Annotated[bool, typer.Option(help="Run for about three minutes: small data, one rank.")] = False,
    size: Annotated[
        str | None,
        typer.Option(help='Size of a dataset: "tiny", "small", "middle" (200 MB, the default), "full" (2.5 GB).'),
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(help=f"Names of workloads, comma-separated; default: {USUAL['workloads']}.")
    ] = None,
    groups: Annotated[str, typer.Option(help="Megabytes of row groups, comma-separated.")] = "10",
    systems: Annotated[str, typer.Option(help="Parts of systems' names, comma-separated; default: all.")] = "",
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, comma-separated, in the order of stages; default: 1,4,2.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the systems take turns in each.")] = 1,
    origin: Annotated[
        str, typer.Option(help='"s3": latency and bandwidth of S3; "unlimited": the cost of CPU.')
    ] = "s3",
    limit: Annotated[
        float | None, typer.Option(help="Seconds of epochs after which later ones are extrapolated; default: 6.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Limit of the whole run; the rest is reported as not run.")
    ] = None,
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
    publish: Annotated[bool, typer.Option(help="Publish the results as latest, and in docs/comparison.md.")] = False,
    render: Annotated[
        Path | None, typer.Option(help="Render the JSON of a run again, also of one that ended early.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure dataload beside other loaders.

    Outside a clone, the data and the results are kept only in a --folder and --results that you name.
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
            found = _read(render)
        else:
            chosen = {"size": size, "workloads": workloads, "ranks": ranks, "minutes": minutes, "limit": limit}
            asked: dict[str, Any] = (QUICK if quick else USUAL) | {
                option: value for option, value in chosen.items() if value is not None
            }
            given: dict[str, Any] = {
                "workloads": _named_workloads(asked["workloads"], asked["size"]),
                "groups": _numbers("groups", groups, float),
                "entries": _entries(systems),
                "ranks": _numbers("ranks", asked["ranks"], int),
                "rounds": rounds,
                "origin": _origin(origin),
                "epoch_seconds": asked["limit"],
            }
            data = (folder or base / ".bench").absolute()
            python = peers_python.absolute() if peers_python.exists() else None
            found = _measured(Place(asked["size"], data, python, 60 * asked["minutes"], publish), given, path)
        headline, more = report.headline(found), "--results FOLDER keeps all tables, a picture and JSON"
        if results or in_clone:
            more = f"More in {path}.md, .json and .png"
            _publish(found, path)
        if publish:
            report.put_between_marks(COMPARISON, headline)
    typer.echo(json.dumps(found) if as_json else f"{headline}\n\n{more}")
    if render is None and (wrong := _wrong(found)):
        raise DataloadError(f"dataload did not deliver: {'; '.join(wrong)}")


def _measured(place: Place, given: dict[str, Any], path: Path) -> dict[str, Any]:
    """Run a suite. The JSON file at `path` has the results so far."""
    from dataload.benchmarks.machine.circumstances import circumstances
    from dataload.benchmarks.machine.hot_memory import HotMemory
    from dataload.benchmarks.suite.suite import Suite

    for folder in (place.folder, path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    found = circumstances(place.peers_python)
    with HotMemory(place.folder) as memory:
        suite = Suite(place, **given, memory=memory)
        suite.run(found, lambda line: typer.echo(line, err=True), lambda partial: _save(partial, path))
    return found


def _publish(found: dict[str, Any], path: Path) -> None:
    """Write the results as JSON, tables and picture, each with its own suffix."""
    from dataload.benchmarks.suite import picture, report

    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(report.markdown(found))
    picture.draw(found, path.with_suffix(".png"))
    _save(found, path)


def _save(found: dict[str, Any], path: Path) -> None:
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


def _origin(name: str) -> str:
    from dataload.benchmarks.origin.behaviour import ORIGINS

    if name not in ORIGINS:
        raise ConfigError(f"--origin={name}: must be one of {', '.join(ORIGINS)}")
    return name


def _read(results: Path) -> Any:
    try:
        found = json.loads(results.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--render={results}: cannot be read as the JSON of a run: {error}") from error
    if missing := [name for name in PARTS if name not in found]:
        raise ConfigError(f"--render={results}: has no {missing[0]!r}, so it is not of this version: measure again")
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


def _wrong(found: dict[str, Any]) -> list[str]:
    """Return the errors of dataload. The tables have those of other systems."""
    return [
        f"{run['dataset']}, ranks {run.get('ranks', 1)}: {error}"
        for run in [*found["runs"], *found["feeds"]]
        if run["system"] == "dataload"
        for error in [run["error"], *run.get("problems", ())[:1]]
        if error and not error.startswith("not run")
    ]


if __name__ == "__main__":
    typer.run(bench)

"""Summaries of runs: medians with ranges, and ratios to the best peer and to the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import comb
from statistics import median
from typing import Any

from dataload.benchmarks.systems.registry import named
from dataload.errors import ConfigError

FIRST, GETS, DECODE, GATHER = "floor: first GET", "floor: ranged GETs", "floor: decode", "floor: gather"
# Two runs are comparable if these are equal.
CIRCUMSTANCES = ("size", "wire", "step_seconds", "limits", "machine", "versions")

Result = dict[str, Any]
Key = tuple[str, int, str]  # workload, workers, system
Values = dict[int, float]  # by round


def ranged(numbers: list[float], shape: str) -> str:
    """Return the median and the range of some numbers."""
    least, middle, most = (shape.format(number) for number in (min(numbers), median(numbers), max(numbers)))
    return f"{middle} ({least}–{most})"


@dataclass(frozen=True)
class Figure:
    """A figure of the summary.

    Args:
        name: Name in JSON.
        title: Title in tables.
        unit: Its unit.
        more_is_better: Whether a greater value is better.
        phase: "cold" or "warm"; "" for the whole run.
        of: Computes the value from the phase and the truth of the workload; None if the phase does not determine it.
        floor: Computes the floor from the floors' values by system and the truth; None without a floor.
    """

    name: str
    title: str
    unit: str
    more_is_better: bool
    phase: str
    of: Callable[[Result, Result], float | None]
    floor: Callable[[dict[str, float], Result], float | None]


@dataclass(frozen=True)
class Spread:
    """Median and range over the rounds."""

    median: float
    low: float
    high: float


def _rate(phase: Result, _: Result) -> float:
    return float(phase["rows"] / phase["seconds"])


def _epoch_bytes(phase: Result, _: Result) -> float | None:
    return None if phase["cut"] else float(phase["origin_bytes"] / phase["epochs"])


def _cpu(phase: Result, truth: Result) -> float | None:
    return (
        None
        if phase["cut"]
        else float(phase["cpu_seconds"] / (phase["rows"] / truth["rows"] * truth["decoded_bytes"] / 1e9))
    )


def _busy(phase: Result, _: Result) -> float | None:
    """Return the accelerator utilization in percent, as DLIO and MLPerf Storage define it."""
    return 100 * phase["step_seconds"] / phase["seconds"] if phase.get("step_seconds") else None


def _least(*names: str) -> Callable[[dict[str, float], Result], float | None]:
    return lambda floors, _: min((floors[name] for name in names if name in floors), default=None)


def _sum(*names: str) -> Callable[[dict[str, float], Result], float | None]:
    return lambda floors, _: sum(floors[name] for name in names) if floors.keys() >= set(names) else None


def _dataset(_: dict[str, float], truth: Result) -> float:
    return float(truth["parquet_bytes"])


FIGURES = (
    Figure(
        "first_batch",
        "first batch, cold",
        "s",
        False,
        "cold",
        lambda cold, _: cold["first_batch_seconds"],
        _least(FIRST),
    ),
    Figure("cold_rate", "cold epoch", "rows/s", True, "cold", _rate, _least(GETS, DECODE)),
    Figure("warm_rate", "warm epochs", "rows/s", True, "warm", _rate, _least(GATHER)),
    Figure("cold_busy", "accelerator busy, cold epoch", "%", True, "cold", _busy, _least()),
    Figure("warm_busy", "accelerator busy, warm epochs", "%", True, "warm", _busy, _least()),
    Figure("cold_bytes", "from S3, cold epoch", "B", False, "cold", _epoch_bytes, _dataset),
    Figure("warm_bytes", "from S3, warm epoch", "B", False, "warm", _epoch_bytes, _dataset),
    Figure("peak_memory", "peak memory", "B", False, "", lambda run, _: run["peak_memory_bytes"], _least()),
    Figure("cold_cpu", "CPU, cold epoch", "s/GB", False, "cold", _cpu, _sum(GETS, DECODE)),
    Figure("warm_cpu", "CPU, warm epochs", "s/GB", False, "warm", _cpu, _least(GATHER)),
)


def summarise(results: Result) -> list[Result]:
    """Return an entry with figures or errors for each workload, worker count and system, in the order of the runs.

    A figure is a Spread with `to_peer` and `to_floor`, which are Spreads of the ratios within each round, or None. A
    slow minute of the machine affects all systems of a round alike. The best peer of a round has the same worker count
    and delivered the dataset's rows. The floors have no workers.
    """
    truths, runs = results["workloads"], _by_key(results["runs"])
    values = {key: _values(rounds, truths[key[0]]) for key, rounds in runs.items()}
    valid = {key for key, rounds in runs.items() if not any(run.get("problems") for run in rounds)}
    summary = []
    for key, rounds in runs.items():
        workload, workers, system = key
        same = {other: found for other, found in values.items() if other[0] == workload and other in valid}
        floors = {name: found for (_, _, name), found in same.items() if named(name).kind == "floor"}
        peers = [found for (_, n, name), found in same.items() if n == workers and named(name).kind == "peer"]
        entry: Result = {"workload": workload, "workers": workers, "system": system}
        entry["errors"] = sorted({run["error"] for run in rounds if "error" in run})
        entry["problems"] = sorted({problem for run in rounds for problem in run.get("problems", ())})
        entry["cut"] = sorted({name for run in rounds for name, phase in run.get("phases", {}).items() if phase["cut"]})
        entry["figures"] = {
            figure.name: _spread(mine.values())
            | {
                "to_peer": _ratios(mine, _best(figure, peers)),
                "to_floor": _ratios(mine, _floor(figure, floors, truths[workload], mine)),
            }
            for figure in FIGURES
            if (mine := values[key].get(figure.name))
        }
        summary.append(entry)
    return summary


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    Args:
        shared: Number of figures in both runs.
        apart: Descriptions of the figures whose ranges do not overlap.
        by_chance: Expected number of such figures if nothing differs.
        one_sided: Descriptions of the entries that only one run has.
    """

    shared: int
    apart: list[str]
    by_chance: float
    one_sided: list[str]


def compare(one: Result, other: Result) -> Comparison:
    """Compare two runs by their ratios to the floor or to the best peer, or by their values without either.

    The ranges of m and n values from one distribution do not overlap with probability 2 / C(m + n, m).

    Raises:
        ConfigError: The runs have different settings.
    """
    if different := [name for name in CIRCUMSTANCES if one.get(name, 0.0) != other.get(name, 0.0)]:
        raise ConfigError(f"the two runs differ in {', '.join(different)}: they cannot be compared")
    ours, theirs = ({_key(entry): entry["figures"] for entry in summarise(run)} for run in (one, other))
    apart, shared = [], 0
    for key in ours.keys() & theirs.keys():
        for name in ours[key].keys() & theirs[key].keys():
            mine, its = ours[key][name], theirs[key][name]
            kind = next((kind for kind in ("to_floor", "to_peer") if mine[kind] and its[kind]), None)
            if kind:
                mine, its = mine[kind], its[kind]
            shared += 1
            if mine["low"] > its["high"] or its["low"] > mine["high"]:
                between = " against ".join(f"{spread['low']:.4g}–{spread['high']:.4g}" for spread in (mine, its))
                apart.append(f"{', '.join(map(str, key))}: {name} {kind or ''} {between}")
    rounds = one["rounds"], other["rounds"]
    probability = 2 / comb(sum(rounds), rounds[0])
    one_sided = sorted(f"{', '.join(map(str, key))}: only in one of the runs" for key in ours.keys() ^ theirs.keys())
    return Comparison(shared, sorted(apart), probability * shared, one_sided)


def _spread(values: Iterable[float]) -> Result:
    found = list(values)
    return asdict(Spread(median(found), min(found), max(found)))


def _ratios(mine: Values, theirs: Values) -> Result | None:
    ratios = [mine[number] / theirs[number] for number in mine if theirs.get(number)]
    return _spread(ratios) if ratios else None


def _best(figure: Figure, systems: list[dict[str, Values]]) -> Values:
    """Return the best value of each round."""
    best = max if figure.more_is_better else min
    found: dict[int, list[float]] = {}
    for system in systems:
        for number, value in system.get(figure.name, {}).items():
            found.setdefault(number, []).append(value)
    return {number: best(values) for number, values in found.items()}


def _floor(figure: Figure, floors: dict[str, dict[str, Values]], truth: Result, rounds: Iterable[int]) -> Values:
    found = {}
    for number in rounds:
        by_system = {
            name: values[figure.name][number]
            for name, values in floors.items()
            if number in values.get(figure.name, ())
        }
        if floor := figure.floor(by_system, truth):
            found[number] = floor
    return found


def _values(runs: list[Result], truth: Result) -> dict[str, Values]:
    """Return the value of each figure in every round."""
    found: dict[str, Values] = {}
    for figure in FIGURES:
        for run in runs:
            part = run.get("phases", {}).get(figure.phase) if figure.phase else run
            if part and part.get("rows", 1) and (value := _of(figure, part, truth)) is not None:
                found.setdefault(figure.name, {})[run["round"]] = value
    return found


def _of(figure: Figure, part: Result, truth: Result) -> float | None:
    return figure.of(part, truth) if figure.phase or "peak_memory_bytes" in part else None


def _by_key(runs: list[Result]) -> dict[Key, list[Result]]:
    grouped: dict[Key, list[Result]] = {}
    for run in runs:
        grouped.setdefault(_key(run), []).append(run)
    return grouped


def _key(entry: Result) -> Key:
    return entry["workload"], entry["workers"], entry["system"]

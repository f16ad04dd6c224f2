"""From single runs to figures: medians with their range, and their ratios to the best peer and to the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dataload.benchmarks.systems.registry import named

GETS, DECODE, GATHER = "floor: ranged GETs", "floor: decode", "floor: gather"

Result = dict[str, Any]
Place = tuple[str, int, str]  # workload, workers, system


@dataclass(frozen=True)
class Figure:
    """What is measured. phase: which one it is of, "" for the whole run.

    of: from that phase and the truth of the workload. floor: from the medians of the floors' same figure, by system,
    and the truth; None where there is none.
    """

    name: str
    title: str
    unit: str
    more_is_better: bool
    phase: str
    of: Callable[[Result, Result], float]
    floor: Callable[[dict[str, float], Result], float | None]


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds. to_peer, to_floor: the median over the best peer's and over the floor's."""

    median: float
    low: float
    high: float
    to_peer: float | None
    to_floor: float | None


def _rate(phase: Result, _: Result) -> float:
    return float(phase["rows"] / phase["seconds"])


def _epoch_bytes(phase: Result, truth: Result) -> float:
    return float(phase["origin_bytes"] / phase["rows"] * truth["rows"])


def _cpu(phase: Result, truth: Result) -> float:
    return float(phase["cpu_seconds"] / (phase["rows"] / truth["rows"] * truth["decoded_bytes"] / 1e9))


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
        _least(GETS),
    ),
    Figure("cold_rate", "cold epoch", "rows/s", True, "cold", _rate, _least(GETS, DECODE)),
    Figure("warm_rate", "warm epochs", "rows/s", True, "warm", _rate, _least(GATHER)),
    Figure("cold_bytes", "from S3, cold epoch", "B", False, "cold", _epoch_bytes, _dataset),
    Figure("warm_bytes", "from S3, warm epoch", "B", False, "warm", _epoch_bytes, _dataset),
    Figure("peak_memory", "peak memory", "B", False, "", lambda run, _: run["peak_memory_bytes"], _least()),
    Figure("cold_cpu", "CPU, cold epoch", "s/GB", False, "cold", _cpu, _sum(GETS, DECODE)),
    Figure("warm_cpu", "CPU, warm epochs", "s/GB", False, "warm", _cpu, _least(GATHER)),
)


def summarise(results: Result) -> list[Result]:
    """One entry for each workload, worker count and system, in the order of the runs: its figures, or why it has none.

    The best peer is the best at the same worker count that delivered the dataset's rows; the floors have no workers.
    """
    truths, runs = results["workloads"], _by_place(results["runs"])
    medians = {
        place: {figure.name: median(values) for figure, values in _figures(of, truths[place[0]])}
        for place, of in runs.items()
    }
    sound = {place for place, of in runs.items() if not any(run.get("problems") for run in of)}
    summary = []
    for place, of in runs.items():
        workload, workers, system = place
        kin = {other: found for other, found in medians.items() if other[0] == workload and other in sound}
        floors = {name: found for (_, _, name), found in kin.items() if named(name).kind == "floor"}
        peers = [found for (_, n, name), found in kin.items() if n == workers and named(name).kind == "peer"]
        entry: Result = {"workload": workload, "workers": workers, "system": system}
        entry["errors"] = sorted({run["error"] for run in of if "error" in run})
        entry["problems"] = sorted({problem for run in of for problem in run.get("problems", ())})
        entry["cut"] = any(phase["cut"] for run in of for phase in run.get("phases", {}).values())
        entry["figures"] = {
            figure.name: asdict(_spread(figure, values, peers, floors, truths[workload]))
            for figure, values in _figures(of, truths[workload])
        }
        summary.append(entry)
    return summary


def disagreements(one: list[Result], other: list[Result]) -> tuple[int, list[str]]:
    """How many figures two summaries share, and those whose ranges do not overlap, in words."""
    shared, apart = 0, []
    others = {_place(entry): entry["figures"] for entry in other}
    for entry in one:
        for name, mine in entry["figures"].items():
            theirs = others.get(_place(entry), {}).get(name)
            if theirs is None:
                continue
            shared += 1
            if mine["low"] > theirs["high"] or theirs["low"] > mine["high"]:
                between = [f"{spread['low']:.4g}–{spread['high']:.4g}" for spread in (mine, theirs)]
                apart.append(f"{', '.join(map(str, _place(entry)))}: {name} {between[0]} against {between[1]}")
    return shared, apart


def _spread(
    figure: Figure,
    values: list[float],
    peers: list[dict[str, float]],
    floors: dict[str, dict[str, float]],
    truth: Result,
) -> Spread:
    middle = median(values)
    rivals = [peer[figure.name] for peer in peers if figure.name in peer]
    best = (max if figure.more_is_better else min)(rivals, default=None)
    floor = figure.floor({name: found[figure.name] for name, found in floors.items() if figure.name in found}, truth)
    return Spread(middle, min(values), max(values), middle / best if best else None, middle / floor if floor else None)


def _figures(runs: list[Result], truth: Result) -> Iterator[tuple[Figure, list[float]]]:
    """The figures that the runs have, each with its value in every run."""
    for figure in FIGURES:
        parts = [run["phases"].get(figure.phase) if figure.phase else run for run in runs if "phases" in run]
        if values := [figure.of(part, truth) for part in parts if part and part.get("rows", 1)]:
            yield figure, values


def _by_place(runs: list[Result]) -> dict[Place, list[Result]]:
    places: dict[Place, list[Result]] = {}
    for run in runs:
        places.setdefault(_place(run), []).append(run)
    return places


def _place(entry: Result) -> Place:
    return entry["workload"], entry["workers"], entry["system"]

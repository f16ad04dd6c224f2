"""Figures of the results: accelerators kept busy, and the cost of epochs. The input is the JSON of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from dataload.benchmarks.accelerators import LEAST_UTILIZATION, Fed
from dataload.benchmarks.suite.host import NO_ANSWER
from dataload.benchmarks.systems.registry import Entry, named

STOPPED = "stopped"  # after an epoch or more

Result = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Median and range over the rounds.

    Args:
        measured: Epochs that were measured, where the others follow from the median of the warm ones; None: all.
        bound: "<" if the figure is known to be less than the median, "≥" if it may be more; else empty.
    """

    median: float
    low: float
    high: float
    measured: int | None = None
    bound: str = ""

    @property
    def possible(self) -> tuple[float, float]:
        """The least and the largest value that the median may have; what "≥" leaves open does not count."""
        return (0, self.median - 1) if self.bound == "<" else (self.median, self.median)

    def shown(self, shape: Callable[[float], str]) -> str:
        """Return the median in words."""
        return f"{self.bound} {shape(self.median)}".strip()


@dataclass(frozen=True)
class Cost:
    """The cost of the first epochs of a run, in seconds and bytes from the origin.

    `measured` is the number of measured epochs if the rest is extrapolated, else None.
    """

    seconds: float
    origin_bytes: float
    measured: int | None


def cost(run: Result, epochs: int) -> Cost | None:
    """Return the cost of the first `epochs` epochs with start-up; None if too few were measured.

    Epochs that were not measured cost the median of the measured warm ones.
    """
    seconds = [epoch["seconds"] for epoch in run["epochs"]]
    sent = [now - before for before, now in zip([0, *run["origin_bytes"]], run["origin_bytes"], strict=False)]
    missing = epochs - len(seconds)
    if not seconds or (missing > 0 and len(seconds) < 2):
        return None
    total, num_bytes = sum(seconds[:epochs]), float(sum(sent[:epochs]))
    if missing <= 0:
        return Cost(total, num_bytes, None)
    return Cost(total + missing * median(seconds[1:]), num_bytes + missing * median(sent[1:]), len(seconds))


def fed(feed: Result) -> Spread | None:
    """Return the largest number of accelerators with AU >= 90 %; None without a measurement."""
    tries = [Fed(**each) for each in feed["tries"]]
    if not tries:
        return None
    least, most = min(each.accelerators for each in tries), max(each.accelerators for each in tries)
    busy = max((each.accelerators for each in tries if each.is_busy), default=0)
    if not busy and least > 1:
        return Spread(least, least, least, bound="<")
    return Spread(busy, busy, busy, bound="≥" if busy == most else "")


class Figures:
    """The figures of a run.

    Args:
        results: The JSON of the run.
    """

    def __init__(self, results: Result) -> None:
        self._results = results
        self.datasets: dict[str, Result] = results["datasets"]
        names = dict.fromkeys(run["system"] for run in results.get("runs", ()))
        order = {"ours": 0, "peer": 1, "reference": 2, "floor": 3}
        self.entries: list[Entry] = sorted(map(named, names), key=lambda entry: order[entry.kind])
        self.systems = [entry for entry in self.entries if entry.kind != "floor"]

    def fed(self, dataset: str, system: str, phase: str) -> Spread | None:
        """Return the accelerators that a system keeps busy in a phase, "cold" or "warm"."""
        return _over_rounds(fed(feed) for feed in self._feeds(dataset, system, phase))

    def wire(self, dataset: str, bytes_per_second: float) -> float:
        """Return the accelerators that a bandwidth feeds with AU of 90 %."""
        described = self.datasets[dataset]
        rows_per_second: float = bytes_per_second * described["rows"] / described["parquet_bytes"]
        unit: float = described["accelerator"]["rows_per_second"]
        return rows_per_second / unit / LEAST_UTILIZATION

    def conversion_seconds(self, dataset: str, system: str) -> float:
        seconds: float = self.datasets[dataset]["conversions"].get(system, {}).get("seconds", 0.0)
        return seconds

    def cost(self, dataset: str, system: str, ranks: int, epochs: int, part: str) -> Spread | None:
        """Return the seconds or the origin bytes of the first epochs. Bytes are in multiples of the dataset's."""
        unit = self.datasets[dataset]["parquet_bytes"] if part == "origin_bytes" else 1
        costs = [cost(run, epochs) for run in self._answered(dataset, system, ranks)]
        return _over_rounds(
            Spread(value, value, value, each.measured)
            for each in costs
            if each is not None
            for value in [getattr(each, part) / unit]
        )

    def memory(self, dataset: str, system: str, ranks: int) -> Spread | None:
        runs = [run for run in self._answered(dataset, system, ranks) if run["epochs"]]
        return _over_rounds(Spread(*[run["peak_bytes"]] * 3) for run in runs)

    def first_batch(self, dataset: str, system: str) -> Spread | None:
        runs = [run for run in self.runs(dataset, system, 1) if run["epochs"]]
        return _over_rounds(Spread(*[run["epochs"][0]["first_batch_seconds"]] * 3) for run in runs)

    def rate(self, dataset: str, system: str, phase: str) -> Spread | None:
        """Return the rows per second of the first epoch with start-up, or of the later ones."""

        def of(epochs: list[Result]) -> float | None:
            part = epochs[:1] if phase == "cold" else epochs[1:]
            return sum(epoch["rows"] for epoch in part) / sum(epoch["seconds"] for epoch in part) if part else None

        return self._each(dataset, system, of)

    def cpu(self, dataset: str, system: str, phase: str) -> Spread | None:
        """Return the processor seconds per decoded GB of the first epoch, or of the later ones."""
        gigabytes = self.datasets[dataset]["decoded_bytes"] / 1e9

        def of(epochs: list[Result]) -> float | None:
            used = [epoch["cpu_seconds"] for epoch in epochs]
            if phase == "cold":
                return used[0] / gigabytes if used else None
            return (used[-1] - used[0]) / (gigabytes * (len(used) - 1)) if len(used) > 1 else None

        return self._each(dataset, system, of)

    def _each(self, dataset: str, system: str, of: Callable[[list[Result]], float | None]) -> Spread | None:
        values = [of(run["epochs"]) for run in self.runs(dataset, system, 1)]
        return _over_rounds(Spread(value, value, value) for value in values if value is not None)

    def error(self, dataset: str, system: str, ranks: int) -> str:
        """Return the first error of a system's runs. A run that was stopped after an epoch has none."""
        return next((run["error"] for run in self.runs(dataset, system, ranks) if not _has_answered(run)), "")

    def feed_error(self, dataset: str, system: str, phase: str) -> str:
        error = next((feed["error"] for feed in self._feeds(dataset, system, phase) if feed["error"]), "")
        return STOPPED if error.startswith(NO_ANSWER) and self.first_batch(dataset, system) else error

    def problems(self) -> list[str]:
        """Return every difference between delivered rows and a dataset, once for each system and number of ranks."""
        return [
            f"{run['dataset']}, {run['system']}, {ranked(run['ranks'])}: {run['problems'][0]}"
            for run in self._results.get("runs", ())
            if run["problems"]
        ]

    def runs(self, dataset: str, system: str, ranks: int) -> list[Result]:
        return [
            run
            for run in self._results.get("runs", ())
            if (run["dataset"], run["system"], run["ranks"]) == (dataset, system, ranks)
        ]

    def _answered(self, dataset: str, system: str, ranks: int) -> list[Result]:
        return [run for run in self.runs(dataset, system, ranks) if _has_answered(run)]

    def _feeds(self, dataset: str, system: str, phase: str) -> list[Result]:
        return [
            feed
            for feed in self._results.get("feeds", ())
            if (feed["dataset"], feed["system"], feed["phase"]) == (dataset, system, phase)
        ]


def _has_answered(run: Result) -> bool:
    """Return whether a run ended by itself, or was stopped after an epoch."""
    return not run["error"] or (bool(run["epochs"]) and run["error"].startswith(NO_ANSWER))


def _over_rounds(rounds: Iterable[Spread | None]) -> Spread | None:
    found = [each for each in rounds if each is not None]
    known = [each for each in found if each.bound != "<"]
    if not known:
        return max(found, key=lambda each: each.median, default=None)
    values = [each.median for each in known]
    measured = min((each.measured for each in known if each.measured is not None), default=None)
    return Spread(median(values), min(values), max(values), measured, max(each.bound for each in known))


def ranked(count: int) -> str:
    """Return a number of ranks in words."""
    return f"{count} rank" if count == 1 else f"{count} ranks"

"""Figures of the results: the busy share of a job, and what it took. The input is the JSON of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from dataload.benchmarks.suite.measurement import EPOCHS
from dataload.benchmarks.systems.registry import ENTRIES, Entry

Result = dict[str, Any]


@dataclass(frozen=True)
class Share:
    """A share of time.

    Args:
        value: The share, from 0 to 1.
        kind: "measured"; "extrapolated" if later epochs count as the median of those after the first; "below" if the
            share is known to be less.
    """

    value: float
    kind: str = "measured"


def busy_share(run: Result, dataset: Result, epochs: int = EPOCHS, since: str = "start") -> Share | None:
    """Return the ideal compute time of the first epochs over the time of the job, conversion included.

    Args:
        run: The job.
        dataset: Its dataset.
        epochs: Number of epochs.
        since: "start" of the processes, or "import" of torch.

    Returns:
        The share, or None if the job failed.

    Notes:
        A job that was stopped in epoch n + 1 has computed less than n + 1 epochs. At best it computes the others
        without a break, which bounds its share.
    """
    if run["error"]:
        return None
    step, ends = dataset["epoch_seconds"], [epoch["seconds"] for epoch in run["epochs"]]
    before = run["conversion_seconds"] - (run["import_seconds"] if since == "import" else 0.0)
    if epochs <= len(ends):
        return Share(epochs * step / (before + ends[epochs - 1]))
    if len(ends) > 1:
        later = median(after - earlier for earlier, after in pairwise(ends))
        return Share(epochs * step / (before + ends[-1] + (epochs - len(ends)) * later), "extrapolated")
    least = before + run["stopped_after"] + (epochs - len(ends) - 1) * step
    return Share(epochs * step / least, "below")


def utilization(run: Result) -> float | None:
    """Return the AU of MLPerf Storage: compute time over total time, both without the first step."""
    last = run["epochs"][-1] if run["epochs"] else None
    return last["compute_seconds"] / last["total_seconds"] if last and last["total_seconds"] else None


class Figures:
    """The figures of a run, as medians over its rounds.

    Args:
        results: The JSON of the run.
    """

    def __init__(self, results: Result) -> None:
        self._runs: list[Result] = results["runs"]
        self.datasets: dict[str, Result] = {
            name: described
            for name, described in results["datasets"].items()
            if any(run["dataset"] == name for run in self._runs)
        }
        names = {run["system"] for run in self._runs}
        order = {"ours": 0, "peer": 1, "reference": 2}
        self.entries: list[Entry] = sorted(
            (entry for entry in ENTRIES if entry.name in names), key=lambda entry: order[entry.kind]
        )

    @property
    def slices(self) -> list[tuple[int, float]]:
        """The pairs of a number of ranks and megabytes of a row group that were measured, the smallest first."""
        found = {(run["ranks"], self.datasets[run["dataset"]]["row_group_megabytes"]) for run in self._runs}
        return sorted(found)

    def share(self, dataset: str, system: str, ranks: int, epochs: int = EPOCHS, since: str = "start") -> Share | None:
        """Return the busy share; None if no round has one."""
        described, runs = self.datasets[dataset], self.runs(dataset, system, ranks)
        shares = [share for run in runs if (share := busy_share(run, described, epochs, since)) is not None]
        if not shares:
            return None
        kinds = {share.kind for share in shares}
        kind = next(kind for kind in ("below", "extrapolated", "measured") if kind in kinds)
        return Share(median(share.value for share in shares), kind)

    def middle(self, dataset: str, system: str, ranks: int, of: Callable[[Result], float | None]) -> float | None:
        """Return the median of a figure over the rounds."""
        values = [value for run in self.runs(dataset, system, ranks) if (value := of(run)) is not None]
        return median(values) if values else None

    def spread(self) -> float:
        """Return the largest difference between two rounds of a cell: busy shares of ten epochs."""
        most = 0.0
        for dataset, system, ranks in {(run["dataset"], run["system"], run["ranks"]) for run in self._runs}:
            described = self.datasets[dataset]
            shares = [busy_share(run, described) for run in self.runs(dataset, system, ranks)]
            values = [share.value for share in shares if share is not None]
            most = max(most, max(values, default=0.0) - min(values, default=0.0))
        return most

    def told(self) -> list[str]:
        """Return every failure, and every difference between delivered rows and a dataset, once a system and ranks."""
        lines = {
            f"{run['dataset']}, {run['system']}, {ranked(run['ranks'])}: {text}"
            for run in self._runs
            for text in [run["error"], *run["problems"][:1]]
            if text
        }
        return sorted(lines)

    def runs(self, dataset: str, system: str, ranks: int) -> list[Result]:
        asked = (dataset, system, ranks)
        return [run for run in self._runs if (run["dataset"], run["system"], run["ranks"]) == asked]


def ranked(count: int) -> str:
    """Return a number of ranks in words."""
    return f"{count} rank" if count == 1 else f"{count} ranks"

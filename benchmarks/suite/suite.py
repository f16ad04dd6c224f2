"""The run of all measurements: every system on every dataset, each in fresh processes, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dataload.benchmarks.machine.hot_memory import HotMemory
from dataload.benchmarks.machine.speed import speed
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.origin.behaviour import S3
from dataload.benchmarks.suite.datasets import Place, prepare
from dataload.benchmarks.suite.measurement import Measurement, in_short
from dataload.benchmarks.systems.registry import Entry
from dataload.benchmarks.workloads import Workload, workloads

Result = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """The measurements of a run.

    Args:
        place: Size, folders and interpreters.
        workloads: Names of the workloads.
        groups: Megabytes of row groups; each makes a dataset of its own.
        entries: Systems to measure.
        ranks: Numbers of ranks.
        rounds: Number of rounds.
    """

    place: Place
    workloads: tuple[str, ...]
    groups: tuple[float, ...]
    entries: tuple[Entry, ...]
    ranks: tuple[int, ...]
    rounds: int

    def run(
        self, results: Result, memory: HotMemory, say: Callable[[str], object], keep: Callable[[Result], object]
    ) -> None:
        """Run all measurements that are not among the results. Those that failed run again.

        Args:
            results: Takes the results as JSON values.
            memory: Checked before the turns of a dataset.
            say: Called with each line of progress.
            keep: Called with the results after each measurement.
        """
        self.place.data.mkdir(parents=True, exist_ok=True)
        done = {_key(run) for run in results["runs"] if not run["error"]}
        with Origin(self.place.data, behaviour=S3) as origin:
            for turn, (number, ranks, workload, group) in enumerate(self._turns()):
                say(f"round {number}, ranks {ranks}: {workload.rows:,} rows of {workload.name}, {group:g} MB")
                dataset = prepare(workload, group, self.place)
                results["datasets"][dataset.name] = dataset.described()
                missing = [
                    entry for entry in self._rotated(turn) if (number, ranks, dataset.name, entry.name) not in done
                ]
                if missing:
                    results["speed"].append(speed(memory))
                for entry in missing:
                    run = Measurement(self.place, origin, dataset, entry, ranks, number).run(say)
                    found = asdict(run)
                    results["runs"] = [*(each for each in results["runs"] if _key(each) != _key(found)), found]
                    keep(results)
                    say(in_short(run))

    def _turns(self) -> Iterator[tuple[int, int, Workload, float]]:
        for number in range(self.rounds):
            for ranks in self.ranks:
                for group in self.groups:
                    for name in self.workloads:
                        yield number, ranks, workloads(self.place.size, group)[name], group

    def _rotated(self, turn: int) -> tuple[Entry, ...]:
        """Return the systems. Each turn starts with another one, so that no system is always the first."""
        first = turn % max(1, len(self.entries))
        return self.entries[first:] + self.entries[:first]


def _key(run: Result) -> tuple[int, int, str, str]:
    return run["round"], run["ranks"], run["dataset"], run["system"]

"""The run of all measurements: every system on every dataset, each in fresh processes, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.filesize import decimal

from dataload.benchmarks.machine.hot_memory import HotMemory
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.origin.behaviour import ORIGINS
from dataload.benchmarks.suite.datasets import Place, described, prepare
from dataload.benchmarks.suite.measurement import Measurement
from dataload.benchmarks.suite.results import Feed, Run, in_short
from dataload.benchmarks.systems.registry import Entry
from dataload.benchmarks.workloads import Workload, workloads

COLD = "cold feed"  # a stage

Result = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """The systems, datasets and settings of a run.

    Args:
        place: Size, folders, interpreters and time.
        workloads: Names of the workloads.
        groups: Megabytes of row groups; each makes a dataset of its own.
        entries: Systems to measure.
        ranks: Numbers of ranks.
        rounds: Number of rounds.
        origin: A key of ORIGINS.
        epoch_seconds: Epochs of a run after which no further one is measured.
        memory: Checked before each stage; None: not checked.
    """

    place: Place
    workloads: tuple[str, ...]
    groups: tuple[float, ...]
    entries: tuple[Entry, ...]
    ranks: tuple[int, ...]
    rounds: int
    origin: str
    epoch_seconds: float
    memory: HotMemory | None = None

    def run(self, results: Result, say: Callable[[str], object], keep: Callable[[Result], object]) -> None:
        """Run all measurements.

        Args:
            results: Takes the results as JSON values.
            say: Called with each line of progress.
            keep: Called with the results after each measurement.
        """
        place = self.place
        place.data.mkdir(parents=True, exist_ok=True)
        datasets = [prepare(*each, place, self.entries, say) for each in self._chosen()]
        runs: list[Run] = []
        feeds: list[Feed] = []
        written: list[float] = []
        behaviour = ORIGINS[self.origin]
        results |= {
            "size": place.size, "origin": self.origin, "behaviour": asdict(behaviour), "ranks": self.ranks,
            "rounds": self.rounds, "written_bytes_per_second": written,
            "datasets": {each.name: described(each) for each in datasets},
        }  # fmt: skip
        with Origin(place.data, behaviour=behaviour) as origin:
            for number, stage in ((number, stage) for number in range(self.rounds) for stage in self._stages()):
                if self.memory is not None and place.seconds_left > 0:
                    written.append(self.memory.ensure())
                    say(f"round {number}, {stage}: a file is written at {decimal(int(written[-1]))}/s")
                for turn, dataset in enumerate(datasets):
                    for entry in self._turn(number + turn, stage):
                        one = Measurement(place, origin, dataset, entry, number, self.epoch_seconds)
                        if stage == COLD:
                            estimate = next(run for run in runs if one.is_alone(run))
                            feeds.append(one.cold_feed(estimate))
                            say(in_short(feeds[-1]))
                        else:
                            run, warm = one.epochs(int(stage))
                            runs.append(run)
                            feeds += [warm] if warm else []
                            say(", ".join([in_short(run), *([in_short(warm)] if warm else [])]))
                        results["runs"], results["feeds"] = ([asdict(each) for each in all_] for all_ in (runs, feeds))
                        keep(results)

    def _stages(self) -> Iterator[str]:
        """Yield the stages of a round: the first number of ranks, the cold feed, further numbers of ranks."""
        for ranks in self.ranks:
            yield str(ranks)
            if ranks == 1:
                yield COLD

    def _turn(self, turn: int, stage: str) -> Iterator[Entry]:
        """Yield the systems of a stage. Each turn starts with another one, so that no system is always the first."""
        first = turn % len(self.entries)
        for entry in self.entries[first:] + self.entries[:first]:
            if stage == "1" or entry.kind != "floor":
                yield entry

    def _chosen(self) -> Iterator[tuple[str, Workload, float]]:
        for name in self.workloads:
            for group in self.groups:
                label = name if len(self.groups) == 1 else f"{name}, row groups of {group:g} MB"
                yield label, workloads(self.place.size, group)[name], group

"""One measurement in its own process: a system reads a cold epoch and then warm ones.

`python -m dataload.benchmarks.measure ANSWER` reads a Task from standard input and writes the result to the file
ANSWER. Both are JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import psutil

from dataload.benchmarks.systems.base import Setting, System
from dataload.benchmarks.systems.registry import Entry, named
from dataload.benchmarks.workloads import Truth, workloads

WARM_EPOCHS = 2
# Packages that some systems import at first use. Importing them before keeps imports out of the measurement.
LAZY_IMPORTS = ("pandas", "s3fs", "torch")


@dataclass(frozen=True)
class Limits:
    """Limits of the phases in seconds.

    Args:
        cold_at_most: Limit of the cold epoch, which is cut short there.
        warm_at_least: Least time of the warm epochs together. There are at least two.
        warm_at_most: Limit of the warm epochs, which are cut short there.
    """

    cold_at_most: float
    warm_at_least: float
    warm_at_most: float


@dataclass(frozen=True)
class Task:
    """The input of a measurement: a system and a workload by name, the fields of Setting, and the workload's truth."""

    system: str
    workload: str
    size: str
    endpoint_url: str
    prefix: str
    converted: str
    files: str
    cache_dir: str
    num_workers: int
    seed: int
    step_seconds: float
    truth: dict[str, int]
    limits: dict[str, float]


@dataclass
class Phase:
    """The totals of one phase. The origin counts requests and bytes, and `cpu_seconds` includes all processes.

    `step_seconds` is the part of `seconds` in which the emulated accelerator was busy.
    """

    epochs: int = 0
    rows: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    first_batch_seconds: float = 0.0
    cpu_seconds: float = 0.0
    origin_bytes: int = 0
    origin_requests: int = 0
    duplicate_gets: int = 0
    cut: bool = False


@dataclass
class Measured:
    """The result of a measurement.

    Args:
        phases: Completed phases by name.
        problems: Differences between the delivered rows and the dataset.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Measurement:
    """A measurement of one system on one workload."""

    def __init__(self, entry: Entry, setting: Setting, truth: Truth, limits: Limits) -> None:
        self._entry = entry
        self._setting = setting
        self._truth = truth
        self._limits = limits
        self._orders = {truth.order}
        self.measured = Measured()

    def run(self) -> None:
        """Run the phases and fill `measured`. Errors of the system propagate."""
        make, limits = self._entry.load(), self._limits
        for name in LAZY_IMPORTS:
            with suppress(ImportError):
                import_module(name)
        with self._phase("cold") as cold:
            started = perf_counter()
            system: System = make(self._setting)
            if "cold" in self._entry.phases:
                self._epoch(system, cold, 0, started, limits.cold_at_most)
        with closing(system):
            if cold.cut:  # The cache is not full, so the next epoch would not be warm.
                return
            with self._phase("warm") as warm:
                while "warm" in self._entry.phases and not self._enough(warm):
                    self._epoch(system, warm, warm.epochs + 1, perf_counter(), limits.warm_at_most - warm.seconds)

    @contextmanager
    def _phase(self, name: str) -> Iterator[Phase]:
        phase = Phase()
        cpu, sent = cpu_seconds(), self._sent()
        yield phase
        if name in self._entry.phases:
            self.measured.phases[name] = phase
        phase.cpu_seconds = cpu_seconds() - cpu
        now = self._sent()
        phase.origin_bytes = now["get_bytes"] - sent["get_bytes"]
        phase.duplicate_gets = now["duplicate_gets"] - sent["duplicate_gets"]
        phase.origin_requests = sum(now[kind] - sent[kind] for kind in now if kind.endswith("_requests"))

    def _epoch(self, system: System, phase: Phase, number: int, started: float, at_most: float) -> None:
        consumer = self._setting.workload.consumer()
        first_batch_at = None
        for batch in system.epoch(number):
            now = perf_counter()
            first_batch_at = first_batch_at or now
            if isinstance(batch, int):
                consumer.rows += batch
            else:
                consumer.take(batch)
                sleep(self._setting.step_seconds)
                phase.step_seconds += self._setting.step_seconds
            if now - started > at_most:
                phase.cut = True
                break
        phase.seconds += perf_counter() - started
        phase.first_batch_seconds = phase.first_batch_seconds or (first_batch_at or perf_counter()) - started
        phase.epochs += 1
        phase.rows += consumer.rows
        phase.num_bytes += consumer.num_bytes
        if not phase.cut:
            self._check(number, consumer)

    def _enough(self, warm: Phase) -> bool:
        long = warm.epochs >= WARM_EPOCHS and warm.seconds >= self._limits.warm_at_least
        return long or warm.cut or bool(self.measured.problems)

    def _check(self, number: int, consumer: Any) -> None:
        if not self._entry.whole:
            return
        if consumer.rows != self._truth.rows:
            self.measured.problems.append(f"epoch {number}: {consumer.rows} rows of {self._truth.rows}")
        elif consumer.num_bytes and consumer.digest != self._truth.digest:
            self.measured.problems.append(f"epoch {number}: not the rows of the dataset")
        if consumer.order in self._orders and self._entry.kind != "floor":
            self.measured.problems.append(f"epoch {number}: the order of an earlier epoch or of the files")
        self._orders.add(consumer.order)

    def _sent(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self._setting.endpoint_url}/__stats") as answer:
            stats: dict[str, int] = json.load(answer)
        return stats


def cpu_seconds() -> float:
    """Return the user and system time of this process and all its children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = process_time() + children.ru_utime + children.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _measured(task: Task) -> dict[str, Any]:
    setting = Setting(
        workload=workloads(task.size)[task.workload],
        endpoint_url=task.endpoint_url,
        prefix=task.prefix,
        converted=task.converted,
        files=Path(task.files),
        cache_dir=Path(task.cache_dir),
        num_workers=task.num_workers,
        seed=task.seed,
        step_seconds=task.step_seconds,
    )
    run = Measurement(named(task.system), setting, Truth(**task.truth), Limits(**task.limits))
    try:
        run.run()
    except Exception as error:  # noqa: BLE001 - the table shows every error
        traceback.print_exc()
        message = (str(error).strip().splitlines() or [""])[-1]  # A worker's error includes its traceback.
        return asdict(run.measured) | {"error": f"{type(error).__name__}: {message}"}
    return asdict(run.measured)


def _write(answer: Path, measured: dict[str, Any]) -> None:
    """Write the result atomically."""
    unfinished = answer.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(measured))
    unfinished.rename(answer)


if __name__ == "__main__":
    task = Task(**json.load(sys.stdin))
    _write(Path(sys.argv[1]), _measured(task))

"""One rank of a measured system, in its own process: `python -m dataload.benchmarks.suite.rank`.

The first line of standard input is a pickled Task. Each further line asks for an epoch, and one line of JSON answers
it. The process exits when standard input ends.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from time import perf_counter
from typing import Any

from dataload.benchmarks.accelerators import Clock
from dataload.benchmarks.machine.usage import cpu_seconds
from dataload.benchmarks.systems.base import Setting, System
from dataload.benchmarks.systems.registry import named

IMPORTED_BY_TRAINING = ("numpy", "torch", "pyarrow")


@dataclass(frozen=True)
class Task:
    """The work of a rank.

    Args:
        system: Name of the system.
        setting: Its setting.
        rows_per_second: Rows that the emulated accelerators of this rank consume.
        started: Start of the rank's processes by `perf_counter`, which is one clock for all processes of a host.
    """

    system: str
    setting: Setting
    rows_per_second: float
    started: float


@dataclass(frozen=True)
class Epoch:
    """A rank, or all ranks of a host, at the end of an epoch. Times count from the start of the processes.

    Args:
        seconds: End of the last step.
        first_batch_seconds: Arrival of the epoch's first batch.
        rows: Rows of this epoch.
        num_bytes: Their bytes, 0 if they were not read.
        digest: Their digest by Consumer.
        order: Checksum of their order.
        cpu_seconds: Processor time of the rank and its children since their start.
        compute_seconds: Compute time of all steps since the start but the first one.
        total_seconds: Time since the end of the first step.
    """

    seconds: float
    first_batch_seconds: float
    rows: int
    num_bytes: int
    digest: int
    order: int
    cpu_seconds: float
    compute_seconds: float
    total_seconds: float


def read_epoch(system: System, setting: Setting, number: int, clock: Clock, started: float) -> Epoch:
    """Read one epoch as the emulated accelerators take it.

    Args:
        system: The system.
        setting: Its setting.
        number: Number of the epoch.
        clock: The clock of the job.
        started: See Task.
    """
    consumer = setting.workload.consumer()
    first_batch_at = None
    for batch in system.epoch(number):
        first_batch_at = first_batch_at or perf_counter()
        before = consumer.rows
        if isinstance(batch, int):  # of the wire, whose bytes are not read
            consumer.rows += batch
        else:
            consumer.take(batch)
        clock.take(consumer.rows - before)
    ended = max(perf_counter(), clock.free_at or 0.0)
    return Epoch(
        seconds=ended - started,
        first_batch_seconds=(first_batch_at or ended) - started,
        rows=consumer.rows,
        num_bytes=consumer.num_bytes,
        digest=consumer.digest,
        order=consumer.order,
        cpu_seconds=cpu_seconds(),
        compute_seconds=clock.compute_seconds,
        total_seconds=clock.total_seconds,
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that prints of libraries are no answers
    task: Task = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    for module in IMPORTED_BY_TRAINING:
        with suppress(ImportError):
            import_module(module)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(perf_counter() - task.started)
    clock = Clock(task.rows_per_second)
    try:
        with closing(named(task.system).load()(task.setting)) as system:
            for number, _ in enumerate(sys.stdin):
                answer(asdict(read_epoch(system, task.setting, number, clock, task.started)))
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[-1]  # A worker's error includes its traceback.
        answer({"error": f"{type(error).__name__}: {message}"})
        raise


if __name__ == "__main__":
    main()

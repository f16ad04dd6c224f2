"""One rank of a measured system, in its own process: `python -m dataload.benchmarks.suite.rank`.

The first line of standard input has the name of a system and its Setting, pickled. Each further line asks for one
epoch, and one line of JSON answers it. The system is made in the first epoch, so that its start-up counts. The process
exits when standard input ends.
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

IMPORTED_BY_TRAINING = ("numpy", "torch", "pyarrow")  # before the clock starts


@dataclass(frozen=True)
class Epoch:
    """One epoch of one rank.

    Args:
        seconds: Its time; of the first epoch with the making of the system.
        first_batch_seconds: Time until the first batch.
        rows: Rows delivered.
        num_bytes: Their bytes, 0 if they were not read.
        digest: Their digest by Consumer.
        order: Checksum of their order.
        cpu_seconds: Processor time of the rank and its children until the end of the epoch.
        compute_seconds: Ideal compute time of the accelerators after the first step.
        total_seconds: Total time of these steps.
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


def read_epoch(system: System, setting: Setting, number: int, rows_per_second: float | None, started: float) -> Epoch:
    """Read one epoch.

    Args:
        system: The system.
        setting: Its setting.
        number: Number of the epoch.
        rows_per_second: Rows that all emulated accelerators consume; None: as fast as the system delivers.
        started: Begin of the epoch by `perf_counter`.
    """
    consumer = setting.workload.consumer()
    clock = Clock(rows_per_second) if rows_per_second else None
    first_batch_at = None
    for batch in system.epoch(number):
        first_batch_at = first_batch_at or perf_counter()
        before = consumer.rows
        if isinstance(batch, int):  # of a floor whose bytes are not read
            consumer.rows += batch
        else:
            consumer.take(batch)
        if clock:
            clock.take(consumer.rows - before)
    ended = perf_counter()
    return Epoch(
        seconds=ended - started,
        first_batch_seconds=(first_batch_at or ended) - started,
        rows=consumer.rows,
        num_bytes=consumer.num_bytes,
        digest=consumer.digest,
        order=consumer.order,
        cpu_seconds=cpu_seconds(),
        compute_seconds=clock.compute_seconds if clock else 0.0,
        total_seconds=clock.total_seconds if clock else 0.0,
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that prints of libraries are no answers
    name, setting = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    for module in IMPORTED_BY_TRAINING:
        with suppress(ImportError):
            import_module(module)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer("ready")
    line = sys.stdin.readline()
    if not line:
        return
    started = perf_counter()
    try:
        with closing(named(name).load()(setting)) as system:
            while line:
                asked = json.loads(line)
                epoch = read_epoch(system, setting, asked["epoch"], asked["rows_per_second"], started)
                answer(asdict(epoch))
                line = sys.stdin.readline()
                started = perf_counter()
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[-1]  # A worker's error includes its traceback.
        answer({"error": f"{type(error).__name__}: {message}"})
        raise


if __name__ == "__main__":
    main()

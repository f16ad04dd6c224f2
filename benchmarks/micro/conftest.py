"""What the micro benchmarks share: the size of the data, a simulated S3, and figures that aren't times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataload.benchmarks.machine.usage import SAMPLE_SECONDS, PeakMemory
from dataload.benchmarks.origin import Behaviour, Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.workloads import SIZES, Workload, workloads, write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", default="small", choices=SIZES, help="size of the data")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the tests recorded. pytest-benchmark's tables have times only."""
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and report.user_properties:
            terminalreporter.line(f"{report.head_line}: {', '.join(f'{k} {v}' for k, v in report.user_properties)}")


@pytest.fixture
def scaled(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Scale a number for the size "small" to the size asked for."""
    return lambda number: max(1, int(number * SIZES[request.config.getoption("size")]))


@pytest.fixture
def per_second(benchmark: Any, record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Record how many of something a benchmark made per second."""

    def record(unit: str, count: float) -> None:
        if benchmark.stats:  # There are none with --benchmark-disable.
            record_property(f"{unit}/s", f"{count / benchmark.stats.stats.median:,.0f}")

    return record


@pytest.fixture
def files(request: pytest.FixtureRequest) -> Callable[[str], tuple[Workload, Path]]:
    """Write a workload to the bucket in .bench, once. Return it with the folder of its files."""

    def written(name: str) -> tuple[Workload, Path]:
        size = request.config.getoption("size")
        folder = request.config.rootpath / ".bench/data" / BUCKET / "micro" / size / name
        write(workload := workloads(size)[name], folder)
        return workload, folder

    return written


@pytest.fixture
def origin_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., Origin]]:
    """Start an S3 server of the bucket in .bench."""
    running: list[Origin] = []

    def started(behaviour: Behaviour | None = None) -> Origin:
        folder = request.config.rootpath / ".bench/data"
        (folder / BUCKET).mkdir(parents=True, exist_ok=True)
        running.append(Origin(folder, behaviour=behaviour).__enter__())
        return running[-1]

    yield started
    for origin in running:
        origin.__exit__(None, None, None)


@pytest.fixture
def in_process() -> Callable[..., tuple[Any, int]]:
    """Call a function of a test module in a new process. Return its result, and the process's peak memory in bytes."""

    def call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
        receiver, sender = Pipe(duplex=False)
        context, peak = get_context("spawn"), PeakMemory()
        process = context.Process(target=_answer, args=(sender, function, arguments))
        process.start()
        sender.close()
        while not receiver.poll(SAMPLE_SECONDS):
            peak.sample([psutil.Process(process.pid)])
        result = receiver.recv()  # EOFError: the process failed, and has printed why
        process.join()
        return result, peak.num_bytes

    return call


def _answer(sender: Any, function: Callable[..., Any], arguments: Any) -> None:
    sender.send(function(*arguments))

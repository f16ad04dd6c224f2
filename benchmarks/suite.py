"""The suite: measurements of every system on every workload, each in a fresh process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.filesize import decimal

from dataload.benchmarks.machine.hot_memory import HotMemory
from dataload.benchmarks.measure import Limits, Task
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.convert import price_of
from dataload.benchmarks.systems.registry import Entry
from dataload.benchmarks.workloads import Truth, Workload, workloads, write
from dataload.errors import ConfigError

WIRE_LATENCY = 0.030
SAMPLE_SECONDS = 0.2
UNFINISHED = "unfinished.json"  # the results so far, kept if the suite is interrupted
PATIENCE_SECONDS = 60.0  # beyond the limits of the phases, for start and exit of a process
CONVERSION_SECONDS = 1800.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """The systems, workloads and settings of a run.

    Args:
        size: Size of the workloads.
        workloads: Names of the workloads; empty for all.
        entries: Systems to measure.
        workers: Worker counts.
        rounds: Number of rounds.
        limits: Limits of the phases.
        wire: Whether the origin has the latency and bandwidth of S3 over a network.
        folder: Absolute path of the data, which is kept, and of temporary files.
        peers_python: Interpreter of the peers' environment; None if it does not exist.
        step_seconds: Time of an emulated accelerator step.
        seconds: Limit of the whole run. Measurements that have not started by then are reported as not run.
        memory: Checked before each round; None: not checked.
    """

    size: str
    workloads: tuple[str, ...]
    entries: tuple[Entry, ...]
    workers: tuple[int, ...]
    rounds: int
    limits: Limits
    wire: bool
    folder: Path
    peers_python: Path | None
    step_seconds: float = 0.0
    seconds: float = math.inf
    memory: HotMemory | None = None

    def run(self, say: Callable[[str], object]) -> Result:
        """Run all measurements.

        Args:
            say: Called with each line of progress.

        Returns:
            The results as JSON values.
        """
        data = self.folder / "data"
        chosen = self._chosen()
        data.mkdir(parents=True, exist_ok=True)
        described: Result = {}
        runs: list[Result] = []
        written: list[float] = []
        results = {
            "size": self.size,
            "rounds": self.rounds,
            "wire": self.wire,
            "step_seconds": self.step_seconds,
            "limits": asdict(self.limits),
            "written_bytes_per_second": written,
            "workloads": described,
            "runs": runs,
        }
        until = time.monotonic() + self.seconds
        with Origin(data) as origin:
            for workload in chosen:
                say(f"{workload.name}: writing {workload.rows:,} rows")
                truth = write(workload, self._data(workload, "parquet"))
                conversions = self._conversions(workload, until, say)
                described[workload.name] = asdict(truth) | {"conversions": conversions}
                origin.behave(
                    latency=WIRE_LATENCY if self.wire else 0.0,
                    bytes_per_second=workload.bytes_per_second if self.wire else None,
                )
                for number, turns in groupby(self._turns(), itemgetter(0)):
                    if self.memory is not None:
                        written.append(self.memory.ensure())
                        say(f"{workload.name}, round {number}: a file is written at {decimal(int(written[-1]))}/s")
                    for _, workers, entry in turns:
                        origin.reset()
                        if failed := conversions.get(entry.name, {}).get("error"):
                            result = {"error": f"not converted: {failed}"}
                        else:
                            task = self._task(entry, workload, workers, truth, origin.endpoint_url)
                            result = self._measure(entry, task, until - time.monotonic())
                        say(f"{workload.name}, round {number}, {workers} workers, {entry.name}: {_in_short(result)}")
                        key = {"workload": workload.name, "system": entry.name, "workers": workers, "round": number}
                        runs.append(key | result)
                        (self.folder / UNFINISHED).write_text(json.dumps(results))
        (self.folder / UNFINISHED).unlink(missing_ok=True)
        return results

    def _chosen(self) -> list[Workload]:
        known = workloads(self.size)
        if unknown := set(self.workloads) - known.keys():
            raise ConfigError(f"no workload is called {', '.join(unknown)}; there are: {', '.join(known)}")
        return [known[name] for name in self.workloads or known]

    def _turns(self) -> Iterator[tuple[int, int, Entry]]:
        """Yield (round, workers, system). Each turn starts with another system.

        The systems alternate, so that a slow minute of the machine affects all of them. A system without workers runs
        once a round.
        """
        turns = [(number, workers) for number in range(self.rounds) for workers in self.workers]
        for turn, (number, workers) in enumerate(turns):
            first = turn * len(self.entries) // len(turns)
            for entry in self.entries[first:] + self.entries[:first]:
                if entry.parallel:
                    yield number, workers, entry
                elif workers == self.workers[0]:
                    yield number, 0, entry

    def _data(self, workload: Workload, kind: str) -> Path:
        """Return the folder of a workload's files. The kind is "parquet", or the module of a system."""
        return self.folder / "data" / BUCKET / self.size / workload.name / kind

    def _python(self, entry: Entry) -> Path | None:
        return Path(sys.executable) if entry.environment == "own" else self.peers_python

    def _conversions(self, workload: Workload, until: float, say: Callable[[str], object]) -> dict[str, Result]:
        """Convert the workload to the systems' own formats. Return the seconds and bytes of each conversion."""
        prices: dict[str, Result] = {}
        for entry in self.entries:
            python = self._python(entry)
            if not entry.converts or python is None:
                continue
            files, folder = self._data(workload, "parquet"), self._data(workload, entry.module)
            if price := price_of(entry, files, folder):
                prices[entry.name] = price
                continue
            say(f"{workload.name}: converting for {entry.name}")
            task = (entry.name, workload.name, self.size, files, folder)
            patience = min(CONVERSION_SECONDS, max(0.0, until - time.monotonic()))
            prices[entry.name] = _converted(python, task, patience) or price_of(entry, files, folder) or {}
        return prices

    def _task(self, entry: Entry, workload: Workload, workers: int, truth: Truth, endpoint_url: str) -> Task:
        files, converted = self._data(workload, "parquet"), self._data(workload, entry.module)
        bucket = files.parents[2]
        return Task(
            system=entry.name,
            workload=workload.name,
            size=self.size,
            endpoint_url=endpoint_url,
            prefix=str(files.relative_to(bucket)),
            converted=str(converted.relative_to(bucket)),
            files=str(files),
            cache_dir="",
            num_workers=workers,
            seed=0,
            step_seconds=self.step_seconds,
            truth=asdict(truth),
            limits=asdict(self.limits),
        )

    def _measure(self, entry: Entry, task: Task, left: float) -> Result:
        python = self._python(entry)
        if python is None:
            return {"error": "not run: its environment does not exist (make peers)"}
        patience = min(left, self.limits.cold_at_most + self.limits.warm_at_most + PATIENCE_SECONDS)
        if patience <= 0:
            return {"error": f"not run: the limit of {self.seconds:.0f} s was reached"}
        with TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as scratch:
            cache_dir = Path(scratch) / "cache"
            cache_dir.mkdir()
            return _in_a_process(python, replace(task, cache_dir=str(cache_dir)), Path(scratch), patience)


def _converted(python: Path, task: tuple[object, ...], patience: float) -> Result | None:
    """Run a conversion. Return its error, or None."""
    command = [str(python), "-m", "dataload.benchmarks.systems.convert", *map(str, task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {patience:.0f} s"}
    return {"error": _last_line(done.stderr)} if done.returncode else None


def _in_a_process(python: Path, task: Task, scratch: Path, patience: float) -> Result:
    """Run a task for at most `patience` seconds. Return its result with the peak memory, or an error."""
    answer, log = scratch / "answer.json", scratch / "log"
    environment = {"PATH": os.environ["PATH"], "HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8"}
    with log.open("w+") as output:
        process = psutil.Popen(
            [python, "-m", "dataload.benchmarks.measure", answer],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            env=environment,
            cwd=scratch,
            start_new_session=True,
        )
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asdict(task)))
                process.stdin.close()
            peak = peak_memory(process, patience)
        finally:
            timed_out = process.poll() is None
            _kill(process)
        if answer.exists():  # also of a process that hung after the measurement
            result: Result = json.loads(answer.read_text()) | {"peak_memory_bytes": peak}
            return result | ({"error": f"did not end within {patience:.0f} s"} if timed_out else {})
        if timed_out:
            return {"error": f"no answer within {patience:.0f} s"}
        output.seek(0)
        return {"error": f"ended with {process.returncode}: {_last_line(output.read())}"}


def peak_memory(process: psutil.Popen, patience: float) -> int:
    """Sample the memory of a process and its children until it exits, for at most `patience` seconds. Return the peak.

    The memory is anonymous and shared memory, each page once, without the page cache.
    """
    peak, until = 0, time.monotonic() + patience
    while time.monotonic() < until:
        size = 0
        with suppress(psutil.NoSuchProcess):
            size = sum(_memory(member.pid) for member in [process, *process.children(recursive=True)])
        peak = max(peak, size)
        with suppress(psutil.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
            break
    return peak


def _memory(pid: int) -> int:
    """Return the memory of a process in bytes, by proc_pid_smaps(5)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # The process has exited.
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _kill(process: psutil.Popen) -> None:
    """Kill the process group of a measurement."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _in_short(result: Result) -> str:
    phases, wrong = result.get("phases", {}), [*result.get("problems", ()), *filter(None, [result.get("error")])]
    rates = [f"{name} {phase['rows'] / phase['seconds']:,.0f} rows/s" for name, phase in phases.items()]
    return ", ".join([*rates, *wrong])

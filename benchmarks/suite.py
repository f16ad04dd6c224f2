"""Runs every system on every workload, side by side, each time in a fresh process, and collects what was measured."""

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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from dataload.benchmarks.convert import price_of
from dataload.benchmarks.measure import Limits, Task
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.benchmarks.systems.registry import Entry
from dataload.benchmarks.workloads import Truth, Workload, workloads, write
from dataload.errors import ConfigError

WIRE_LATENCY = 0.030
SAMPLE_SECONDS = 0.2
UNFINISHED = "unfinished.json"  # what was measured so far, should the suite be ended early
PATIENCE_SECONDS = 60.0  # beyond the limits of its phases, for a process to start, to open and to end
CONVERSION_SECONDS = 1800.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """What is run.

    workloads: by name; none: all. wire: the origin answers as S3 does over a network, late and at a workload's rate
        for each connection; otherwise as fast as it can.
    folder: for the data, which is kept, and for scratch; absolute.
    peers_python: the interpreter of the peers' environment; None when there is none.
    step_seconds: that an emulated accelerator takes for each batch.
    seconds: for everything; what has not begun by then is not run, and says so.
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

    def run(self, say: Callable[[str], object]) -> Result:
        """Every figure, JSON-able. say: is told what is going on, a line at a time."""
        data = self.folder / "data"
        chosen = self._chosen()
        data.mkdir(parents=True, exist_ok=True)
        described: Result = {}
        runs: list[Result] = []
        results = {
            "size": self.size,
            "rounds": self.rounds,
            "wire": self.wire,
            "step_seconds": self.step_seconds,
            "limits": asdict(self.limits),
            "workloads": described,
            "runs": runs,
        }
        until = time.monotonic() + self.seconds
        with Origin(data) as origin:
            for workload in chosen:
                say(f"{workload.name}: making {workload.rows:,} rows")
                truth = write(workload, self._data(workload, "parquet"))
                conversions = self._conversions(workload, until, say)
                described[workload.name] = asdict(truth) | {"conversions": conversions}
                origin.behave(
                    latency=WIRE_LATENCY if self.wire else 0.0,
                    bytes_per_second=workload.bytes_per_second if self.wire else None,
                )
                for number, workers, entry in self._turns():
                    origin.reset()
                    if failed := conversions.get(entry.name, {}).get("error"):
                        result = {"error": f"not converted: {failed}"}
                    else:
                        task = self._task(entry, workload, workers, truth, origin.endpoint_url)
                        result = self._measure(entry, task, until - time.monotonic())
                    say(f"{workload.name}, round {number}, {workers} workers, {entry.name}: {_in_short(result)}")
                    place = {"workload": workload.name, "system": entry.name, "workers": workers, "round": number}
                    runs.append(place | result)
                    (self.folder / UNFINISHED).write_text(json.dumps(results))
        (self.folder / UNFINISHED).unlink(missing_ok=True)
        return results

    def _chosen(self) -> list[Workload]:
        known = workloads(self.size)
        if unknown := set(self.workloads) - known.keys():
            raise ConfigError(f"no workload is called {', '.join(unknown)}; there are: {', '.join(known)}")
        return [known[name] for name in self.workloads or known]

    def _turns(self) -> Iterator[tuple[int, int, Entry]]:
        """(round, workers, system): the systems take turns, so that a slow minute of the machine hits them alike.

        Each turn begins with another one. Those that have no workers run once a round.
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
        """The folder of the workload's files of one kind: "parquet", or the module of the system they are for."""
        return self.folder / "data" / BUCKET / self.size / workload.name / kind

    def _python(self, entry: Entry) -> Path | None:
        return Path(sys.executable) if entry.environment == "own" else self.peers_python

    def _conversions(self, workload: Workload, until: float, say: Callable[[str], object]) -> dict[str, Result]:
        """What it took to make the workload's copies in the systems' own formats: seconds and bytes of each."""
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
            return {"error": "not run: its environment is not made (make peers)"}
        patience = min(left, self.limits.cold_at_most + self.limits.warm_at_most + PATIENCE_SECONDS)
        if patience <= 0:
            return {"error": f"not run: {self.seconds:.0f} s were over"}
        with TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as scratch:
            cache_dir = Path(scratch) / "cache"
            cache_dir.mkdir()
            return _in_a_process(python, replace(task, cache_dir=str(cache_dir)), Path(scratch), patience)


def _converted(python: Path, task: tuple[object, ...], patience: float) -> Result | None:
    """Why a conversion failed; None when it did not."""
    command = [str(python), "-m", "dataload.benchmarks.convert", *map(str, task)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {patience:.0f} s"}
    return {"error": _last_line(ended.stderr)} if ended.returncode else None


def _in_a_process(python: Path, task: Task, scratch: Path, patience: float) -> Result:
    """What the task measured within `patience` seconds, and the peak memory of its processes; or why nothing."""
    answer, log = scratch / "answer.json", scratch / "log"
    environment = {"PATH": os.environ["PATH"], "HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8"}
    with log.open("w+") as said:
        process = psutil.Popen(
            [python, "-m", "dataload.benchmarks.measure", answer],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            env=environment,
            cwd=scratch,
            start_new_session=True,
        )
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asdict(task)))
                process.stdin.close()
            peak = _peak_memory(process, patience)
        finally:
            still_there = process.poll() is None
            _end(process)
        if answer.exists():  # A process that hangs when it is done has measured something.
            result: Result = json.loads(answer.read_text()) | {"peak_memory_bytes": peak}
            return result | ({"error": f"did not end within {patience:.0f} s"} if still_there else {})
        if still_there:
            return {"error": f"no answer within {patience:.0f} s"}
        said.seek(0)
        return {"error": f"ended with {process.returncode}: {_last_line(said.read())}"}


def _peak_memory(process: psutil.Popen, patience: float) -> int:
    """The most that a process and all it started held at once, looked at until it ends or `patience` seconds are over.

    Counted is what cannot be dropped: anonymous and shared memory, each page once; not the page cache.
    """
    peak, until = 0, time.monotonic() + patience
    while time.monotonic() < until:
        held = 0
        with suppress(psutil.NoSuchProcess):
            held = sum(_held(each.pid) for each in [process, *process.children(recursive=True)])
        peak = max(peak, held)
        with suppress(psutil.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
            break
    return peak


def _held(pid: int) -> int:
    """Bytes, by proc_pid_smaps(5)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # It has just ended.
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _end(process: psutil.Popen) -> None:
    """Kills what a measurement left running."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing said"])[-1]


def _in_short(result: Result) -> str:
    phases, wrong = result.get("phases", {}), [*result.get("problems", ()), *filter(None, [result.get("error")])]
    rates = [f"{name} {phase['rows'] / phase['seconds']:,.0f} rows/s" for name, phase in phases.items()]
    return ", ".join([*rates, *wrong])

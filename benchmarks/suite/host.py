"""The ranks of a measured system on this host: processes that read epochs in step."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import psutil

from dataload.benchmarks.machine.usage import PeakMemory
from dataload.benchmarks.suite.rank import Epoch, Task
from dataload.benchmarks.systems.base import Setting
from dataload.runtime.child_process import as_child

MASK = (1 << 64) - 1
EXIT_SECONDS = 5.0
SAMPLE_SECONDS = 1.0  # between two samples of memory: to find all processes takes milliseconds of a core


class HostError(Exception):
    """A rank failed."""


class Stopped(HostError):
    """The limit of the job is over."""


class Host:
    """A job: all ranks of a system on this host. They start together, and wait for each other after every epoch.

    Args:
        python: Interpreter of the system's environment.
        system: Name of the system.
        setting: Setting of rank 0.
        rows_per_second: Rows that all emulated accelerators consume.
        folder: An empty folder for logs and temporary files.
        limit: Seconds until the processes are killed.

    Attributes:
        memory: The most memory that all processes used together.
    """

    def __init__(
        self, python: Path, system: str, setting: Setting, rows_per_second: float, folder: Path, limit: float
    ) -> None:
        self._python, self._setting, self._folder = python, setting, folder
        self._task = Task(system, setting, rows_per_second / setting.ranks, perf_counter())
        self._until = self._task.started + limit
        self._ended = Event()
        self._processes: list[psutil.Popen] = []
        self.memory = PeakMemory()

    def __enter__(self) -> Self:
        port = _free_port()
        for rank in range(self._setting.ranks):
            self._processes.append(self._start(rank, port))
        self._watch = Thread(target=self._sample, daemon=True)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._watch.join()  # first: if two threads wait for a process, psutil forgets its exit status
        for process in self._processes if kind is None else ():
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes if kind is None else ():
            with suppress(psutil.TimeoutExpired):
                process.wait(min(EXIT_SECONDS, max(0.1, self._until - perf_counter())))
        self._kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()

    def wait_until_imported(self) -> float:
        """Wait until all ranks have imported torch. Return the seconds since their start.

        Raises:
            HostError: A rank ended, or the limit is over.
        """
        for rank, process in enumerate(self._processes):
            setting = replace(self._setting, rank=rank)
            self._write(process, pickle.dumps(replace(self._task, setting=setting)).hex())
        seconds: float = max(self._answer(rank) for rank in range(len(self._processes)))
        return seconds

    def epoch(self) -> Epoch:
        """Read the next epoch in every rank.

        Returns:
            The epoch of the host: the slowest rank's times, and sums of the rest.

        Raises:
            HostError: A rank failed, or the limit is over.
        """
        for process in self._processes:
            self._write(process, "")
        ranks = [Epoch(**self._answer(rank)) for rank in range(self._setting.ranks)]
        return Epoch(
            seconds=max(epoch.seconds for epoch in ranks),
            first_batch_seconds=max(epoch.first_batch_seconds for epoch in ranks),
            rows=sum(epoch.rows for epoch in ranks),
            num_bytes=sum(epoch.num_bytes for epoch in ranks),
            digest=sum(epoch.digest for epoch in ranks) & MASK,
            order=hash(tuple(epoch.order for epoch in ranks)) if len(ranks) > 1 else ranks[0].order,
            cpu_seconds=sum(epoch.cpu_seconds for epoch in ranks),
            compute_seconds=sum(epoch.compute_seconds for epoch in ranks),
            total_seconds=sum(epoch.total_seconds for epoch in ranks),
        )

    def _start(self, rank: int, port: int) -> psutil.Popen:
        folder = str(self._folder)
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        if self._setting.ranks > 1:
            count = str(self._setting.ranks)
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOBAL_RANK": str(rank)}  # LitData: the last
            environment |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": "0"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with self._log(rank).open("w") as log:
            return psutil.Popen(
                [self._python, *as_child("dataload.benchmarks.suite.rank")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    def _log(self, rank: int) -> Path:
        return self._folder / f"log-{rank}"

    def _write(self, process: psutil.Popen, line: str) -> None:
        with suppress(BrokenPipeError):  # of a process that has ended: the answer has its error
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _answer(self, rank: int) -> Any:
        line = self._processes[rank].stdout.readline()
        if not line:
            raise Stopped if perf_counter() >= self._until else HostError(self._error())
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise HostError(answer["error"])
        return answer

    def _error(self) -> str:
        """Return the error of the first rank that failed by itself."""
        codes = [process.wait() for process in self._processes]
        rank = next((rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGKILL)), 0)
        for line in self._processes[rank].stdout:
            if '"error"' in line:
                return str(json.loads(line)["error"])
        return f"ended with {codes[rank]}: {last_line(self._log(rank).read_text(errors='replace'))}"

    def _sample(self) -> None:
        """Sample the memory until the end. Kill all ranks once one has failed or the limit is over."""
        while not self._ended.wait(SAMPLE_SECONDS):
            self.memory.sample(self._processes)
            if perf_counter() >= self._until or any(process.poll() for process in self._processes):
                self._kill()
                return

    def _kill(self) -> None:
        """Kill the process groups of all ranks, with their workers."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """Return the last line of an output."""
    return (text.strip().splitlines() or ["no output"])[-1]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

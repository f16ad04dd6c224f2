"""Every child process ends with the training process, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiers
from clusters import until
from descendants import descendants_of

from dataload import make_dataset, make_loader
from dataload.rows.background_decoder.client import BackgroundDecoder

ROWS = 64


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


def file_of(folder: Path, row_bytes: int) -> Path:
    values = pa.array(np.zeros(ROWS * row_bytes, np.uint8))
    pq.write_table(pa.table({"a": pa.FixedSizeListArray.from_arrays(values, row_bytes)}), folder / "rows.parquet")
    return folder / "rows.parquet"


class Noted:
    """A transform that notes each call in a file."""

    def __init__(self, calls: Path) -> None:
        self.calls = calls

    def __call__(self, batch: Any) -> Any:
        with self.calls.open("ab") as file:
            file.write(b".")
        return batch


class Endless:
    """A function that returns in the process that made it, and in no other."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __call__(self, batch: Any) -> Any:
        if os.getpid() != self.home:
            threading.Event().wait()
        return batch


def end_as_told(connection: Connection) -> None:
    connection.send("ready")
    connection.recv()
    os._exit(1)


def loop(connection: Connection, file: Path, **options: Any) -> None:
    """Take one batch. The workers make all others that they may, and wait until somebody reads from their pipe."""
    calls = file.with_name("calls")
    loader = make_loader(file, 1, transform=Noted(calls), cache=False, num_workers=2, prefetch_factor=8, **options)
    batches = iter(loader)
    next(batches)
    until(lambda: calls.stat().st_size == 1 + 2 * 8)
    end_as_told(connection)


def map_in_processes(connection: Connection, file: Path) -> None:
    mapped = make_dataset(file, cache=False).map(Endless(), version="1", processes=2)
    threading.Thread(target=mapped.__getitems__, args=([0],), daemon=True).start()
    until(lambda: mapped_in_children())
    end_as_told(connection)


def mapped_in_children() -> bool:
    return any("dataload.mapping" in " ".join(child.cmdline()) for child in psutil.Process().children())


def decode_ahead(connection: Connection, file: Path) -> None:
    cache = {"cache_dir": str(file.with_name("cache")), "cache_bytes": "100MB"}
    decoder = BackgroundDecoder(make_dataset(file, **cache).map(Endless(), version="1").rowstore.row_groups)
    decoder.begin()
    decoder._process.ready.wait()
    decoder._process.child.connection.send(0)
    end_as_told(connection)


def left_of(program: Any, file: Path, end: str, **options: Any) -> list[str]:
    """Run a program, and end it once it is ready. Return the commands of its descendants that outlive it."""
    ours, theirs = tiers.FORKSERVER.Pipe()
    with ours, theirs:
        trainer = tiers.start(partial(program, **options), theirs, file)
        theirs.close()
        assert ours.recv() == "ready"
        with descendants_of(trainer.pid) as survivors:
            if end == "os._exit":
                ours.send("end")
            else:
                trainer.kill() if end == "SIGKILL" else trainer.terminate()
            tiers.end(trainer)
            return survivors()


@pytest.mark.variants
@pytest.mark.parametrize("program", [loop, map_in_processes, decode_ahead])
def test_no_child_outlives_a_killed_training_process(tmp_path: Path, program: Any) -> None:
    options = {"multiprocessing_context": "fork"} if program is loop else {}
    assert left_of(program, file_of(tmp_path, 32 << 10), "SIGKILL", **options) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [16 << 10, 64 << 10, 256 << 10])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_no_worker_outlives_a_killed_training_process(tmp_path: Path, method: str, persistent: bool, size: int) -> None:
    options = {"multiprocessing_context": method, "persistent_workers": persistent}
    assert left_of(loop, file_of(tmp_path, size), "SIGKILL", **options) == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGTERM", "os._exit"])
def test_no_worker_outlives_a_training_process_that_ends_at_once(tmp_path: Path, end: str) -> None:
    assert left_of(loop, file_of(tmp_path, 64 << 10), end, multiprocessing_context="fork") == []


WITHOUT_PIDFD = """
import os, sys, threading
del os.pidfd_open
from dataload.runtime.child_process import end_with
end_with(int(sys.argv[1]))
threading.Event().wait(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("seconds", "status"), [(tiers.PATIENCE, 1), (0.1, 0)], ids=["ended", "running"])
def test_a_process_ends_with_one_that_ended_before_it_looked(seconds: float, status: int) -> None:
    """As on Linux before 5.3."""
    other = subprocess.Popen(["sleep", "0"])
    if status:
        other.wait()
    process = other.pid if status else os.getpid()
    run = [sys.executable, "-c", WITHOUT_PIDFD, str(process), str(seconds)]
    assert subprocess.run(run, timeout=tiers.PATIENCE / 2).returncode == status
    other.wait()


DAEMON = """
import os, torch
from dataload.train import evaluate_over
loader = torch.utils.data.DataLoader(torch.arange(8.0), 2, num_workers=1)
def mean():
    return evaluate_over(torch.nn.Identity(), loader, lambda model, batch: {"x": batch})["x"]
mean()
ended, parent = os.pipe()
if os.fork():
    os._exit(0)
os.close(parent)
os.read(ended, 1)
print(mean())
"""


@pytest.mark.slow
def test_workers_of_a_forked_process_end_with_it_and_not_with_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, timeout=tiers.PATIENCE / 2)
    assert (done.returncode, done.stdout) == (0, "3.5\n"), done.stderr

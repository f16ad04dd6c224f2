"""A loop may end in any way while the origin does not answer: the program exits soon and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until

from dataload import CacheConfig, make_dataset, make_loader
from dataload.benchmarks.origin import Origin
from dataload.cache.local import fsck
from dataload.cache.local.tier import LocalTier

ROWS, GROUPS = 10, 12

PROGRAM = """
import sys
import numpy as np
from dataload import CacheConfig, make_dataset, make_loader
from dataload.rows import scheduler

if __name__ == "__main__":
    options = {{"key": "a", "secret": "b", "endpoint_url": sys.argv[1]}}
    dataset = make_dataset("s3://bucket/data", storage_options=options, cache=CacheConfig(sys.argv[2], "1GB"))
    dataset.rowstore.gather(np.arange(10))  # caches the first row group
    if {filled}:
        scheduler.BACKGROUND_BYTES = 0
        dataset.rowstore.prefetch([0])
        dataset.rowstore.scheduler.decoder.begin()
        dataset.rowstore.scheduler.decoder._process.ready.wait()
    print("made", flush=True)
    sys.stdin.readline()
    loader = make_loader(dataset, 1, shuffle=False)
    batches = iter(loader)
    for number in range(5):
        next(batches)
    print("looping", flush=True)
    {end}
"""
ENDS = {
    "the end of the program": "pass",
    "no loader": "del batches, loader, dataset",
    "error": "raise RuntimeError",
    "interrupted": "[next(batches) for _ in range(100)]",
}


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    (tmp_path / "origin/bucket/data").mkdir(parents=True)
    noise = np.random.default_rng(0)
    with pq.ParquetWriter(tmp_path / "origin/bucket/data/x.parquet", pa.schema({"a": pa.binary()})) as writer:
        for _ in range(GROUPS):
            writer.write_table(pa.table({"a": pa.array([noise.bytes(60_000) for _ in range(ROWS)], pa.binary())}))
    with Origin(tmp_path / "origin") as origin:
        yield origin


@pytest.mark.variants
@pytest.mark.parametrize(
    ("end", "filled"),
    [
        *((end, False) for end in ENDS),
        pytest.param("no loader", True, marks=pytest.mark.slow),
        pytest.param("interrupted", True, marks=pytest.mark.slow),
    ],
)
def test_the_program_ends(origin: Origin, tmp_path: Path, end: str, filled: bool) -> None:
    program = PROGRAM.format(end=ENDS[end], filled=filled)
    command = [sys.executable, "-c", program, origin.endpoint_url, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as trainer:
        assert trainer.stdout.readline() == "made\n", trainer.stderr.read()
        started = psutil.Process(trainer.pid).children(recursive=True)
        assert len(started) == filled
        origin.behave(stalled=1.0)  # an hour per request
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "looping\n", trainer.stderr.read()
        if end == "interrupted":
            trainer.send_signal(signal.SIGINT)
        stderr = trainer.communicate(timeout=200)[1]
    assert trainer.returncode == {"error": 1, "interrupted": -signal.SIGINT}.get(end, 0)
    assert stderr.count("Error") + stderr.count("Interrupt") == (trainer.returncode != 0), stderr
    assert not [process for process in started if process.is_running()]


@pytest.mark.variants
@pytest.mark.parametrize(
    "arguments",
    [
        "stats_dir=folder",
        "num_workers=1, transform=dict",
        *(pytest.param(arguments, marks=pytest.mark.slow) for arguments in ("", "num_threads=0")),
    ],
)
def test_an_iterator_of_a_script_ends_without_a_message(tmp_path: Path, arguments: str) -> None:
    """The script's variables are cleared after the modules."""
    pq.write_table(pa.table({"a": np.arange(500)}), tmp_path / "x.parquet")
    program = f"""
import sys
import dataload
folder = sys.argv[1]
loader = dataload.make_loader(folder + "/x.parquet", 16, cache=False, {arguments})
it = iter(loader)
print(next(it)["a"].shape)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (0, "")
    if "stats_dir" in arguments:
        line = (tmp_path / "rank-0.jsonl").read_text()
        assert json.loads(line)["rows"] == 16


def ends_well_in_a_child(call: Callable[[], bool]) -> bool:
    """Return whether a call returns true in a forked child, which ends without the exit of a program."""
    child = os.fork()
    if child == 0:
        works = False
        try:
            signal.alarm(20)  # only a hang takes that long
            works = call()
        finally:
            os._exit(not works)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_threads": 0},
        {"num_workers": 1, "transform": dict},
        {"num_workers": 1, "transform": dict, "persistent_workers": True},
    ],
)
def test_a_forked_child_begins_its_own_iterator(tmp_path: Path, options: dict[str, Any]) -> None:
    pq.write_table(pa.table({"a": np.arange(500)}), tmp_path / "x.parquet")
    loader = make_loader(str(tmp_path / "x.parquet"), 16, cache=False, **options)
    batches = iter(loader)
    next(batches)

    def go_on() -> bool:
        with pytest.raises(RuntimeError, match="belongs to the process that began it: begin another one here"):
            next(batches)
        loader.set_epoch(0)
        return sum(len(batch["a"]) for batch in loader) == 500

    assert ends_well_in_a_child(go_on)
    assert sum(len(batch["a"]) for batch in batches) == 500 - 16


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_child_that_drops_a_loop_leaves_the_workers_to_its_parent(tmp_path: Path, *, persistent: bool) -> None:
    pq.write_table(pa.table({"a": np.arange(500)}), tmp_path / "x.parquet")
    options = {"num_workers": 1, "transform": dict, "persistent_workers": persistent, "timeout": 20}
    loader = make_loader(str(tmp_path / "x.parquet"), 16, cache=False, **options)
    loops = [(loader, iter(loader))]
    del loader
    next(loops[0][1])

    def drop() -> bool:
        loops.clear()
        return gc.collect() >= 0

    assert ends_well_in_a_child(drop)
    assert sum(len(batch["a"]) for batch in loops[0][1]) == 500 - 16


@pytest.mark.slow
def test_a_forked_child_that_exits_writes_no_statistics(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": np.arange(500)}), tmp_path / "x.parquet")
    program = """
import os, sys
from pathlib import Path
import dataload
folder = Path(sys.argv[1])
def statistics():
    return [path.read_text() for path in folder.glob("*.jsonl")]
loader = dataload.make_loader(str(folder / "x.parquet"), 16, cache=False, stats_dir=folder)
batches = iter(loader)
next(batches)
before = statistics()
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert statistics() == before
assert sum(len(batch["a"]) for batch in batches) == 500 - 16
assert statistics() != before
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (0, "")


def open_things() -> tuple[int, int, set[str]]:
    """Return the descriptors and threads of this process, and the files in shared memory."""
    descriptors, shared = (list(Path(folder).iterdir()) for folder in ("/proc/self/fd", "/dev/shm"))
    return len(descriptors), threading.active_count(), {path.name for path in shared}


def test_loops_cut_short_leave_nothing(origin: Origin, tmp_path: Path) -> None:
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    before: tuple[int, int, set[str]] | None = None
    for number in range(25):
        dataset = make_dataset("s3://bucket/data", storage_options=origin.storage_options, cache=cache)
        loader = make_loader(dataset, 4, seed=number)
        batches = iter(loader)
        for _ in range(number % 5):
            next(batches)
        if number % 3:
            with pytest.raises(ZeroDivisionError):
                batches.throw(ZeroDivisionError())
        del batches, loader, dataset
        gc.collect()
        if number == 10:  # things that are opened once are open by now
            before = open_things()
    assert before is not None
    descriptors, threads, shared = open_things()
    assert descriptors <= before[0] + 10
    assert threads <= before[1] + 30  # threads that are still ending
    until(lambda: not any(Path("/dev/shm", name).exists() for name in shared - before[2]))  # other tests use it, too
    until(lambda: not list((tmp_path / "cache/tmp").glob("*/*")))  # the ending threads hold the cache


def test_a_fill_that_the_exit_interrupts_leaves_no_row(tmp_path: Path) -> None:
    """The next process that opens the cache finds the file in tmp/ and drops its row."""
    program = """
import sys, threading
from dataload.cache.local.tier import LocalTier
from dataload.runtime.executor import DaemonExecutor
from dataload.cache.tier import BlobKey
filling = threading.Event()
def fill(allocate):
    allocate(100_000)
    filling.set()
    threading.Event().wait()
tier = LocalTier(sys.argv[1], 10**6)
threads = DaemonExecutor(1, "filling")
threads.submit(tier.get_or_fill, BlobKey("o", "x", "v", "all"), fill)
filling.wait()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "c")], check=True, timeout=200)
    tier = LocalTier(tmp_path / "c", 10**6)
    assert tier.folder.index.used_bytes() == 0
    assert fsck.verify(tier.folder).problems == []


def test_the_next_epoch_is_prefetched_before_it_begins(origin: Origin, tmp_path: Path, monkeypatch: Any) -> None:
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    dataset = make_dataset("s3://bucket/data", storage_options=origin.storage_options, cache=cache)
    loader = make_loader(dataset, 4, window=2)
    prefetched: list[int] = []
    prefetch = dataset.rowstore.prefetch
    monkeypatch.setattr(dataset.rowstore, "prefetch", lambda groups: (prefetched.extend(groups), prefetch(groups)))
    for _ in loader:
        pass
    first = [group for _, group in loader.sampler.needs_from(1, 0)]
    assert len(prefetched) > GROUPS
    assert prefetched[GROUPS:] == first[: len(prefetched) - GROUPS]


def test_an_iterator_collected_while_its_rows_are_looked_up_does_not_deadlock(origin: Origin, tmp_path: Path) -> None:
    """The garbage collector may close it in a thread that holds a lock for which the iterator's thread waits."""
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    dataset = make_dataset("s3://bucket/data", storage_options=origin.storage_options, cache=cache)
    batches = iter(make_loader(dataset, 4))
    next(batches)
    circle: list[Any] = [batches]
    circle.append(circle)
    del batches, circle
    with dataset.rowstore._mutex:
        gc.collect()
    assert sum(len(batch["a"]) for batch in make_loader(dataset, 4)) == ROWS * GROUPS

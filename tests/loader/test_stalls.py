"""A loop that waits too long for a batch is told in one line: which rank, for what, and who holds it up."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.benchmarks.origin import Origin
from dataload.telemetry import stalls
from dataload.telemetry.stalls import LoopWait

SOON = 0.05  # seconds of waiting after which a line is due

PROGRAM = """
import json, sys
from dataload import CacheConfig, make_dataset, make_loader
options, cache = json.loads(sys.argv[1]), CacheConfig(sys.argv[2], "1GB")
loader = make_loader(make_dataset("s3://bucket/data", storage_options=options, cache=cache), 10)
print("opened", flush=True)
sys.stdin.readline()
print(sum(len(batch["b"]) for batch in loader), flush=True)
"""


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    path = tmp_path / "origin"
    (path / "bucket/data").mkdir(parents=True)
    # A smaller file would be cached with its footer.
    table = pa.table({"b": np.arange(40), "c": [os.urandom(300) for _ in range(40)]})
    pq.write_table(table, path / "bucket/data/x.parquet")
    with Origin(path) as origin:
        yield origin


@pytest.fixture
def dataset(origin: Origin, tmp_path: Path) -> Any:
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    return make_dataset("s3://bucket/data", storage_options=origin.storage_options, cache=cache)


@contextmanager
def stopped(process: int) -> Iterator[Callable[[], None]]:
    """Stop a process, until the function that the block gets is called, or until the block ends."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield lambda: os.kill(process, signal.SIGCONT)
    finally:
        os.kill(process, signal.SIGCONT)


class Looping:
    """A loop in a thread."""

    def __init__(self, loader: Any) -> None:
        self.rows = 0
        self._loader = loader
        self.thread = threading.Thread(target=self._loop)
        self.thread.start()

    def _loop(self) -> None:
        for batch in self._loader:
            self.rows += len(batch["b"])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [each.getMessage() for each in caplog.records if each.name == stalls.__name__]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoopWait]]:
    """The looks at loops so far."""
    found, look = list[LoopWait](), LoopWait.look

    def noted(wait: LoopWait) -> None:
        look(wait)
        found.append(wait)

    monkeypatch.setattr(LoopWait, "look", noted)
    yield found


@pytest.mark.variants
@pytest.mark.parametrize("num_threads", [None, 0])
def test_a_blocked_origin_is_told_once(
    dataset: Any, origin: Origin, lines: Any, looks: list[LoopWait], num_threads: int | None
) -> None:
    options: dict[str, Any] = {} if num_threads is None else {"num_threads": 0, "transform": dict}
    loader = make_loader(dataset, 10, stall_warning=SOON, world=World(1, 2), **options)
    with stopped(origin.pid) as go_on:
        loop = Looping(loader)
        until(lines)
        seen = len(looks)
        until(lambda: len(looks) > seen + 2)
        go_on()
        loop.thread.join()
    [line] = lines()
    assert re.fullmatch(
        r"rank 1 of 2 has waited \d+ s for its next batch, on origin \(fetching\): "
        r"s3://bucket/data/x\.parquet row group 0, [1-9]\d* of \d+ requests in flight",
        line,
    )
    assert loop.rows == 20


def test_a_loop_that_waits_less_is_not_told(dataset: Any, origin: Origin, lines: Any, looks: list[LoopWait]) -> None:
    with stopped(origin.pid) as go_on:
        loops = [
            Looping(make_loader(dataset, 10, world=World(0, 2), **options))
            for options in ({}, {"stall_warning": math.inf})
        ]
        until(lambda: len(set(looks)) == 2 and len(looks) > 4)
        go_on()
        for loop in loops:
            loop.thread.join()
    assert not lines()


class Held:
    """A transform that waits for a file before each batch but the first, for which the rows are read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.batches = 0

    def __call__(self, batch: Any) -> Any:
        self.batches += 1
        if self.batches > 1:
            until(self.file.exists)
        return batch


@pytest.mark.variants
@pytest.mark.parametrize("options", [{}, {"num_threads": 3}, {"num_threads": 0}])
def test_a_transform_that_hangs_is_named(dataset: Any, tmp_path: Path, lines: Any, options: Any) -> None:
    loop = Looping(make_loader(dataset, 10, stall_warning=SOON, transform=Held(tmp_path / "go"), **options))
    until(lambda: any(line.endswith(", on transform") for line in lines()))
    (tmp_path / "go").touch()
    loop.thread.join()
    assert loop.rows == 40


def test_workers_that_hang_are_named(dataset: Any, tmp_path: Path, lines: Any) -> None:
    list(make_loader(dataset, 10))  # The cache has the rows.
    loop = Looping(make_loader(dataset, 10, stall_warning=SOON, transform=Held(tmp_path / "go"), num_workers=2))
    until(lines)
    (tmp_path / "go").touch()
    loop.thread.join()
    assert "rank 0 of 1 has waited" in lines()[0]
    assert lines()[0].endswith(", on 2 workers")


@pytest.mark.slow
def test_the_process_that_makes_the_rows_is_named(dataset: Any, origin: Origin, tmp_path: Path, lines: Any) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(origin.storage_options), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "opened\n"
        with stopped(origin.pid) as go_on:
            print(file=other.stdin, flush=True)
            cache = dataset.rowstore.row_groups.of(0)[0]
            until(lambda: cache.holder(0))
            loop = Looping(make_loader(dataset, 10, stall_warning=SOON))
            until(lines)
            go_on()
            loop.thread.join()
        assert other.stdout.readline() == "40\n"
        assert f" on process {other.pid}, which makes " in lines()[0]
        assert "x.parquet row group 0" in lines()[0]


def test_a_look_that_fails_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    def describe(seconds: float) -> str:
        raise KeyError(seconds)

    wait = LoopWait(0.0, describe)
    wait.since = 1e-9
    with caplog.at_level(logging.WARNING):
        wait.look()
    assert "KeyError" in caplog.text

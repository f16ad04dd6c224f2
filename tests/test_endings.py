"""However a loop ends while the origin does not answer: the program ends, soon, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload.benchmarks.origin import Origin

ROWS, GROUPS = 10, 12

PROGRAM = """
import sys
import numpy as np
from dataload import CacheConfig, make_dataset, make_loader, rowstore

if __name__ == "__main__":
    options = {{"key": "a", "secret": "b", "endpoint_url": sys.argv[1]}}
    dataset = make_dataset("s3://bucket/data", storage_options=options, cache=CacheConfig(sys.argv[2], "1GB"))
    dataset.rowstore.gather(np.arange(10))  # the first row group is kept
    if {filled}:
        rowstore.FILLED_BYTES = 0
        dataset.rowstore.prefetch([0])
        dataset.rowstore._filler.make(0)
        dataset.rowstore._filler._process.ready.wait()
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
    "break": "del batches",
    "no loader": "del batches, loader, dataset",
    "error": "raise RuntimeError",
    "exit": "sys.exit(0)",
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


@pytest.mark.parametrize(
    ("end", "filled"), [*((end, False) for end in ENDS), ("no loader", True), ("interrupted", True)]
)
def test_the_program_ends(origin: Origin, tmp_path: Path, end: str, filled: bool) -> None:
    program = PROGRAM.format(end=ENDS[end], filled=filled)
    command = [sys.executable, "-c", program, origin.endpoint_url, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as trainer:
        assert trainer.stdout.readline() == "made\n", trainer.stderr.read()
        started = psutil.Process(trainer.pid).children(recursive=True)
        assert len(started) == filled
        origin.behave(stalled=1.0)  # for an hour
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "looping\n", trainer.stderr.read()
        if end == "interrupted":
            trainer.send_signal(signal.SIGINT)
        said = trainer.communicate(timeout=15)[1]
    assert trainer.returncode == {"error": 1, "interrupted": -signal.SIGINT}.get(end, 0)
    assert said.count("Error") + said.count("Interrupt") == (trainer.returncode != 0), said
    assert not [process for process in started if process.is_running()]

"""The benchmark of cold epochs: one small epoch of each system, and the share of busy connections."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dataload.benchmarks.cold.epoch import Task
from dataload.benchmarks.cold.first_batch import needed
from dataload.benchmarks.cold.measurement import IN_FLIGHT, bound, busy
from dataload.benchmarks.cold.shapes import write
from dataload.benchmarks.origin import Origin


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ([(0.0, IN_FLIGHT), (10.0, 0)], 1.0),
        ([(0.0, IN_FLIGHT), (5.25, IN_FLIGHT // 2), (10.0, 0)], 0.75),  # It counts from 0.5 to 10 s.
        ([(0.0, 1), (0.5, 2 * IN_FLIGHT), (10.0, 0)], 1.0),  # More than `IN_FLIGHT` requests count as that many.
        ([(0.0, 0), (0.4, 0)], math.nan),  # too short to tell
        ([], math.nan),
    ],
)
def test_busy_connections(changes: list[tuple[float, int]], share: float) -> None:
    assert busy(changes, 0.0) == pytest.approx(share, nan_ok=True)


def test_the_last_two_latencies_do_not_count() -> None:
    assert busy([(0.0, IN_FLIGHT), (8.0, 0), (10.0, 0)], latency=1.0) == pytest.approx(1.0)


def test_the_wire_bounds_only_systems_with_requests() -> None:
    processors = len(os.sched_getaffinity(0))
    found = {
        "bare GETs": {"seconds": 5.0, "cpu": 1.0, "origin_cpu": 1.0, "requests": 8.0},
        "dataload": {"seconds": 9.0, "cpu": 1.0, "origin_cpu": 1.0, "requests": 8.0},
        "dataload, local files": {"seconds": 3.0, "cpu": 2.0, "origin_cpu": 0.0, "requests": 0.0},
    }
    assert bound(found, "dataload") == 5.0
    assert bound(found, "dataload, local files") == 2.0 / processors


def test_the_first_batch_needs_the_row_groups_of_its_rows(tmp_path: Path) -> None:
    files = tmp_path / "bench" / "x"
    write("numbers", 72_000, 720_000, files)  # 1,000 rows of 18 numbers in a row group
    with Origin(tmp_path) as origin:
        task = Task(origin.endpoint_url, "x", str(files), 256)
        [(name, start, stop)] = needed(task, origin)
        assert (files / name).stat().st_size > stop - start > 72_000
        assert start >= 4, "after the magic bytes"
        assert len(needed(replace(task, batch_size=1500), origin)) == 3, "a window of one row group, then one of two"


@pytest.mark.slow
def test_a_measurement_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dataload.benchmarks.cold", "--shape", "numbers", "--group", "1"]
    options = ["--origin", "unlimited", "--system", "missing", "--system", "bare GETs", "--megabytes", "1"]
    ended = subprocess.run(
        [*command, *options, "--rounds", "1", "--folder", str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "| missing | RuntimeError('missing failed with exit status 1') |" in ended.stdout
    assert "| numbers | 1 | unlimited | bare GETs | " in ended.stdout


@pytest.mark.slow
def test_every_system_reads_all_rows(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dataload.benchmarks.cold",
        "--shape",
        "numbers",
        "--group",
        "1",
        "--origin",
        "unlimited",
    ]
    options = ["--megabytes", "4", "--rounds", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]
    options += ["--cache-share", "2"]
    shown = subprocess.run([*command, *options], check=True, capture_output=True, text=True, timeout=200).stdout
    assert "–" in shown  # in flight, of the systems without requests
    assert "nan" not in shown
    found = {entry["system"]: entry["runs"][0] for entry in json.loads((tmp_path / "found.json").read_text())}
    assert found.keys() == {"dataload", "dataload, local files", "pyarrow", "bare GETs", "bare decode"}
    assert found["dataload"]["rows"] == found["pyarrow"]["rows"] > 0
    assert found["dataload"]["bytes"] <= 1.02  # the data and the ends of files with their footers
    assert found["dataload"]["duplicates"] == 0
    cells = [line.split(" | ") for line in shown.splitlines() if line.startswith("| numbers")]
    [first] = [cell for cell in cells if cell[3] == "dataload"]
    assert float(first[5]) > 0 < float(first[6]), "the first batch and its bar"

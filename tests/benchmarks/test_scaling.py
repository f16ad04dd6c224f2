"""The programs that measure how epochs scale with cores, ranks and devices run on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataload.benchmarks import forecast

pytestmark = pytest.mark.slow


def run(program: str, *words: str) -> list[str]:
    command = [sys.executable, "-m", f"dataload.benchmarks.{program}", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def test_scaling_reads_by_each_number_of_cores_and_ranks(tmp_path: Path) -> None:
    _, *lines = map(json.loads, run("scaling", "--shape=images", "--megabytes=20", f"--folder={tmp_path}", "--json"))
    assert {1, len(os.sched_getaffinity(0))} <= {line["cores"] for line in lines}
    assert {line["ranks"] for line in lines} >= {1}
    assert all(line["cold"] > 0 and line["warm"] > 0 and 0 <= line["cold_lock"] <= 1 for line in lines)


def test_each_way_to_use_several_devices_trains() -> None:
    [line] = run("parallelism", "--json")
    rows = {row["way"]: row for row in json.loads(line)["rows"]}
    assert {"one device", "DataParallel", "DDP", "DDP, bf16"} <= rows.keys()
    assert all(row["seconds"] > 0 and row["memory"] > 0 for row in rows.values())


def test_a_forecast_stands_beside_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "SETTINGS", [forecast.Setting("images", 1, 1, 5, 2, 0.5, 2)])
    monkeypatch.setattr(forecast, "CLOSE", 9.0)
    forecast.main(megabytes=10, folder=tmp_path, output=tmp_path / "found.json")
    [found] = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["busy"] < 1
    assert 0 < found["forecast"] < 1

"""A forecast says how busy a job keeps its accelerators, and what would help most."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dataload.cli.app import app
from dataload.planning.forecast import CONNECTION, ROUND_TRIPS, Host, Job, forecast, with_change
from dataload.planning.simulate import Epoch, Fetched, Request

ROWS, GROUPS, MEGABYTES = 10_000, 100, 10
FAST = Host(
    cores=64, start_seconds=2.0, cpu_seconds_per_gb=1e-3, rows_per_second=1e9, gbps=1e4, latency_ms=0.0
)  # what is not measured takes no time
JOB = Job(accelerators=4, nodes=1, step_ms=10.0, steps=100, rows=ROWS, epochs=1, host=FAST)  # computes 1 s an epoch
COLD = Epoch(
    tuple(Request(0, group * ROWS // GROUPS, Fetched(MEGABYTES * 10**6, 1)) for group in range(GROUPS))
)  # 1 GB, requested at once
LITTLE = Epoch((Request(0, 0, Fetched(10**6, 1)),))


def test_a_warm_job_loses_its_start_only() -> None:
    found = forecast([Epoch()] * 10, JOB)
    assert found.seconds == pytest.approx(12.0, abs=1e-3)
    assert found.busy_share == pytest.approx(10 / 12, rel=1e-3)
    assert found.epoch_seconds == pytest.approx([3.0, *[1.0] * 9], abs=1e-3)


@pytest.mark.parametrize(
    ("slow", "seconds"),
    [
        ({"gbps": 0.8}, 10.0),  # 1 GB of 0.1 GB/s
        ({"cpu_seconds_per_gb": 20.0, "cores": 2}, 10.0),
        ({"rows_per_second": 250}, 10.0),  # of each of four ranks
        ({"rows_per_second": 250, "cores": 2}, 20.0),
    ],
)
def test_the_slowest_part_sets_the_pace(slow: dict[str, float], seconds: float) -> None:
    found = forecast([COLD], replace(JOB, host=replace(FAST, **slow)))
    assert found.seconds - found.first_batch_seconds == pytest.approx(seconds, rel=0.02)


def test_latency_delays_the_first_batch() -> None:
    found = forecast([COLD], replace(JOB, host=replace(FAST, latency_ms=500.0)))
    alone = MEGABYTES * 1e6 / CONNECTION
    assert found.first_batch_seconds == pytest.approx(2.0 + 0.5 * ROUND_TRIPS + 0.5 + alone, rel=0.01)


def test_a_step_waits_for_all_of_its_rows() -> None:
    """The last row of the first step lies in a row group that takes 10 s."""
    late = Epoch((Request(0, 99, Fetched(10**9, 100)),))
    found = forecast([late], replace(JOB, host=replace(FAST, gbps=0.8)))
    assert found.first_batch_seconds == pytest.approx(12.0, rel=0.01)


@pytest.mark.parametrize(
    ("slow", "epochs", "says"),
    [
        ({"gbps": 0.8}, [COLD, LITTLE], "1.6 Gbit/s"),
        ({"cpu_seconds_per_gb": 20.0, "cores": 2}, [COLD, LITTLE], "4 cores"),
        ({"gbps": 0.8, "cpu_seconds_per_gb": 20.0, "cores": 2}, [COLD], "warm before"),
        ({"gbps": 0.1}, [COLD] * 10, "holds everything (cache_bytes='2GB')"),
        ({}, [Epoch(), Epoch()], ""),
    ],
)
def test_the_change_that_helps_most(slow: dict[str, float], epochs: list[Epoch], says: str) -> None:
    job = replace(JOB, host=replace(FAST, **slow))
    before = forecast(epochs, job)
    found = with_change(before, epochs, job, "2GB")
    assert says in found.change
    assert bool(says) == bool(found.change)
    assert (found.changed_busy_share is None) == (not says)
    assert says == "" or found.changed_busy_share > before.busy_share  # type: ignore[operator]


@given(st.floats(1.0, 4.0), st.sampled_from(["gbps", "rows_per_second"]), st.floats(0.01, 100), st.floats(1, 1e4))
def test_a_faster_host_is_never_less_busy(factor: float, part: str, gbps: float, rows: float) -> None:
    host = replace(FAST, gbps=gbps, rows_per_second=rows, cpu_seconds_per_gb=3.0, latency_ms=30.0)
    job = replace(JOB, host=host)
    faster = replace(job, host=replace(host, **{part: factor * getattr(host, part)}))
    assert forecast([COLD] * 2, faster).busy_share >= forecast([COLD] * 2, job).busy_share * (1 - 1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    table = pa.table({"x": np.random.default_rng(0).random(1 << 20)})
    pq.write_table(table, folder / "x.parquet", row_group_size=1 << 17, use_dictionary=False)
    return folder


def run(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_plan_forecasts_a_job_on_a_measured_host(folder: Path, tmp_path: Path) -> None:
    measured = tmp_path / "host.json"
    measured.write_text(json.dumps(vars(replace(FAST, gbps=0.8))))
    job = ("--accelerators", 4, "--step-ms", 100, "--batch-size", 1 << 15, "--epochs", 10, "--measured", measured)
    words = ("plan", folder, "--cache-dir", tmp_path / "c", *job, "--price-gb", 1000, "--price-get", 0)
    found = run(*words)
    of_all = found["forecast"]
    assert len(of_all["epochs"]) == 10
    assert of_all["epochs"][0] == found["first_epoch"]
    assert of_all["epochs"][1:] == [{"bytes": 0, "requests": 0}] * 9
    assert of_all["cost"] == pytest.approx((found["first_epoch"]["bytes"] + found["footers"]["bytes"]) / 1e6)
    # 8 steps of 0.1 s an epoch; the first waits for the row groups of its rows at 0.1 GB/s
    assert of_all["busy_share"] == pytest.approx(8.0 / of_all["seconds"])
    assert of_all["seconds"] == pytest.approx(2.0 + 8.0, abs=0.2)
    slow = run(*words, "--gbps", 8e-3)["forecast"]
    assert slow["seconds"] == pytest.approx(2.0 + found["first_epoch"]["bytes"] / 1e6 + 9 * 0.8, rel=0.1)


def test_half_a_cache_fetches_in_each_epoch(folder: Path, tmp_path: Path) -> None:
    limit = "5MB"
    job = ("--accelerators", 1, "--step-ms", 1, "--batch-size", 1 << 12, "--epochs", 6, "--window", 1)
    found = run("plan", folder, "--cache-dir", tmp_path / "c", "--cache-bytes", limit, *job)
    assert [each["bytes"] for each in found["forecast"]["epochs"][:4]] == [
        each["bytes"] for each in [found["first_epoch"], *found["later_epochs"]]
    ]
    assert found["forecast"]["epochs"][4:] == [found["forecast"]["epochs"][3]] * 2
    assert found["forecast"]["epochs"][3]["bytes"] > 0


@pytest.mark.slow
def test_doctor_measures_what_a_plan_needs(folder: Path, tmp_path: Path) -> None:
    cache, host = tmp_path / "c", tmp_path / "host.json"
    found = run("doctor", folder, "--measure", host, "--cache-dir", cache, "--batch-size", 64)
    assert found["measured"] == json.loads(host.read_text())
    assert all(value > 0 for value in found["measured"].values())
    assert not list(tmp_path.glob("**/measure-*"))
    job = ("--accelerators", 1, "--step-ms", 10, "--measured", host)
    assert 0 < run("plan", folder, "--cache-dir", cache, *job)["forecast"]["busy_share"] < 1


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", json.dumps({**vars(FAST), "gbps": 0})])
def test_a_file_that_measures_no_host_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "host.json").write_text(text)
    job = ("--accelerators", 1, "--step-ms", 10, "--measured", tmp_path / "host.json")
    done = CliRunner().invoke(app, [*map(str, ("plan", folder, "--cache-dir", tmp_path / "c", *job))])
    assert done.exit_code != 0
    assert f"--measured={tmp_path / 'host.json'}" in str(done.exception)


def test_a_dataset_without_rows_has_no_forecast(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.float64())}), tmp_path / "x.parquet")
    job = ("--accelerators", 1, "--step-ms", 10)
    assert run("plan", tmp_path / "x.parquet", "--cache-dir", tmp_path / "c", *job)["forecast"] is None

"""A run measures every system in real ranks, survives systems that fail, and keeps its results as it goes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from dataload.benchmarks.machine.usage import PeakMemory
from dataload.benchmarks.suite import datasets, measurement
from dataload.benchmarks.suite import host as host_module
from dataload.benchmarks.suite.host import Host
from dataload.benchmarks.suite.suite import COLD, Suite
from dataload.benchmarks.systems.convert import made_of
from dataload.benchmarks.systems.registry import named

Result = dict[str, Any]


def suite_of(
    folder: Path, *names: str, ranks: tuple[int, ...] = (1,), peers_python: Path | None = None, seconds: float = inf
) -> Suite:
    place = datasets.Place("tiny", folder, peers_python, seconds)
    return Suite(place, ("images",), (10,), tuple(map(named, names)), ranks, 1, "unlimited", epoch_seconds=0.0)


def results_of(suite: Suite) -> Result:
    results: Result = {}
    suite.run(results, lambda _: None, lambda _: None)
    return results


def program(folder: Path, text: str) -> Path:
    """Return an executable that runs a shell script instead of a peers' Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o700)
    return python


@pytest.mark.slow
def test_ranks_of_a_host_read_the_dataset_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "FEED_TRIES", 1)
    kept: list[str] = []
    extended: list[float] = []
    extend = Host.extend

    def noted(host: Host, seconds: float) -> None:
        extended.append(seconds)
        extend(host, seconds)

    monkeypatch.setattr(Host, "extend", noted)
    results: Result = {}
    suite = suite_of(tmp_path, "dataload", "floor: gather", ranks=(1, 2))
    suite.run(results, lambda _: None, lambda found: kept.append(json.dumps(found)))
    alone, gather, both = results["runs"]
    assert [run["error"] for run in results["runs"]] == ["", "", ""]
    assert [run["problems"] for run in results["runs"]] == [[], [], []]
    assert (alone["ranks"], both["ranks"], gather["system"]) == (1, 2, "floor: gather")
    dataset = results["datasets"]["images"]
    for run in (alone, both):
        assert len(run["epochs"]) == measurement.LEAST_EPOCHS
        assert all(epoch["rows"] == dataset["rows"] for epoch in run["epochs"])
        assert dataset["parquet_bytes"] <= run["origin_bytes"][-1] <= 1.1 * dataset["parquet_bytes"]
    assert both["peak_bytes"] > alone["peak_bytes"] > 10_000_000
    firsts = [run["epochs"][0]["seconds"] for run in (alone, gather, both)]
    assert {measurement.LEAST_EPOCHS * seconds for seconds in firsts} < set(extended)  # and one by its later epochs
    assert [feed["phase"] for feed in results["feeds"]] == ["warm", "cold"]
    assert all(0 <= each["utilization"] <= 1 for feed in results["feeds"] for each in feed["tries"])
    assert len(kept) == 4  # after each run and the cold feed
    assert json.loads(kept[-1])["runs"] == json.loads(json.dumps(results["runs"]))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.slow
def test_no_memory_is_sampled_while_accelerators_are_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample holds up a process that maps many files. One may be under way when an epoch begins."""
    asked: list[Host] = []
    begun: list[bool] = []
    ask, sample = Host._ask, PeakMemory.sample

    def noted(host: Host, epoch: Result) -> None:
        asked.append(host)
        ask(host, epoch)

    def sampled(memory: PeakMemory, processes: Any) -> None:
        begun.append(any(host._emulates for host in asked if host.memory is memory))
        sample(memory, processes)

    monkeypatch.setattr(Host, "_ask", noted)
    monkeypatch.setattr(PeakMemory, "sample", sampled)
    monkeypatch.setattr(host_module, "SAMPLE_SECONDS", 0.001)
    suite_of(tmp_path, "dataload", ranks=(1,)).run({}, lambda _: None, lambda _: None)
    assert begun.count(False) > len(asked)
    assert begun.count(True) <= len(asked)


def test_a_stage_of_more_ranks_has_no_floors(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, "dataload", "floor: gather", ranks=(1, 4))
    assert list(suite._stages()) == ["1", COLD, "4"]
    assert [entry.name for entry in suite._turn(0, "4")] == ["dataload"]
    assert [entry.name for entry in suite._turn(1, "1")] == ["floor: gather", "dataload"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -9 $$", "ended with -9: no output"),
        pytest.param("echo no such thing >&2; exit 1", "ended with 1: no such thing", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_dies_is_reported_and_the_others_are_measured(
    script: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "FEED_TRIES", 1)
    names = ["Hugging Face, streaming", "LitData", "floor: gather"]
    results = results_of(suite_of(tmp_path, *names, peers_python=program(tmp_path, script)))
    errors = {run["system"]: run["error"] for run in results["runs"]}
    assert errors == {
        "Hugging Face, streaming": error,
        "LitData": f"not converted: {error.partition(': ')[2]}",
        "floor: gather": "",
    }
    assert {feed["error"] for feed in results["feeds"]} == set(errors.values()) - {""}


@pytest.mark.slow
def test_an_error_inside_a_rank_is_told_in_its_words(tmp_path: Path) -> None:
    python = program(tmp_path, f'exec {sys.executable} -c "import torch, sys; sys.modules[\'datasets\'] = None\n'
                     'from dataload.benchmarks.suite.rank import main; main()"')  # fmt: skip
    [run] = results_of(suite_of(tmp_path, "Hugging Face, streaming", peers_python=python))["runs"]
    assert run["error"].startswith("ModuleNotFoundError: import of datasets halted")


def test_a_system_without_time_is_not_called_slow(tmp_path: Path) -> None:
    python = program(tmp_path, "exec sleep 1000")
    [run] = results_of(suite_of(tmp_path, "Hugging Face, streaming", peers_python=python, seconds=6))["runs"]
    assert run["error"] == "not run: the limit of 0.1 minutes was reached"


def test_a_peer_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "PATIENCE_SECONDS", 0.1)
    python = program(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    [run] = results_of(suite_of(tmp_path, "Hugging Face, streaming", peers_python=python))["runs"]
    assert run["error"] == "no answer within 0 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_missing_environment_is_reported(tmp_path: Path) -> None:
    [run] = results_of(suite_of(tmp_path, "LitData"))["runs"]
    assert run["error"] == "not run: its environment does not exist (make peers)"


def test_when_the_time_is_over_the_rest_is_not_run(tmp_path: Path) -> None:
    results = results_of(suite_of(tmp_path, "dataload", seconds=0))
    error = "not run: the limit of 0 minutes was reached"
    assert [each["error"] for each in [*results["runs"], *results["feeds"]]] == [error] * 3


def test_a_conversion_that_takes_too_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "CONVERSION_SECONDS", 0.1)
    [run] = results_of(suite_of(tmp_path, "LitData", peers_python=program(tmp_path, "exec sleep 1000")))["runs"]
    assert run["error"] == "not converted: not done within 0 s"


def test_a_published_run_converts_again(tmp_path: Path) -> None:
    peers = program(tmp_path, f'echo "$@" >> {tmp_path}/log; exit 1')
    suite = suite_of(tmp_path, "LitData", peers_python=peers)
    results_of(suite)
    parquet = next(tmp_path.rglob("parquet.json"))
    price = {"seconds": 1.0, "made_of": made_of(named("LitData"), parquet.with_suffix(""))}
    parquet.with_name("litdata.json").write_text(json.dumps(price))
    for again, conversions in ((False, 1), (True, 2)):
        results_of(replace(suite, place=replace(suite.place, converts_again=again)))
        assert (tmp_path / "log").read_text().count("systems.convert") == conversions

"""A run measures every system in real ranks, survives systems that fail, and goes on where it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataload.benchmarks import run as program
from dataload.benchmarks.machine.hot_memory import HotMemory
from dataload.benchmarks.suite import datasets, measurement, suite
from dataload.benchmarks.suite.datasets import Place
from dataload.benchmarks.suite.measurement import EPOCHS
from dataload.benchmarks.suite.results import Run
from dataload.benchmarks.suite.suite import Suite
from dataload.benchmarks.systems.registry import named
from dataload.errors import ConfigError

Result = dict[str, Any]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Iterator[HotMemory]:
    with HotMemory(tmp_path, pause=0, control_bytes=1 << 20, least=0) as kept:
        yield kept


@pytest.fixture
def measure(tmp_path: Path, memory: HotMemory) -> Callable[..., Result]:
    """Return a function that measures systems on tiny images, and goes on with earlier results."""

    def measured(
        *names: str, results: Result | None = None, keep: Callable[[Result], object] = lambda _: None, **changed: Any
    ) -> Result:
        results = results or {"datasets": {}, "runs": [], "speed": []}
        chosen = {"ranks": (1,), "rounds": 1, "groups": (10.0,), "peers_python": None} | changed
        place = Place("tiny", tmp_path, chosen.pop("peers_python"))
        Suite(place, ("images",), entries=tuple(map(named, names)), **chosen).run(results, memory, lambda _: None, keep)
        return results

    return measured


def script(folder: Path, text: str) -> Path:
    """Return an executable that runs a shell script instead of a peers' Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o700)
    return python


@pytest.mark.slow
def test_ranks_of_a_host_read_the_dataset_together(measure: Callable[..., Result], tmp_path: Path) -> None:
    results = measure("dataload", "local files", "the wire", ranks=(1, 2))
    runs = {(run["system"], run["ranks"]): run for run in results["runs"]}
    assert len(runs) == 6
    dataset = results["datasets"]["images, 10 MB"]
    for run in runs.values():
        assert (run["error"], run["problems"], run["stopped_after"]) == ("", [], None)
        assert len(run["epochs"]) == EPOCHS
        assert all(epoch["rows"] == dataset["rows"] for epoch in run["epochs"])
        ends = [0, run["import_seconds"], *(epoch["seconds"] for epoch in run["epochs"])]
        assert ends == sorted(ends)
        assert ends[-1] > EPOCHS * dataset["epoch_seconds"]
    for ranks in (1, 2):
        assert dataset["parquet_bytes"] <= runs["dataload", ranks]["origin_bytes"][-1] <= 1.1 * dataset["parquet_bytes"]
        assert runs["the wire", ranks]["origin_bytes"][-1] == EPOCHS * dataset["parquet_bytes"]
    assert runs["dataload", 2]["peak_bytes"] > runs["dataload", 1]["peak_bytes"] > 10_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error"), [("kill -9 $$", "ended with -9: no output"), ("echo none >&2; exit 1", "ended with 1: none")]
)
def test_a_peer_that_dies_is_reported_and_the_others_are_measured(
    text: str, error: str, measure: Callable[..., Result], tmp_path: Path
) -> None:
    results = measure("Hugging Face, streaming", "LitData", "the wire", peers_python=script(tmp_path, text))
    assert {run["system"]: run["error"] for run in results["runs"]} == {
        "Hugging Face, streaming": error,
        "LitData": f"not converted: {error.partition(': ')[2]}",
        "the wire": "",
    }


@pytest.mark.slow
def test_an_error_inside_a_rank_is_told_in_its_words(measure: Callable[..., Result], tmp_path: Path) -> None:
    python = script(tmp_path, f'exec {sys.executable} -c "import torch, sys; sys.modules[\'datasets\'] = None\n'
                    'from dataload.benchmarks.suite.rank import main; main()"')  # fmt: skip
    [run] = measure("Hugging Face, streaming", peers_python=python)["runs"]
    assert run["error"].startswith("ModuleNotFoundError: import of datasets halted")


@pytest.mark.slow
def test_a_job_beyond_the_limit_is_killed(
    measure: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "LEAST_LIMIT_SECONDS", 0.1)
    python = script(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    [run] = measure("Hugging Face, streaming", peers_python=python)["runs"]
    assert (run["error"], run["epochs"]) == ("", [])
    assert run["stopped_after"] >= 0.1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_conversion_beyond_its_limit_counts_with_it(
    measure: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "CONVERSION_SECONDS", 0.1)
    monkeypatch.setattr(datasets, "CONVERSION_SECONDS", 0.1)
    [run] = measure("LitData", peers_python=script(tmp_path, "exec sleep 1000"))["runs"]
    assert (run["error"], run["conversion_seconds"], run["stopped_after"]) == ("", 0.1, 0.0)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Replace the jobs of a suite. Return the list of those that have run: system, ranks and round."""
    ran: list[tuple[str, int, int]] = []

    def run(self: measurement.Measurement, _: object) -> Run:
        ran.append((self.entry.name, self.ranks, self.round))
        error = "no such thing" if len(ran) == 1 else ""
        return Run(self.dataset.name, self.entry.name, self.ranks, self.round, error=error)

    monkeypatch.setattr(measurement.Measurement, "run", run)
    monkeypatch.setattr(suite, "speed", lambda _: {})
    return ran


def test_systems_take_turns(measure: Callable[..., Result], jobs: list[tuple[str, int, int]]) -> None:
    measure("dataload", "pyarrow", rounds=2, ranks=(1, 4))
    assert jobs == [
        *(("dataload", 1, 0), ("pyarrow", 1, 0), ("pyarrow", 4, 0), ("dataload", 4, 0)),
        *(("dataload", 1, 1), ("pyarrow", 1, 1), ("pyarrow", 4, 1), ("dataload", 4, 1)),
    ]


def test_only_what_the_results_lack_is_measured(
    measure: Callable[..., Result], jobs: list[tuple[str, int, int]]
) -> None:
    kept: list[str] = []
    earlier = measure("dataload", "pyarrow", keep=lambda found: kept.append(json.dumps(found)))
    assert [len(json.loads(each)["runs"]) for each in kept] == [1, 2]  # each result is kept at once
    measure("pyarrow", results=earlier)
    assert [run["error"] for run in earlier["runs"]] == ["no such thing", ""]  # a failure stays until it runs again
    jobs[1:] = []
    results = measure("dataload", "pyarrow", "the wire", results=json.loads(json.dumps(earlier)), groups=(10, 128))
    assert jobs[1:] == [  # the job that failed, a new system, and a new dataset
        *(("dataload", 1, 0), ("the wire", 1, 0)),
        *(("pyarrow", 1, 0), ("the wire", 1, 0), ("dataload", 1, 0)),
    ]
    assert not any(run["error"] for run in results["runs"])


def test_results_survive_a_write_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program._save({"runs": [1]}, tmp_path / "latest")
    write = Path.write_text

    def half(path: Path, text: str) -> int:
        write(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        program._save({"runs": [1, 2]}, tmp_path / "latest")
    assert json.loads((tmp_path / "latest.json").read_text()) == {"runs": [1]}


CONDITIONS = {
    "size": "tiny", "origin": {"latency": 1}, "commit": "abc1234", "host": "a", "machine": {"cores": 2},
    "versions": {"torch": "2", "Python": "3"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"size": "full"}, "the size of .* is full, and now tiny"),
        ({"commit": "def5678"}, "the commit of .* is def5678, and now abc1234"),
        ({"host": "b"}, "the host of"),
        ({"machine": {"cores": 4}}, "the machine of"),
        ({"origin": {"latency": 2}}, "the origin of"),
        ({"versions": {"torch": "1"}}, "the version of torch of .* is 1, and now 2"),
    ],
)
def test_results_of_other_conditions_are_refused(changed: Result, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--continue: {told}"):
        program._check_same(CONDITIONS | changed, CONDITIONS, tmp_path / "latest")


def test_an_environment_may_come_between_two_stages(tmp_path: Path) -> None:
    program._check_same(CONDITIONS | {"versions": {"torch": "2"}}, CONDITIONS, tmp_path / "latest")


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    words = ["--size", "tiny", "--workloads", "images", "--groups", "10", "--ranks", "1", "--json"]
    words += ["--systems", "dataload,wire", "--folder", str(tmp_path / "data"), "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "dataload", "bench", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith("images, 10 MB, dataload"):
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL
    [first] = json.loads((tmp_path / "results/partial.json").read_text())["runs"]
    done = subprocess.run([*command, "--continue"], capture_output=True, text=True, check=True)
    runs = json.loads(done.stdout)["runs"]
    assert [run["system"] for run in runs] == ["dataload", "the wire"]
    assert runs[0] == first
    assert "dataload, ranks" not in done.stderr
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["data"]  # nothing of the killed job is left
    other = json.loads((tmp_path / "results/partial.json").read_text())
    other["conditions"]["commit"] = "another"
    (tmp_path / "results/partial.json").write_text(json.dumps(other))
    refused = subprocess.run([*command, "--continue"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "the commit of" in refused.stderr

"""The whole demo: its promises, its clean-up, and the run after a killed rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from descendants import descendants_of

from dataload import make_dataset, make_loader
from dataload.cache.local import fsck


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dataload", "demo", "--json", *words]


def demo(*words: str) -> dict[str, Any]:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def nothing_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check that no process and no file of a demo outlives it, except a kept cache."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield
    assert not [process for process in ranks_and_launchers() if process.is_running()]
    files = [path.name for path in scratch.iterdir() if not path.name.startswith(("torchelastic", "pymp"))]
    assert files == []


def ranks_and_launchers() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "dataload.demo.worker" in (process.info["cmdline"] or [])
    ]


@pytest.fixture
def hangups() -> Any:
    """Let a process that a test starts handle SIGHUP as by default, also if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


FEW = ("--rows", "10000")


def test_serving_the_data_of_the_first_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's first program reads images of 784 numbers and their labels, with the printed settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    command = [sys.executable, "-m", "dataload", "demo", "--serve", "--rows", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        word, *settings = serving.stdout.readline().split()
        assert word == "export"
        try:
            for setting in settings:
                monkeypatch.setenv(*setting.split("="))
            dataset = make_dataset("s3://bucket/train/", cache=False)
            batches = list(make_loader(dataset, 100, row_ids=True))  # as in the guide to bad rows
        finally:
            serving.send_signal(signal.SIGINT)
        assert [batch["image"].shape for batch in batches] == [(100, 784)] * 10
        assert all(torch.equal(batch["row_id"], batch["number"]) for batch in batches)
        assert {int(label) for batch in batches for label in batch["label"]} == set(range(10))
        assert max(int(batch["image"].max()) for batch in batches) > 200
        assert serving.wait(200) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("hangups")
def test_a_closed_terminal_ends_the_server() -> None:
    """The fixture `nothing_left_running` finds the files that a killed process would leave."""
    command = [sys.executable, "-m", "dataload", "demo", "--serve", "--rows", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline().startswith("export")
        serving.send_signal(signal.SIGHUP)
        assert serving.wait(200) == 128 + signal.SIGHUP


@pytest.mark.slow
def test_every_promise() -> None:
    found = demo()
    assert found["problems"] == []
    assert found["rows"] >= 50_000
    assert found["epochs"][0]["s3_bytes"] <= 1.02 * found["dataset_bytes"]
    assert [epoch["s3_requests"] for epoch in found["epochs"][1:]] == [0, 0]
    assert found["accuracy"] >= 0.95


@pytest.mark.slow
def test_shuffled_labels_teach_nothing() -> None:
    control = demo("--shuffled-labels", *FEW)
    assert control["problems"] == []
    assert control["accuracy"] < 0.2
    assert control["epochs"][0]["s3_bytes"] <= 1.02 * control["dataset_bytes"]


@pytest.mark.slow
def test_a_rank_killed_in_the_first_epoch_and_runs_on_the_kept_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    kept = ("--keep", "--cache-dir", str(cache), *FEW)
    running = subprocess.Popen(command(*kept), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    victim = rank_at_work(cache, running)
    os.kill(victim.pid, signal.SIGKILL)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert err.count("\n") == 1
    assert "rank" in err

    again = demo(*kept)
    assert again["problems"] == []
    report = fsck.verify(fsck.open_existing(cache))
    assert report.problems == []
    assert report.bytes > 0.99 * again["dataset_bytes"]  # pixels take the same space in Parquet and decoded

    once_more = demo(*kept)
    assert [epoch["s3_requests"] for epoch in once_more["epochs"]] == [0, 0, 0]
    assert once_more["accuracy"] == again["accuracy"]
    assert once_more["orders"] == again["orders"]


@pytest.mark.slow
def test_no_process_outlives_a_killed_demo(tmp_path: Path) -> None:
    killed = command("--keep", "--cache-dir", str(tmp_path / "cache"), *FEW)
    with subprocess.Popen(killed, stdout=subprocess.DEVNULL) as running:
        rank_at_work(tmp_path / "cache", running)
        with descendants_of(running.pid) as survivors:
            running.kill()
            running.wait()
            assert survivors() == []
    for left in (tmp_path / "scratch").iterdir():
        shutil.rmtree(left)


def rank_at_work(cache: Path, running: subprocess.Popen[str]) -> psutil.Process:
    """Return the process of a rank, once both ranks run and the cache holds a part of the dataset."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None:
        ranks = [process for process in ranks_and_launchers() if "torch.distributed.run" not in process.info["cmdline"]]
        blobs = len(list((cache / "blobs").glob("*/*")))
        if len(ranks) == 2 and blobs > 12:
            return ranks[1]
        time.sleep(0.05)  # polls the progress of another program; no assertion depends on it
    raise AssertionError("the ranks did not start to read")

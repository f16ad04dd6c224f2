"""The rank that holds the others up is named by fit and by the report, whether it waits for data or computes longer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import BEGAN, write_pass

from dataload import World, fit, make_loader
from dataload.reporting.aggregate import epochs
from dataload.telemetry.stats_log import read

SLOW = 1  # the rank that is slowed
PAUSE = 0.05  # seconds a batch: many times what a step takes


class Paused:
    """A transform that takes longer on one rank."""

    def __call__(self, batch: Any) -> Any:
        if World.detect().rank == SLOW:
            time.sleep(PAUSE)
        return batch


def train(folder: Path, slow: str) -> Any:
    """Train on three ranks, of which one is slowed by `slow`. Return its history."""

    def loss(model: Any, batch: Any) -> Any:
        if slow == "step" and World.detect().rank == SLOW:
            time.sleep(PAUSE)
        return model(batch["x"].float()[:, None]).square().mean()

    options: dict[str, Any] = {"transform": Paused(), "num_threads": 0} if slow == "data" else {}
    loader = make_loader(str(folder / "x.parquet"), 4, cache=False, stats_dir=folder / "stats", **options)
    model = torch.nn.Linear(1, 1)
    return fit(
        model,
        torch.optim.SGD(model.parameters(), 1e-6),
        loader,
        loss,
        epochs=1,
        precision="fp32",
        progress=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": np.arange(3 * 4 * 60)}), tmp_path / "x.parquet", row_group_size=60)
    return tmp_path


@pytest.mark.variants
@pytest.mark.parametrize(("slow", "text"), [("data", "longer for data"), ("step", "in its own steps, not for data")])
def test_fit_and_the_report_name_the_rank_that_holds_the_others_up(
    ranks: Any, folder: Path, slow: str, text: str
) -> None:
    histories = ranks(3, train, folder, slow)
    for [record] in histories:
        assert record["straggler"] == SLOW
        assert record["straggler_seconds"] > 0.2 * 60 * PAUSE
    [epoch] = epochs(read(folder / "stats"))
    late = epoch.stragglers()
    assert max(late, key=late.__getitem__) == SLOW
    assert epoch.late()[0].startswith(f"rank {SLOW} ")
    assert text in epoch.late()[0]
    synchronised = {rank: record.stats.sync_seconds for rank, record in epoch.ranks.items()}
    assert min(synchronised, key=synchronised.__getitem__) == SLOW


PROGRAM = """
import sys, time
from dataload import make_loader
folder, slow = sys.argv[1:]
from dataload import World
world = World.detect()
def pause(batch):
    time.sleep(0.05 if world.rank == 1 else 0.0001)
    return batch
options = {"transform": pause, "num_threads": 0} if slow == "data" else {}
loader = make_loader(folder + "/x.parquet", 4, cache=False, stats_dir=folder + "/stats", **options)
print("ready", flush=True)
sys.stdin.readline()
for batch in loader:
    if slow == "step":
        pause(batch)
    time.sleep(0.001)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "text"), [("data", "longer for data"), ("step", "in its own steps, not for data")])
def test_a_plain_loop_whose_ranks_do_not_wait_for_each_other(folder: Path, slow: str, text: str) -> None:
    running = []
    for rank in range(3):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank)}
        environment |= {"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        command = [sys.executable, "-c", PROGRAM, str(folder), slow]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, env=environment, **pipes))
    assert [each.stdout.readline() for each in running] == ["ready\n"] * 3  # They begin together.
    for each in running:
        print(file=each.stdin, flush=True)
    for each in running:
        each.communicate(timeout=300)
    assert [each.returncode for each in running] == [0, 0, 0]
    [epoch] = epochs(read(folder / "stats"))
    late = epoch.stragglers()
    assert max(late, key=late.__getitem__) == SLOW
    assert epoch.late()[0].startswith(f"rank {SLOW} ")
    assert text in epoch.late()[0]


def test_a_rank_that_begins_early_and_waits_for_the_others_is_no_straggler(tmp_path: Path) -> None:
    """In a plain loop, its first step takes as long as the others need to begin."""
    for rank, early in enumerate((0, 5, 0)):
        write_pass(tmp_path, rank, 0, BEGAN - early, [{"rows": 10}] * 10 + [{"rows": 0, "seconds": 0.5 * early - 0.0}])
    [epoch] = epochs(read(tmp_path))
    assert epoch.stragglers() == {}


def test_of_ranks_that_wait_for_each_other_the_one_that_waits_least_is_the_straggler(tmp_path: Path) -> None:
    for rank, waited in enumerate((0.6, 0.1, 0.6, 0.58)):
        write_pass(tmp_path, rank, 0, BEGAN, [{"rows": 10, "sync_seconds": waited}] * 10)
    [epoch] = epochs(read(tmp_path))
    assert epoch.stragglers() == {1: pytest.approx(5.0)}

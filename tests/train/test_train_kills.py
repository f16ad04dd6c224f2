"""fit resumes after kills: bit by bit with the same number of ranks, with each row once with another number."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from itertools import chain, count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoint_files import saved_state
from nightly import NIGHTLY
from torch import nn

from dataload.dataset import make_dataset
from dataload.loader import make_loader
from dataload.train.checkpoint.checkpoints import NAME
from dataload.train.harness import fit
from dataload.world import World

N, BATCH, EPOCHS, EVERY = 301, 16, 2, 4  # rows; of a rank's batch; epochs; steps between checkpoints
TRIALS = 20 if NIGHTLY else 2  # of killing, times ten


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    ids = np.arange(N)
    x = np.random.default_rng(0).normal(size=(N, 3))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3)
    pq.write_table(pa.table({"row_id": ids, "x": lists, "y": x.sum(1) ** 2}), path / "a.parquet", row_group_size=40)
    return str(path)


def augmented(batch, rng):
    return {**batch, "x": batch["x"] + 0.1 * torch.from_numpy(rng.normal(size=batch["x"].shape))}


def train(folder, checkpoints, seen=None, victim=None, moment=(10**9, 0)):
    """Train. Return the model's state as one vector, the losses of the epochs and their rows.

    Args:
        folder: The dataset.
        checkpoints: The checkpoint_dir.
        seen: A folder that gets the rows of each step of each rank, one line per step.
        victim: The rank that kills itself.
        moment: When it does: the step of this process, and the function calls after its forward.
    """
    world = World.detect()
    loader = make_loader(make_dataset(folder, cache=False), BATCH, transform=augmented)
    torch.manual_seed(5)
    layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
    model = nn.Sequential(*layers).double()
    torch.manual_seed(100 + world.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    steps, (doomed, calls) = count(), moment

    def loss(model, batch):
        step = next(steps)
        if seen is not None:
            line = json.dumps(batch["row_id"].tolist()) + "\n"
            with Path(seen, f"{world.rank}.jsonl").open("a") as file:
                file.write(line)
        if world.rank == victim and step == doomed:
            left = count(calls, -1)
            sys.setprofile(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(left) <= 0 else None)
        return ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean() * (1 + 0.1 * torch.rand(()))

    options = {"epochs": EPOCHS, "precision": "fp32", "clip_grad_norm": 1.0, "scheduler": scheduler, "timeout": 60}
    options |= {"checkpoint_dir": checkpoints, "checkpoint_every": checkpoints and EVERY, "progress": False}
    history = fit(model, optimizer, loader, loss, **options)
    state = torch.cat([value.double().ravel() for value in model.state_dict().values()])
    return state, [record["loss"] for record in history], [record["rows"] for record in history]


def rows_of(seen, number):
    """Return the rows of all ranks in each step."""
    ranks = [Path(seen, f"{rank}.jsonl").read_text().splitlines() for rank in range(number)]
    return [list(chain(*map(json.loads, step))) for step in zip(*ranks, strict=False)]


def check_rows(before, checkpoint, after, ranks_before, ranks_after):
    """Check that each epoch has each row exactly once, except for the padding at its end."""
    rest = saved_state(checkpoint) if checkpoint else None
    step, state = (rest["step"], rest["processes"][0][1]["loader"]) if rest else (0, {"epoch": 0, "cursor": 0})
    long, longer = -(-N // (BATCH * ranks_before)), -(-N // (BATCH * ranks_after))
    epochs = [Counter() for _ in range(EPOCHS)]
    for number, rows in enumerate(before[:step]):
        epochs[number // long].update(rows)
    left = -(-(N - state["cursor"]) // (BATCH * ranks_after))
    assert len(after) == left + (EPOCHS - 1 - state["epoch"]) * longer
    for number, rows in enumerate(after):
        epochs[state["epoch"] if number < left else state["epoch"] + 1 + (number - left) // longer].update(rows)
    for rows in epochs:
        assert rows.keys() == set(range(N))
        assert rows.total() < N + max(ranks_before, ranks_after)


@pytest.fixture(scope="module")
def uninterrupted(ranks, folder):
    return functools.cache(lambda number: ranks(number, train, folder, None))


@pytest.mark.variants
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "second", "trials"),
    [
        (2, 2, TRIALS),
        (2, 1, TRIALS),
        *(pytest.param(first, second, TRIALS, marks=pytest.mark.slow) for first, second in [(3, 3), (1, 1), (1, 2)]),
    ],
)
def test_killed_runs_go_on(ranks, folder, uninterrupted, tmp_path, first, second, trials):
    draw = random.Random(f"{first} {second}")
    steps = EPOCHS * -(-N // (BATCH * first))
    killed = 0
    while killed < trials:
        trial = tmp_path / str(killed)
        shutil.rmtree(trial, ignore_errors=True)
        for name in ("before", "after"):
            (trial / name).mkdir(parents=True)
        # Often inside a step or a checkpoint, which has some thousand calls; once at the start of an epoch.
        moment = draw.randrange(steps), draw.choice([0, draw.randrange(100), draw.randrange(5000)])
        moment = moment if killed else (steps // EPOCHS, 0)
        victim = draw.randrange(first)
        lost = ranks(first, train, folder, trial / "kept", trial / "before", victim, moment)
        if isinstance(lost[victim], tuple):
            continue  # the run ended in fewer calls
        killed += 1
        assert lost[victim].args == (-signal.SIGKILL,)
        assert all(isinstance(other, Exception) for other in lost), lost
        found = sorted(path for path in (trial / "kept").glob("*") if NAME.fullmatch(path.name))
        checkpoint = shutil.copytree(found[-1], trial / "copy") if found else None
        answers = ranks(second, train, folder, trial / "kept", trial / "after")
        check_rows(rows_of(trial / "before", first), checkpoint, rows_of(trial / "after", second), first, second)
        if first == second:
            for (state, losses, _), (expected, expected_losses, _) in zip(answers, uninterrupted(second), strict=True):
                assert torch.equal(state, expected), (victim, moment)
                assert losses == expected_losses
        assert all(torch.equal(state, answers[0][0]) for state, *_ in answers)
        assert all(N <= rows < N + max(first, second) for *_, history in answers for rows in history)
        names = [path.name[:11] for path in sorted((trial / "kept").iterdir())]
        assert names == [".lock", *["checkpoint-"] * 2, "ledger.json", "ledger.rows"]

"""SIGTERM at a random moment of a random rank: all ranks save, exit with 0, and the run goes on bit by bit."""

from __future__ import annotations

import os
import random
import signal
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ranks import LostError
from regression import build, parameters_of, squared_error

from dataload import fit, make_loader
from dataload.train.checkpoint.checkpoints import Checkpoints
from dataload.world import World

ROWS, EPOCHS, RANKS, ENDINGS = 96, 3, 4, 50
STORE = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3)
    table = pa.table({"x": lists, "y": pa.FixedSizeListArray.from_arrays(pa.array(x.sum(1) ** 2), 1)})
    pq.write_table(table, path / "a.parquet", row_group_size=16)
    return str(path)


def train(folder, checkpoints, environ, seen, every=None, victim=None, moment=(0, 0)):
    """Train. Return the parameters and what does not depend on the speed of the machine of each epoch.

    Args:
        folder: The dataset.
        checkpoints: The checkpoint_dir.
        environ: The environment of its store.
        seen: A folder that gets a file for each rank, of one byte a step.
        every: Steps between checkpoints within an epoch.
        victim: The rank that gets SIGTERM.
        moment: When it does: the step of this process, and the function calls after its forward.
    """
    os.environ.update(environ)
    world, steps, (step, calls) = World.detect(), count(), moment
    model, optimizer = build(dropout=0.2)
    torch.manual_seed(world.rank)
    sent = []

    def loss(model, batch):
        with Path(seen, str(world.rank)).open("ab") as file:
            file.write(b".")
        if next(steps) == step and world.rank == victim:
            left = count(calls, -1)

            def ending(*_):
                if next(left) <= 0:
                    sys.setprofile(None)
                    sent.append(signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)

            sys.setprofile(ending)
        return squared_error(model, batch)

    options = {"epochs": EPOCHS, "precision": "fp32", "progress": False, "timeout": 60}
    options |= {"checkpoint_dir": checkpoints, "checkpoint_every": every}
    history = fit(model, optimizer, make_loader(folder, 4, cache=False), loss, **options)
    sys.setprofile(None)
    assert not sent  # No signal is lost.
    return parameters_of(model), [(record["epoch"], record["loss"], record["rows"]) for record in history]


@pytest.fixture(params=["disk", "store"])
def place(request, server, bucket, tmp_path, monkeypatch):
    """A function that returns a new checkpoint_dir, and the environment that it needs."""
    if request.param == "disk":
        return lambda number: str(tmp_path / f"run-{number}"), {}
    environ = STORE | {"AWS_ENDPOINT_URL": server.endpoint_url}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return lambda number: bucket.url(f"run-{number}"), environ


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_sigterm_to_one_of_four_ranks_saves_exits_with_0_and_goes_on_bit_by_bit(ranks, folder, place, tmp_path):
    name_of, environ = place
    draw, trials, ended = random.Random(11), count(), 0

    def run(name, *args, **options):
        """Return the answer of each rank, and the steps that all of them have taken."""
        (seen := tmp_path / name).mkdir()
        answers = ranks(RANKS, train, folder, *args, environ, str(seen), **options)
        [steps] = {file.stat().st_size for file in seen.iterdir()}
        return answers, steps

    whole, steps = run("whole", None)
    while ended < ENDINGS:
        trial = next(trials)
        checkpoints, every = name_of(trial), draw.choice([None, 2])
        moment, victim = (draw.randrange(steps - 1), int(10 ** draw.uniform(0, 4))), draw.randrange(RANKS)
        answers, before = run(f"before-{trial}", checkpoints, every=every, victim=victim, moment=moment)
        if before == steps:  # It came too late.
            assert not any(isinstance(answer, AssertionError) for answer in answers), (victim, moment)
            continue
        ended += 1
        assert [type(answer) for answer in answers] == [LostError] * RANKS, answers
        assert [answer.args for answer in answers] == [(0,)] * RANKS
        assert Checkpoints(None, 1).find(checkpoints) is not None  # which verifies it
        answers, after = run(f"after-{trial}", checkpoints, every=every)
        assert after == steps - before, (victim, moment)
        for (state, figures), (expected, expected_figures) in zip(answers, whole, strict=True):
            assert torch.equal(state, expected), (victim, moment)
            assert figures == expected_figures

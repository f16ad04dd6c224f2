"""torchrun restarts a job, one of whose ranks is killed in each of eight attempts, until it ends with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

RUNS, KILLS = 10, 8
PROGRAM = """
import os, random, signal, sys
from itertools import count
from pathlib import Path
import torch
from torch import nn
from dataload import fit, make_dataset, make_loader

data, checkpoints, result, seed, kills = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
draw = random.Random(f"{seed} {attempt}")
victim, doomed, calls = draw.randrange(2), draw.randrange(1, 12), draw.choice([0, draw.randrange(5000)])
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
steps = count()

def loss(model, batch):
    if attempt < int(kills) and rank == victim and next(steps) == doomed:
        left = count(calls, -1)
        sys.setprofile(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(left) <= 0 else None)
    return (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()

loader = make_loader(make_dataset(data, cache=False), 16)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
options = {"epochs": 12, "precision": "fp32", "checkpoint_every": 4, "progress": False}
fit(model, optimizer, loader, loss, checkpoint_dir=checkpoints, **options)
if rank == 0:
    Path(result).write_bytes(nn.utils.parameters_to_vector(model.parameters()).detach().numpy().tobytes())
"""


def train(folder: Path, seed: int, kills: int) -> tuple[bytes, str]:
    """Return the bytes of the trained parameters, and what torchrun wrote."""
    program, result = folder / "program.py", folder / f"result-{seed}"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "12"]
    arguments = [program, folder / "data", folder / f"checkpoints-{seed}", result, str(seed), str(kills)]
    ended = subprocess.run(
        [sys.executable, *launcher, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout
    return result.read_bytes(), ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchrun")
    (path / "data").mkdir()
    x = np.random.default_rng(0).normal(size=(600, 3))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3)
    pq.write_table(pa.table({"x": lists, "y": x.sum(1) ** 2}), path / "data" / "a.parquet", row_group_size=100)
    return path


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> bytes:
    return train(folder, -1, 0)[0]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", range(RUNS))
def test_a_job_whose_ranks_are_killed_ends_with_the_same_bits(folder: Path, uninterrupted: bytes, seed: int) -> None:
    result, output = train(folder, seed, KILLS)
    assert result == uninterrupted
    failed = output.count("failed (exitcode:")
    sys.stderr.write(f"run {seed}: {failed} attempts failed, {KILLS} of them by a kill\n")
    assert failed == KILLS, output

"""The examples run as a user starts them, read each row once over two ranks, and match the README."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import zlib
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SIZES = {"train": 601, "held-out": 101}
DEADLINE = 100  # seconds
RUN = [sys.executable, "-m", "torch.distributed.run"]
# Suppresses the warnings of Lightning and accelerate about this machine.
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with datasets of 8 x 8 pixel digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    path, rows = tmp_path_factory.mktemp("digits"), iter(np.random.default_rng(0).permutation(len(labels)))
    for name, size in SIZES.items():
        (path / name).mkdir()
        some = [next(rows) for _ in range(size)]
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(images[some].astype(np.uint8).ravel()), 64)
        pq.write_table(pa.table({"image": pixels, "label": labels[some]}), path / name / "a.parquet", row_group_size=50)
    return path


def program(name, folder, out, *more):
    example = [str(Path(__file__).parent / "support/example_rank.py"), str(out), str(ROOT / "examples" / name)]
    data = [str(folder / "train"), str(folder / "held-out"), "--epochs", "2", "--batch-size", "32"]
    return [*example, *data, "--cache-dir", str(out / "cache"), *more]


def run_all(commands, out):
    """Run commands concurrently until they exit. Return the output of the first."""
    environ = {**os.environ, **QUIET}
    started = [
        subprocess.Popen(command, cwd=out, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return outputs[0]


def check_rows(folder, out, ranks):
    """Check that the ranks read each row once in each epoch."""
    seen = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    for name, size in SIZES.items():
        images = pq.read_table(folder / name)["image"].combine_chunks().flatten().to_numpy().reshape(-1, 64)
        expected = Counter(zlib.crc32(image.tobytes()) for image in images)
        of_ranks = [[epoch for epoch in epochs if epoch["of"] == size] for epochs in seen]
        assert {len(epochs) for epochs in of_ranks} <= (
            {2} if name == "train" else {2, 3}
        )  # Lightning runs a sanity check first
        for parts in zip(*of_ranks, strict=True):
            assert len({part["epoch"] for part in parts}) == 1
            assert Counter(chain(*(part["rows"] for part in parts))) == expected
            assert all(len(part["rows"]) >= size // ranks for part in parts)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_ddp_on_two_nodes(folder, tmp_path):
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    job = program("train_ddp.py", folder, tmp_path)
    output = run_all([[*RUN, *nodes, "--node-rank", str(node), *job] for node in range(2)], tmp_path)
    check_rows(folder, tmp_path, 2)
    assert re.search(r"accuracy \d+\.\d%, [\d,]+ rows/s", output)
    assert (tmp_path / "checkpoints" / "checkpoint-000002").is_dir()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train_accelerate.py", r"epoch 1: accuracy \d+\.\d% of 101 rows"),
        ("train_lightning.py", r"accuracy \d+\.\d% of 101 rows"),
    ],
)
def test_two_ranks_of_other_trainers(folder, tmp_path, name, expected):
    two = ["--standalone", "--nproc-per-node", "2"]
    assert re.search(expected, run_all([[*RUN, *two, *program(name, folder, tmp_path)]], tmp_path))
    check_rows(folder, tmp_path, 2)


def test_data_parallel(folder, tmp_path):
    output = run_all([[sys.executable, *program("train_dataparallel.py", folder, tmp_path)]], tmp_path)
    assert re.search(r"accuracy \d+\.\d% on \d+ devices", output)
    check_rows(folder, tmp_path, 1)


def test_every_example_is_short_and_in_the_readme():
    assert len(EXAMPLES) == 4
    readme = (ROOT / "README.md").read_text()
    blocks = dict(re.findall(r"```python\n# examples/(\w+\.py)\n(.*?)```", readme, re.DOTALL))
    assert blocks.keys() == {path.name for path in EXAMPLES}
    for path in EXAMPLES:
        lines = [line.strip() for line in path.read_text().splitlines()]
        assert len(lines) < 80
        shown = [line.strip() for line in blocks[path.name].splitlines() if line.strip() not in ("", "...")]
        assert len(shown) >= 3
        places = [lines.index(line) for line in shown]
        assert places == sorted(places), f"{path.name}: in another order in the README"

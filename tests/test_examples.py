"""The examples run as a user starts them, read each row once over two ranks, and match the page about them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from ports import free_port
from quiet import noise
from torch import nn

from dataload import World, make_loader

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.*"))
SIZES = {"train": 601, "held-out": 101}
RUN = [sys.executable, "-m", "torch.distributed.run"]
QUIET = {"OMP_NUM_THREADS": "1"}  # Without it, torchrun says that it sets it.
LIGHTNING = (  # its own lines about itself, this machine and this small dataset
    "Initializing distributed: ",
    "GPU available: ",
    "TPU available: ",
    "💡 Tip: ",
    "-----",
    "distributed_backend=",
    "All distributed processes registered",
    "lightning/pytorch/utilities/_pytree.py",
    "smaller than the logging interval",
    "`Trainer.fit` stopped: `max_epochs=2` reached.",
)
DEEPSPEED = ("torch/distributed/c10d_logger.py", "return func(*args, **kwargs)")  # calls that torch deprecates
TRANSFORMERS = ("%|", "\x1b[A")  # its progress bars
RAY = (  # which also shows its workers' standard output here
    "authentication_token_setup.py",
    "Started a local Ray instance",
    "(TrainController ",
    "(PlacementGroupCleaner ",
    "Setting up process group",
    "Moving model to device",
    "Wrapping provided model",
    "Reporting training result",
    "num_streams=1",
    "accuracy",
)


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


def run_all(commands, out, *expected):
    """Run commands concurrently until they exit. Return the output of the first.

    They write nothing to standard error but progress, and lines with an expected text.
    """
    environ = {**os.environ, **QUIET}
    started = [
        subprocess.Popen(command, cwd=out, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate() for process in started]  # The timeout of the test interrupts this.
    finally:
        for process in started:
            process.terminate()  # A launcher then ends its ranks.
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
    everything = "\n".join(chain(*outputs))
    assert [process.returncode for process in started] == [0] * len(started), everything
    assert noise("\n".join(errors for _, errors in outputs), *expected) == []
    return outputs[0][0]


def check_rows(folder, out, ranks, peers=1):
    """Check that the ranks read each row once in each epoch. `peers` consecutive processes are one rank."""
    every = [json.loads((out / f"{process}.json").read_text()) for process in range(ranks * peers)]
    seen = every[::peers]
    assert all(every[process] == seen[process // peers] for process in range(ranks * peers))
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


@pytest.mark.slow
def test_ddp_on_two_nodes(folder, tmp_path):
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    job = program("train_ddp.py", folder, tmp_path, "--checkpoint-every", "4")
    output = run_all([[*RUN, *nodes, "--node-rank", str(node), *job] for node in range(2)], tmp_path)
    check_rows(folder, tmp_path, 2)
    assert re.search(r"accuracy \d+\.\d%, [\d,]+ rows/s", output)
    for rank in range(2):
        passes = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [each["epoch"] for each in passes if each["of"] == SIZES["held-out"]] == [0, 0]
    # Of ten steps in each of two epochs: after the fourth, the eighth and the last.
    assert (tmp_path / "checkpoints" / "checkpoint-000006").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected", "own_lines"),
    [
        ("train_plain_ddp.py", r"epoch 1: accuracy \d+\.\d% of 101 rows", ()),
        ("train_accelerate.py", r"epoch 1: accuracy \d+\.\d% of 101 rows", ()),
        ("train_lightning.py", r"accuracy \d+\.\d% of 101 rows", LIGHTNING),
    ],
)
def test_two_ranks_of_other_trainers(folder, tmp_path, name, expected, own_lines):
    two = ["--standalone", "--nproc-per-node", "2"]
    assert re.search(expected, run_all([[*RUN, *two, *program(name, folder, tmp_path)]], tmp_path, *own_lines))
    check_rows(folder, tmp_path, 2)


@pytest.mark.slow
def test_tensor_parallel_peers_read_the_same_rows(folder, tmp_path):
    four = ["--standalone", "--nproc-per-node", "4"]
    output = run_all([[*RUN, *four, *program("train_fsdp2.py", folder, tmp_path)]], tmp_path)
    assert re.search(r"accuracy \d+\.\d% of 602 rows", output)  # one row is padding
    check_rows(folder, tmp_path, 2, peers=2)


def installed(package):
    """Return whether a package is installed. If not, print that a stand-in runs in its place."""
    if find_spec(package) is not None:
        return True
    print(f"{package} is not installed here: train_plain_ddp.py runs in the environment that it sets")
    return False


def stand_in(folder, tmp_path, environ_of):
    """Run the plain loop on two ranks, with the environment that `environ_of(rank)` returns."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    job = ["env", *(f"{name}={value}" for name, value in shared.items())]
    run = [sys.executable, *program("train_plain_ddp.py", folder, tmp_path)]
    ranks = [[f"{name}={value}" for name, value in environ_of(str(rank)).items()] for rank in range(2)]
    output = run_all([[*job, *environ, *run] for environ in ranks], tmp_path)
    assert re.search(r"epoch 1: accuracy \d+\.\d% of 101 rows", output)


@pytest.mark.slow
@pytest.mark.timeout(900)  # It compiles an operator first.
def test_deepspeed(folder, tmp_path):
    if installed("deepspeed"):
        two = [
            "-m",
            "deepspeed.launcher.runner",
            "--no_local_rank",
            "--num_gpus",
            "2",
            "--master_port",
            str(free_port()),
        ]
        environ = ["env", "DS_ACCELERATOR=cpu"]
        output = run_all(
            [[*environ, sys.executable, *two, *program("train_deepspeed.py", folder, tmp_path)]], tmp_path, *DEEPSPEED
        )
        assert re.search(r"epoch 1: accuracy \d+\.\d% of 101 rows", output)
    else:
        nodes = {"LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
        stand_in(folder, tmp_path, lambda rank: {"RANK": rank, "LOCAL_RANK": rank, **nodes})
    check_rows(folder, tmp_path, 2)


@pytest.mark.slow
def test_hugging_face_trainer(folder, tmp_path):
    if installed("transformers"):
        two = ["--standalone", "--nproc-per-node", "2"]
        output = run_all([[*RUN, *two, *program("train_huggingface.py", folder, tmp_path)]], tmp_path, *TRANSFORMERS)
        assert output.count("eval_accuracy") == 2  # one rank prints it in each epoch
    else:
        stand_in(folder, tmp_path, lambda rank: {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"})
    check_rows(folder, tmp_path, 2)


@pytest.mark.slow
def test_ray_train(folder, tmp_path):
    if installed("ray"):
        environ = ["env", "RAY_USAGE_STATS_ENABLED=0"]
        output = run_all([[*environ, sys.executable, *program("train_ray.py", folder, tmp_path)]], tmp_path, *RAY)
        assert re.search(r"accuracy \d+\.\d% of 101 rows", output)
    else:
        node = {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
        stand_in(folder, tmp_path, lambda rank: {"RANK": rank, "LOCAL_RANK": rank, **node})
    check_rows(folder, tmp_path, 2)


SRUN = """#!{python}
import os, subprocess, sys
tasks = []
for rank in range(2):
    step = dict(PROCID=rank, LOCALID=0, NODEID=rank, STEP_NUM_TASKS=2, STEP_NUM_NODES=2, STEP_TASKS_PER_NODE="1(x2)")
    environ = os.environ | {{f"SLURM_{{name}}": str(value) for name, value in step.items()}}
    tasks.append(subprocess.Popen({program} + sys.argv[3:], env=environ))
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
def test_slurm(folder, tmp_path):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    *job, train, held_out = program("train_ddp.py", folder, tmp_path)[:5]
    (bin_ / "srun").write_text(SRUN.format(python=sys.executable, program=[sys.executable, *job]))
    (bin_ / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    script = tmp_path / "job.sh"
    script.write_text((ROOT / "examples/train_slurm.sh").read_text().replace("29500", str(free_port())))
    for file in (*bin_.iterdir(), script):
        file.chmod(0o755)
    options = program("train_ddp.py", folder, tmp_path)[5:]
    path = ["env", f"PATH={bin_}:{os.environ['PATH']}", "SLURM_JOB_NODELIST=here"]
    output = run_all([[*path, str(script), train, held_out, *options]], tmp_path)
    assert re.search(r"accuracy \d+\.\d%, [\d,]+ rows/s", output)
    check_rows(folder, tmp_path, 2)


def test_the_recipe_of_slurm_has_the_options_of_the_example():
    pages = (ROOT / "examples/train_slurm.sh", ROOT / "docs/recipes.md")
    example, recipe = (
        re.findall(r"^(#SBATCH .+|export (?:MASTER|SRUN)_\S+)", page.read_text(), re.MULTILINE) for page in pages
    )
    assert example == recipe
    assert "#SBATCH --requeue" in example


@pytest.mark.slow
def test_data_parallel(folder, tmp_path):
    output = run_all([[sys.executable, *program("train_dataparallel.py", folder, tmp_path)]], tmp_path)
    assert re.search(r"accuracy \d+\.\d% on \d+ devices", output)
    check_rows(folder, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_pipeline_trains_as_the_whole_model_does(folder, tmp_path):
    """Two pipelines of two stages have the losses of a plain loop over the batches of both."""
    job = program("train_pipeline.py", folder, tmp_path, "--stages", "2")
    job.remove(str(folder / "held-out"))
    output = run_all([[*RUN, "--standalone", "--nproc-per-node", "4", *job]], tmp_path)
    found = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]

    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    worlds = [World(rank, 2, rank, 2) for rank in range(2)]
    options = {"columns": ["image", "label"], "drop_last": True, "cache_dir": tmp_path / "plain"}
    loaders = [make_loader(folder / "train", 32, world=world, **options) for world in worlds]
    expected = []
    for _ in range(2):
        losses = []
        for batches in zip(*loaders, strict=True):
            own = [nn.functional.cross_entropy(model(batch["image"].float()), batch["label"]) for batch in batches]
            (sum(own) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(own[0].item())
        expected.append(float(np.mean(losses)))
    assert found == pytest.approx(expected, abs=1e-4)


def test_images(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(90):
        path = tmp_path / "photos" / f"class-{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 80, (70, 90, 3), np.uint8) + np.uint8(80 * (number % 3))
        Image.fromarray(pixels).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    run_all([[sys.executable, "-m", "dataload", "convert", "photos/", "train/", "--shuffle", "0"]], tmp_path, "convert")
    job = [sys.executable, ROOT / "examples/train_images.py", "train/", "--epochs", "3"]
    output = run_all([job], tmp_path, "on_error", "resumed", "finished")
    rows = re.findall(r"epoch \d: accuracy [\d.]+% of (\d+) photographs", output)
    assert rows in (["8"] * 3, ["9"] * 3)  # The photograph that is cut short may be one of the nine.
    assert "epoch 2: " in run_all([job], tmp_path, "on_error", "resumed", "finished")


def test_every_recipe_on_the_page_of_trainers_is_in_a_workflow():
    page = (ROOT / "docs/guides/trainers.md").read_text()
    blocks = re.findall(r"```python\n# (tests/workflows/\w+\.py)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    for path, block in blocks:
        lines = iter([line.strip() for line in (ROOT / path).read_text().splitlines()])
        for line in filter(None, (line.strip() for line in block.splitlines())):
            assert line == "..." or line in lines, f"{path} does not have this line, or in another order: {line}"


def test_every_example_is_short_and_on_the_page_of_trainers():
    assert len(EXAMPLES) == 12
    page = (ROOT / "docs/guides/trainers.md").read_text()
    blocks = dict(re.findall(r"```python\n# examples/(\w+\.py)\n(.*?)```", page, re.DOTALL))
    elsewhere = {"train_plain_ddp.py", "train_slurm.sh", "train_images.py"}  # on the pages of DDP, of Slurm, of vision
    assert blocks.keys() == {path.name for path in EXAMPLES} - elsewhere
    for path in EXAMPLES:
        lines = [line.strip() for line in path.read_text().splitlines()]
        assert len(lines) <= (80 if path.name in elsewhere else 60)  # They also save and resume, or augment.
        shown = [line.strip() for line in blocks.get(path.name, "").splitlines() if line.strip() not in ("", "...")]
        assert len(shown) >= 3 or path.name in elsewhere
        places = [lines.index(line) for line in shown]
        assert places == sorted(places), f"{path.name}: in another order on the page"

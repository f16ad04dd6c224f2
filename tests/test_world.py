from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dataload.errors import ConfigError
from dataload.world import World, read_environment

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def detected_in_a_group() -> World:
    """Detect the world of a process that is alone in a process group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return World.detect()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World(0, 1, 0, 1)),
        (TORCHRUN, World(5, 8, 1, 4)),
        (SLURM, World(3, 4, 1, None)),
        (OPEN_MPI, World(2, 4, 0, 2)),
        ({**SLURM, **TORCHRUN}, World(5, 8, 1, 4)),
        ({**SLURM, "WORLD_SIZE": "4"}, World(3, 4, 1, None)),  # exported by the script that srun starts
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World(0, 1, 0, 1)),  # a bare sbatch script: one process
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, World(1, 2, 1, None)),  # Lightning's launcher
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(1, 2, 1, 2)),  # the only node
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}, World(1, 2, 1, 2)),
        ({"WORLD_SIZE": "1"}, World(0, 1, None, None)),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, World(0, 1, 0, None)),
    ],
)
def test_the_environment_is_read(environment: dict[str, str], world: World) -> None:
    assert read_environment(environment) == world


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"},
        {"WORLD_SIZE": "8", "LOCAL_RANK": "1"},
        {"WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},  # rank 1 or 5
        {"WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
        {**SLURM, "WORLD_SIZE": "8"},
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
        {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        {"RANK": "3"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
        {**TORCHRUN, "LOCAL_RANK": "4"},
    ],
)
def test_a_rank_that_cannot_be_told_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_environment(environment)


@pytest.mark.parametrize(
    ("world", "nodes"), [(World(), 1), (World(0, 8, 0, 4), 2), (World(0, 8), None), (World(0, 6, 0, 4), None)]
)
def test_nodes(world: World, nodes: int | None) -> None:
    assert world.num_nodes == nodes


@pytest.mark.parametrize(
    ("world", "host_by_host"),
    [
        (World(), True),
        (World(5, 8), True),
        (World(5, 8, 1), True),
        (World(5, 8, None, 8), True),
        (World(5, 8, 1, 4), True),
        (World(5, 8, 5, 8), True),
        (World(5, 8, 1, 8), False),
        (World(5, 8, 2, 4), False),
        (World(2, 8, 0, 3), True),  # of hosts of 2, 3 and 3 ranks
    ],
)
def test_ranks_are_numbered_host_by_host(world: World, host_by_host: bool) -> None:
    assert world.host_by_host == host_by_host


def test_a_process_group_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detected_in_a_group() == World(0, 1)


def test_a_process_group_and_a_launcher_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert detected_in_a_group() == World(0, 1, 0, 1)


def test_the_launcher_that_agrees_with_the_process_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    for name, value in {**OPEN_MPI, **step, "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert World.detect() == World(2, 4, 0, 2)
    assert detected_in_a_group() == World(0, 1, 0, 1)


@pytest.mark.parametrize(("tasks", "in_terminal", "warnings"), [("8", True, 1), ("8", False, 0), ("1", True, 0)])
def test_a_terminal_of_several_tasks_warns_once(tasks: str, in_terminal: bool, warnings: int) -> None:
    """Only the first task of `srun --pty` has the terminal. Tasks that are started in it have its variables, too."""
    program = "from dataload import World; World.detect(); print(World.detect().world_size)"
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": tasks, "SLURM_PTY_PORT": "4000"}
    controller, terminal = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **step},
            stdin=terminal if in_terminal else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        os.close(controller)
        os.close(terminal)
    assert done.stdout == f"{tasks}\n"
    assert done.stderr.count("this is task 0 of 8 of `srun --pty`") == warnings


@pytest.mark.variants
@pytest.mark.parametrize(
    "light",
    [
        "import dataload",
        "import dataload.cache.filesystem",
        "import dataload.catalog.manifest, dataload.formats.parquet",
        "import dataload.rows.arrow_decode, dataload.rows.row_store",
        "import dataload.samplers.order",
        "import dataload.cli.app",
        "from dataload import World; World.detect()",
    ],
)
def test_torch_loads_late(light: str) -> None:
    program = f"import sys; {light}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_import_dataload_pulls_in_nothing() -> None:
    program = (
        "import sys, dataload; assert not {'numpy', 'fsspec', 'lmdb', 'pyarrow'} & set(sys.modules); dir(dataload)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("collects", [True, False])
def test_names_are_imported_with_few_collections(collects: bool) -> None:
    program = (
        "import gc, dataload; collected = []; gc.callbacks.append(lambda *_: collected.append(1))\n"
        f"if not {collects}: gc.disable()\n"
        "dataload.make_dataset\n"
        f"assert gc.isenabled() is {collects}\n"
        "assert len(collected) < 20, len(collected)"  # Python's own rule makes 850 calls.
    )
    subprocess.run([sys.executable, "-c", program], check=True)

"""What launchers such as torchrun, Slurm and MPI say about this process in its environment."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from dataload.errors import ConfigError

log = logging.getLogger(__name__)


class Launcher(NamedTuple):
    """The variables of a launcher. The first name that is set counts."""

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()


class Launched(NamedTuple):
    """The arguments of a `World`."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_sizes: tuple[int, ...] | None
    host_ranks: tuple[int, ...] | None


class MeetingPlace(NamedTuple):
    """Where the ranks of a job can show each other something.

    Attributes:
        store: Host and port of the store where the ranks meet; None: unknown.
        held: Whether torchrun's agent holds the store, and not rank 0 as long as it has a process group.
        attempt: Number of the attempt of the job, which the agent's store outlives.
        run: Tells the ranks of this run from those of others on this host.
    """

    store: tuple[str, int] | None
    held: bool
    attempt: str
    run: str


# The most trusted launcher first. The variables of the first are those of torchrun; Ray Train and DeepSpeed set some of
# them (Ray Train NODE_RANK, DeepSpeed LOCAL_SIZE, CROSS_RANK and CROSS_SIZE), and accelerate starts torchrun.
# Slurm comes last: the processes of mpirun inherit the variables of the shell or the daemon that started them, which
# may be a task of Slurm.
# Only srun sets Slurm's *step* size: in a bare sbatch script SLURM_PROCID is 0 although the job has many tasks.
LAUNCHERS = (
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        ("GROUP_RANK", "CROSS_RANK", "NODE_RANK"),
        ("GROUP_WORLD_SIZE", "CROSS_SIZE"),
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        num_nodes=("OMPI_MCA_orte_num_nodes",),
    ),
    Launcher(
        "MPICH", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        num_nodes=("SLURM_STEP_NUM_NODES",),
    ),
)
# What launchers set to the same value on all ranks of a run, and to another in another run.
RUN = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
    *("OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MASTER_ADDR", "MASTER_PORT"),
)
LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")


def announcing_launchers(
    environ: Mapping[str, str], num_ranks: int | None = None
) -> list[tuple[Launcher, tuple[int | None, int]]]:
    """Return (launcher, (rank, world size)) of the launchers that announce the number of ranks, the most trusted first.

    `srun` may run inside `mpirun -n 1`, so MPI and Slurm come last if they announce a single rank.

    A script may export WORLD_SIZE alone, and start with srun or mpirun. A launcher that does not say the rank is left
    out if another one says it, for as many ranks.

    Args:
        environ: The environment.
        num_ranks: Number of ranks of the process group. Launchers that announce another number are left out. None: keep
            all.
    """
    announced = {each: (integer(environ, each.rank), integer(environ, each.world_size)) for each in LAUNCHERS}
    ranked = {size for rank, size in announced.values() if rank is not None}
    known = [
        (each, (rank, size))
        for each, (rank, size) in announced.items()
        if size is not None and num_ranks in (None, size) and (rank is not None or size not in ranked)
    ]
    return sorted(known, key=lambda found: found[0] is not LAUNCHERS[0] and found[1][1] == 1)


def read_launcher(environ: Mapping[str, str], launcher: Launcher, rank: int | None = None) -> Launched:
    """Return what a launcher says in `environ`.

    Args:
        environ: The environment.
        launcher: The launcher.
        rank: Number of this process, if it is known; None: that of the launcher.

    Raises:
        ConfigError: The launcher does not say the rank of this process, or its numbers contradict each other.
    """
    world_size = integer(environ, launcher.world_size) or 1
    rank = integer(environ, launcher.rank) if rank is None else rank
    local_rank = integer(environ, *launcher.local_rank)
    local_size, one_host = integer(environ, *launcher.local_world_size), on_one_host(environ, world_size)
    if rank is None and (integer(environ, "NODE_RANK") == 0 or world_size == (local_size or one_host)):
        rank = local_rank  # Lightning's own launcher sets no RANK; on the first node, or the only one, it is this.
    if rank is None and world_size > 1:
        raise ConfigError(
            f"{launcher.name} announces {world_size} ranks ({launcher.world_size}={world_size}) but {launcher.rank} is "
            f"not set: set {launcher.rank}, start with torchrun, or pass world=World(rank, world_size)"
        )
    node, num_nodes = integer(environ, *launcher.node), integer(environ, *launcher.num_nodes)
    sizes, here = None, None
    if node is not None and local_size is not None and num_nodes is None and node != (rank or 0) // local_size:
        raise ConfigError(
            f"rank {rank} is on node {node} of {local_size} ranks: nodes have unequal numbers of ranks, or their ranks "
            "are not neighbours. Start equally many on each node, or set GROUP_WORLD_SIZE to the number of nodes"
        )
    if launcher.name == "Slurm":
        tasks = _tasks_per_node(environ, world_size, num_nodes)
        local_size = tasks[node] if tasks and node is not None and node < len(tasks) else None
        order = environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
        if tasks and order not in ("block", "unknown"):
            sizes = (1,) * world_size  # Tasks are not numbered node by node, so each reads a stream of its own.
            if order == "cyclic" and len(set(tasks)) == 1 and rank is not None:
                here = tuple(range(rank % len(tasks), world_size, len(tasks)))
        elif len(set(tasks)) > 1:
            sizes = tasks
    elif local_size is not None and num_nodes is not None and local_size * num_nodes != world_size:
        sizes = _unequal(world_size, local_size, node, num_nodes)
    return Launched(rank or 0, world_size, local_rank, local_size or one_host, sizes, here)


def _tasks_per_node(environ: Mapping[str, str], world_size: int, num_nodes: int | None) -> tuple[int, ...]:
    """Return the tasks on each node of a Slurm step, such as (4, 4, 3) for "4(x2),3"; () if they are unknown."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    runs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run) for run in text.split(",")]
    tasks = tuple(int(run[1]) for run in runs if run for _ in range(int(run[2] or 1)))
    if all(runs) and sum(tasks) == world_size:
        return tasks
    return (world_size // num_nodes,) * num_nodes if num_nodes and world_size % num_nodes == 0 else ()


def _unequal(world_size: int, local_size: int, node: int | None, num_nodes: int) -> tuple[int, ...]:
    """Return node sizes on which all ranks agree, although each knows only the size of its own node."""
    if num_nodes == 2 and node is not None:
        other = world_size - local_size
        return (other, local_size) if node else (local_size, other)
    if num_nodes == 2 or world_size % num_nodes:
        return (1,) * world_size  # Every rank can tell that nodes are unequal: each reads a stream of its own.
    _warn_of_unequal_nodes(world_size, local_size, num_nodes)
    return (world_size // num_nodes,) * num_nodes


@cache
def _warn_of_unequal_nodes(world_size: int, local_size: int, num_nodes: int) -> None:
    log.warning(
        "this node has %d of %d ranks, but nodes of %d ranks take all %d nodes for equal: several nodes will read the "
        "same rows. Start equally many ranks on each node, or pass world=World(..., node_sizes=...)",
        local_size,
        world_size,
        world_size // num_nodes,
        num_nodes,
    )


def warn_of_terminal(environ: Mapping[str, str], launcher: Launcher, place: tuple[int | None, int]) -> None:
    """Warn if the program may run in the shell of one of several tasks of Slurm, whose rank it has."""
    # Later steps inherit the variable, but not the terminal.
    if launcher.name == "Slurm" and place[1] > 1 and "SLURM_PTY_PORT" in environ and os.isatty(0):
        _warn_of_terminal(*place)


@cache
def _warn_of_terminal(rank: int | None, world_size: int) -> None:
    log.warning(
        "this is task %d of %d of `srun --pty`, so a loader has only the rows of that rank: unless all tasks run this "
        "program, pass world=World() for a single process, or start the ranks with srun or torchrun",
        rank or 0,
        world_size,
    )


def on_one_host(environ: Mapping[str, str], world_size: int) -> int | None:
    """Return `world_size` if all ranks are on this host, because they meet at a loopback address; else None."""
    return world_size if LOOPBACK.fullmatch(environ.get("MASTER_ADDR", "")) else None


def read_meeting_place(environ: Mapping[str, str]) -> MeetingPlace:
    """Return where the ranks of the job that a launcher describes in `environ` can show each other something."""
    host, port = environ.get("MASTER_ADDR"), integer(environ, "MASTER_PORT")
    store = (host, port) if host and port else None
    held = store is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run = " ".join(f"{name}={environ[name]}" for name in RUN if environ.get(name)) or f"children of {os.getppid()}"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return MeetingPlace(store, held, attempt, run)


def find_contradiction(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (contradiction, remedy) if launchers contradict each other in a readable environment, else None.

    Raises:
        ConfigError: A variable is not a whole number.
    """
    announced = [(each.name, place) for each, place in announcing_launchers(environ) if place[0] is not None]
    for launcher, (rank, world_size) in announced[1:]:
        trusted, (own, size) = announced[0]
        # Another world may be that of the daemons or of the shell which started the ranks.
        if (size == world_size and own != rank) or size == 1 < world_size:
            return (
                f"{trusted} says that this is rank {own} of {size}, {launcher} says rank {rank} of {world_size}",
                f"start with one launcher, or unset the variables of {launcher}: {trusted} is believed",
            )
    tasks = integer(environ, "SLURM_NTASKS")
    if not announced and tasks is not None and tasks > 1:
        return (
            f"this is a Slurm job of {tasks} tasks (SLURM_NTASKS), but this process is not one of them",
            "start the program with srun, or with torchrun",
        )
    return None


def integer(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} in the environment is not a whole number") from None

"""The rank of this process. Only this module reads the launcher's environment; others receive a `World`."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from dataload.errors import ConfigError
from dataload.mesh import data_parallel_argument, model_parallel_dims, ranks_together, ravel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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


# The most trusted launcher first. The variables of the first are those of torchrun; Ray Train and DeepSpeed set some of
# them (Ray Train NODE_RANK, DeepSpeed LOCAL_SIZE, CROSS_RANK and CROSS_SIZE), and accelerate starts torchrun.
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
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        num_nodes=("SLURM_STEP_NUM_NODES",),
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
)
LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")


@dataclass(frozen=True)
class World:
    """The position of one process among all data-parallel ranks.

    Args:
        rank: Number of this process, in [0, world_size). Processes with the same number get the same batches.
        world_size: Number of data-parallel ranks.
        local_rank: Number of this process among those of its host; None if the launcher does not say.
        local_world_size: Number of processes on this host; None if the launcher does not say. The number of nodes is
            then unknown.
        node_sizes: Ranks on each node, in the order of the ranks; the same on every rank. None: each node has
            local_world_size of them.

    Raises:
        ConfigError: The numbers contradict each other.

    Example:
        The second rank on the second of two hosts with four GPUs each:

        >>> from dataload import World
        >>> world = World(rank=5, world_size=8, local_rank=1, local_world_size=4)
        >>> world.num_nodes
        2
        >>> World.detect(world) is world
        True
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    node_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in a world of {self.world_size}: ranks count from 0")
        local_size, sizes = self.local_world_size, self.node_sizes
        if sizes is not None and (min(sizes, default=0) < 1 or sum(sizes) != self.world_size):
            raise ConfigError(f"node_sizes={sizes} do not add up to a world of {self.world_size}")
        if local_size is not None and (local_size < 1 or (sizes is None and local_size > self.world_size)):
            raise ConfigError(f"{local_size} ranks on one host cannot be part of a world of {self.world_size}")
        if self.local_rank is not None and not 0 <= self.local_rank < (local_size or self.world_size):
            raise ConfigError(f"local rank {self.local_rank} is not on a host of {local_size or self.world_size} ranks")

    @property
    def num_nodes(self) -> int | None:
        """Number of nodes; None if it is unknown."""
        if self.world_size == 1:
            return 1
        if self.node_sizes is not None:
            return len(self.node_sizes)
        if self.local_world_size is None or self.world_size % self.local_world_size:
            return None
        return self.world_size // self.local_world_size

    @property
    def num_streams(self) -> int:
        """Streams of rows such that each node reads its own: one for each node if nodes have equally many ranks.

        Otherwise a node reads as many streams as the common divisor of all node sizes is contained in its own size. 1
        if the number of nodes is unknown.

        Raises:
            ConfigError: Nodes have unequal numbers of ranks, which ranks on other nodes may not know.
        """
        if self.node_sizes is not None:
            return self.world_size // math.gcd(*self.node_sizes)
        if self.num_nodes is None and self.local_world_size is not None:
            raise ConfigError(
                f"the host of rank {self.rank} has {self.local_world_size} of {self.world_size} ranks, so others have "
                "fewer or more, which the launcher does not say: start with torchrun or srun, or pass "
                "num_streams=1, or world=World(rank, world_size, local_rank, local_world_size, node_sizes=(…))"
            )
        return self.num_nodes or 1

    @property
    def node_share(self) -> float:
        """Part of the rows that this rank's node reads, in (0, 1]."""
        if self.node_sizes is None:
            return 1 / (self.num_nodes or 1)
        own = bisect_right(list(accumulate(self.node_sizes)), self.rank)
        return self.node_sizes[own] / self.world_size

    @property
    def host_by_host(self) -> bool:
        """Whether ranks are numbered one host after another. True if that is unknown or the hosts are unequal."""
        size = self.local_world_size
        if size is None or self.local_rank is None or self.node_sizes is not None or self.world_size % size:
            return True
        return self.rank % size == self.local_rank

    @classmethod
    def detect(cls, world: World | None = None) -> World:
        """Return the argument, else the world of an initialised torch.distributed, else that of the launcher.

        Raises:
            ConfigError: There is more than one rank, and the rank of this process cannot be determined.
        """
        if world is not None:
            return world
        group = _process_group()
        if group is None:
            return read_environment(os.environ)
        try:
            launched = read_environment(os.environ)
        except ConfigError:
            launched = None
        # The process group knows the rank; only the launcher knows the host. Use the host if the two agree.
        if launched is not None and (launched.rank, launched.world_size) == group:
            return launched
        return cls(*group, local_world_size=_on_one_host(os.environ, group[1]))

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> World:
        """Return the world of a mesh of the data-parallel dimensions, such as `device_mesh["dp"]`.

        Ranks with equal coordinates in `mesh`, such as the peers of a tensor-parallel group, get the same number. The
        launcher says which nodes they are on.

        Args:
            mesh: A mesh of the data-parallel dimensions only, such as `device_mesh["dp_replicate", "dp_shard"]`.

        Raises:
            ConfigError: This process is not in the mesh, or the mesh has a dimension that is not data-parallel.

        Example:
            ```python
            device_mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
            world = World.from_mesh(device_mesh["dp"])  # rank 0 to 3 of 4
            ```
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ConfigError(f"this process is not in {mesh}: pass the mesh of its own data-parallel dimensions")
        if model_parallel_dims(mesh):
            raise ConfigError(f"mesh has dimensions that are not data-parallel: pass {data_parallel_argument(mesh)}")
        launched, sizes = cls.detect(), None
        if launched.num_nodes is not None or launched.local_world_size is not None:
            streams = launched.num_streams
            sizes = ranks_together(mesh, launched.node_sizes or (launched.world_size // streams,) * streams)
        local = (launched.local_rank, launched.local_world_size) if sizes else (None, None)
        return cls(ravel(coordinate, mesh.shape), mesh.size(), *local, sizes)


def read_environment(environ: Mapping[str, str]) -> World:
    """Return the world that a launcher describes in `environ`, or a world of one process without a launcher.

    Raises:
        ConfigError: The launcher announces more than one rank but not the rank of this process.
    """
    announcing = (each for each in LAUNCHERS if _integer(environ, each.world_size) is not None)
    if (first := next(announcing, None)) is not None:
        world = _launched(environ, first)
        # A script that sets RANK and WORLD_SIZE from the variables of srun or MPI leaves the rest to those.
        others = (_launched(environ, each) for each in announcing if world.num_nodes is None)
        known = (other for other in others if other.num_nodes is not None)
        return next((o for o in known if (o.rank, o.world_size) == (world.rank, world.world_size)), world)
    if _integer(environ, "RANK"):
        raise ConfigError(f"RANK={environ['RANK']} says that there are more ranks: set WORLD_SIZE too")
    return World(0, 1, 0, 1)


def _launched(environ: Mapping[str, str], launcher: Launcher) -> World:
    world_size = _integer(environ, launcher.world_size) or 1
    rank, local_rank = _integer(environ, launcher.rank), _integer(environ, *launcher.local_rank)
    if rank is None and environ.get("NODE_RANK", "0") == "0":
        rank = local_rank  # Lightning's own launcher sets no RANK; on the first node it is the local rank.
    if rank is None and world_size > 1:
        raise ConfigError(
            f"{launcher.name} announces {world_size} ranks ({launcher.world_size}={world_size}) but {launcher.rank} is "
            f"not set: set {launcher.rank}, start with torchrun, or pass world=World(rank, world_size)"
        )
    node, num_nodes = _integer(environ, *launcher.node), _integer(environ, *launcher.num_nodes)
    local_size, sizes = _integer(environ, *launcher.local_world_size), None
    if node is not None and local_size is not None and num_nodes is None and node != (rank or 0) // local_size:
        raise ConfigError(
            f"rank {rank} is on node {node} of {local_size} ranks: nodes have unequal numbers of ranks, or their ranks "
            "are not neighbours. Start equally many on each node, or set GROUP_WORLD_SIZE to the number of nodes"
        )
    if launcher.name == "Slurm":
        tasks = _tasks_per_node(environ, world_size, num_nodes)
        local_size = tasks[node] if tasks and node is not None and node < len(tasks) else None
        if tasks and environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0] not in ("block", "unknown"):
            sizes = (1,) * world_size  # Tasks are not numbered node by node, so each reads a stream of its own.
        elif len(set(tasks)) > 1:
            sizes = tasks
    elif local_size is not None and num_nodes is not None and local_size * num_nodes != world_size:
        sizes = _unequal(world_size, local_size, node, num_nodes)
    return World(rank or 0, world_size, local_rank, local_size or _on_one_host(environ, world_size), sizes)


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
    if num_nodes == 2:
        other = world_size - local_size
        return (other, local_size) if node else (local_size, other)
    if world_size % num_nodes:
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


def _on_one_host(environ: Mapping[str, str], world_size: int) -> int | None:
    """Return `world_size` if all ranks are on this host, because they meet at a loopback address; else None."""
    return world_size if LOOPBACK.fullmatch(environ.get("MASTER_ADDR", "")) else None


def find_contradiction(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (contradiction, remedy) if launchers contradict each other in a readable environment, else None.

    Raises:
        ConfigError: As for `read_environment`.
    """
    announced = []
    for each in LAUNCHERS:
        rank, world_size = _integer(environ, each.rank), _integer(environ, each.world_size)
        if rank is not None and world_size is not None:
            announced.append((each.name, rank, world_size))
    for launcher, rank, world_size in announced[1:]:
        trusted, own, size = announced[0]
        if size == world_size and own != rank:
            return (
                f"{trusted} says that this is rank {own} of {size}, {launcher} says rank {rank}",
                f"start with one launcher, or unset the variables of {launcher}: {trusted} is believed",
            )
    tasks = _integer(environ, "SLURM_NTASKS")
    if not announced and tasks is not None and tasks > 1:
        return (
            f"this is a Slurm job of {tasks} tasks (SLURM_NTASKS), but this process is not one of them",
            "start the program with srun, or with torchrun",
        )
    return None


def _integer(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} in the environment is not a whole number") from None


def _process_group() -> tuple[int, int] | None:
    """Return (rank, world size) of an initialised torch.distributed. Never import torch."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()

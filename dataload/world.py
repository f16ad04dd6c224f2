"""The rank of this process. Only this module reads the launcher's environment; others receive a `World`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dataload.errors import ConfigError

# (launcher, rank, world size, local rank, local world size), the most trusted launcher first.
# Only srun sets Slurm's *step* size: in a bare sbatch script SLURM_PROCID is 0 although the job has many tasks.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None),
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)


@dataclass(frozen=True)
class World:
    """The position of one process among all ranks.

    Args:
        rank: Number of this process, in [0, world_size).
        world_size: Number of ranks.
        local_rank: Number of this process among those of its host; None if the launcher does not say.
        local_world_size: Number of ranks on this host; None if the launcher does not say. The number of nodes is
            then unknown.

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

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in a world of {self.world_size}: ranks count from 0")
        local_size = self.local_world_size
        if local_size is not None and not 1 <= local_size <= self.world_size:
            raise ConfigError(f"{local_size} ranks on one host cannot be part of a world of {self.world_size}")
        if self.local_rank is not None and not 0 <= self.local_rank < (local_size or self.world_size):
            raise ConfigError(f"local rank {self.local_rank} is not on a host of {local_size or self.world_size} ranks")

    @property
    def num_nodes(self) -> int | None:
        """Number of hosts; None if it is unknown or the hosts have unequal numbers of ranks."""
        if self.world_size == 1:
            return 1
        if self.local_world_size is None or self.world_size % self.local_world_size:
            return None
        return self.world_size // self.local_world_size

    @property
    def host_by_host(self) -> bool:
        """Whether ranks are numbered one host after another. True if that is unknown or the hosts are unequal."""
        size = self.local_world_size
        if size is None or self.local_rank is None or self.world_size % size:
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
        return cls(*group)


def read_environment(environ: Mapping[str, str]) -> World:
    """Return the world that a launcher describes in `environ`, or a world of one process without a launcher.

    Raises:
        ConfigError: The launcher announces more than one rank but not the rank of this process.
    """
    for launcher, *names in LAUNCHERS:
        rank, world_size, local_rank, local_world_size = (_integer(environ, name) for name in names)
        if world_size is None:
            continue
        if rank is None and environ.get("NODE_RANK", "0") == "0":
            rank = local_rank  # Lightning's own launcher sets no RANK; on the first node it is the local rank.
        if rank is None and world_size > 1:
            raise ConfigError(
                f"{launcher} announces {world_size} ranks ({names[1]}={world_size}) but {names[0]} is not set: "
                f"set {names[0]}, start with torchrun, or pass world=World(rank, world_size)"
            )
        return World(rank or 0, world_size, local_rank, local_world_size)
    if _integer(environ, "RANK"):
        raise ConfigError(f"RANK={environ['RANK']} says that there are more ranks: set WORLD_SIZE too")
    return World(0, 1, 0, 1)


def find_contradiction(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (contradiction, remedy) if launchers contradict each other in a readable environment, else None.

    Raises:
        ConfigError: As for `read_environment`.
    """
    announced = []
    for launcher, *names in LAUNCHERS:
        rank, world_size = (_integer(environ, name) for name in names[:2])
        if rank is not None and world_size is not None:
            announced.append((launcher, rank, world_size))
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


def _integer(environ: Mapping[str, str], name: str | None) -> int | None:
    text = environ.get(name) if name else None
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number") from None


def _process_group() -> tuple[int, int] | None:
    """Return (rank, world size) of an initialised torch.distributed. Never import torch."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()

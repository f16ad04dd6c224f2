"""Which rank this is. The environment is read here and nowhere else; everybody else is handed a `World`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dataload.errors import ConfigError

# (launcher, rank, world size, local rank, local world size), in the order they are believed.
# Slurm's *step* size is set by srun alone: inside a bare sbatch script SLURM_PROCID is 0 on a job of many tasks.
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
    """One process's place among all ranks.

    rank: this process, in [0, world_size).
    world_size: ranks in all.
    local_rank: this process among those of its host; None where the launcher does not say.
    local_world_size: ranks on this host; None where the launcher does not say (then the number of nodes is unknown).

    Raises ConfigError when the numbers contradict each other.
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
        """Hosts in the world; None when unknown or when hosts hold unequal numbers of ranks."""
        if self.world_size == 1:
            return 1
        if self.local_world_size is None or self.world_size % self.local_world_size:
            return None
        return self.world_size // self.local_world_size

    @property
    def host_by_host(self) -> bool:
        """Whether ranks are numbered one host after the other; True where that cannot be told, as of unequal hosts."""
        size = self.local_world_size
        if size is None or self.local_rank is None or self.world_size % size:
            return True
        return self.rank % size == self.local_rank

    @classmethod
    def detect(cls, world: World | None = None) -> World:
        """The world in force: the argument, else an initialised torch.distributed, else the launcher's environment.

        Raises ConfigError when there is more than one rank and no way to tell which one this is.
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
        # The process group knows the rank; only the launcher knows the host. Believe the host where the two agree.
        if launched is not None and (launched.rank, launched.world_size) == group:
            return launched
        return cls(*group)


def read_environment(environ: Mapping[str, str]) -> World:
    """The world that a launcher describes in `environ`; one process when no launcher is at work.

    Raises ConfigError when more than one rank is announced and this one's number cannot be told.
    """
    for launcher, *names in LAUNCHERS:
        rank, world_size, local_rank, local_world_size = (_integer(environ, name) for name in names)
        if world_size is None:
            continue
        if rank is None and environ.get("NODE_RANK", "0") == "0":
            rank = local_rank  # Lightning's own launcher sets no RANK; on the first node it is the local one.
        if rank is None and world_size > 1:
            raise ConfigError(
                f"{launcher} announces {world_size} ranks ({names[1]}={world_size}) but {names[0]} is not set: "
                f"set {names[0]}, start with torchrun, or pass world=World(rank, world_size)"
            )
        return World(rank or 0, world_size, local_rank, local_world_size)
    if _integer(environ, "RANK"):
        raise ConfigError(f"RANK={environ['RANK']} says that there are more ranks: set WORLD_SIZE too")
    return World(0, 1, 0, 1)


def doubts(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """What is doubtful in what launchers say, though a world can be read from it, and what to do; None: nothing.

    Raises ConfigError as `read_environment` does.
    """
    told = []
    for launcher, *names in LAUNCHERS:
        rank, world_size = (_integer(environ, name) for name in names[:2])
        if rank is not None and world_size is not None:
            told.append((launcher, rank, world_size))
    for launcher, rank, world_size in told[1:]:
        believed, own, size = told[0]
        if size == world_size and own != rank:
            return (
                f"{believed} says that this is rank {own} of {size}, {launcher} says rank {rank}",
                f"start with one launcher, or unset the variables of {launcher}: {believed} is believed",
            )
    tasks = _integer(environ, "SLURM_NTASKS")
    if not told and tasks is not None and tasks > 1:
        return (
            f"this is a Slurm job of {tasks} tasks (SLURM_NTASKS), but not one of these",
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
    """(rank, world size) of an initialised torch.distributed; never imports torch to find out."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()

"""The rank of this process. Only this module reads the launcher's environment; others receive a `World`."""

from __future__ import annotations

import math
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from dataload.errors import ConfigError
from dataload.launchers import (
    MeetingPlace,
    announcing_launchers,
    integer,
    on_one_host,
    read_launcher,
    read_meeting_place,
    warn_of_terminal,
)
from dataload.mesh import data_parallel_argument, data_parallel_ranks, model_parallel_dims, ranks_together, ravel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        host_ranks: The ranks on this host; None: local_rank and local_world_size determine them. It is for ranks that
            are not numbered host by host.

    Raises:
        ConfigError: The numbers contradict each other.

    Example:
        The second rank on the second of two hosts with four GPUs each:

        >>> from dataload import World
        >>> world = World(rank=5, world_size=8, local_rank=1, local_world_size=4)
        >>> world.num_nodes
        2
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    node_sizes: tuple[int, ...] | None = None
    host_ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} is not in a world of {self.world_size}: ranks count from 0, so pass one from 0 to "
                "world_size - 1"
            )
        local_size, sizes = self.local_world_size, self.node_sizes
        if sizes is not None and (min(sizes, default=0) < 1 or sum(sizes) != self.world_size):
            raise ConfigError(
                f"node_sizes={sizes} do not add up to a world of {self.world_size}: give the number of ranks on each "
                "node, at least 1"
            )
        if local_size is not None and (local_size < 1 or (sizes is None and local_size > self.world_size)):
            raise ConfigError(f"{local_size} ranks on one host cannot be part of a world of {self.world_size}")
        if self.local_rank is not None and not 0 <= self.local_rank < (local_size or self.world_size):
            raise ConfigError(f"local rank {self.local_rank} is not on a host of {local_size or self.world_size} ranks")
        if self.host_ranks is not None and not {self.rank} <= set(self.host_ranks) <= set(range(self.world_size)):
            raise ConfigError(
                f"host_ranks={self.host_ranks} must have rank {self.rank} and only ranks of a world of "
                f"{self.world_size}"
            )

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
                "fewer or more, which the launcher does not say: start with torchrun or srun, or pass num_streams=1 "
                "if all ranks are data-parallel, or world=World(rank, world_size, local_rank, local_world_size, "
                "node_sizes=(…))"
            )
        return self.num_nodes or 1

    @property
    def node_share(self) -> float:
        """Part of the rows that this rank's node reads, in (0, 1]: the streams of all ranks on it."""
        nodes = self.num_nodes or 1
        if self.node_sizes is None and self.host_ranks is None:
            return 1 / nodes
        sizes = self.node_sizes or (self.world_size // nodes,) * nodes
        ends = list(accumulate(sizes))
        return sum(sizes[node] for node in {bisect_right(ends, rank) for rank in _host_ranks(self)}) / self.world_size

    @property
    def host_by_host(self) -> bool:
        """Whether ranks are numbered one host after another. True if that is unknown or the hosts are unequal."""
        size = self.local_world_size
        if size is None or self.local_rank is None or self.node_sizes is not None or self.world_size % size:
            return True
        return self.rank % size == self.local_rank

    @classmethod
    def detect(cls) -> World:
        """Return the world of an initialised torch.distributed, else that of the launcher.

        Raises:
            ConfigError: There is more than one rank, and the rank of this process cannot be determined; or the numbers
                of the launcher contradict each other.
        """
        return read_environment(os.environ, _process_group())

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> World:
        """Return the world of a mesh of the data-parallel dimensions, such as `device_mesh["dp"]`.

        Ranks with equal coordinates in `mesh`, such as the peers of a tensor-parallel group, get the same number. The
        launcher says which nodes they are on. On several nodes, the whole mesh must be a regular grid of all ranks, as
        that of `init_device_mesh` is, because a process knows only its own part of it.

        Args:
            mesh: A mesh of the data-parallel dimensions only, such as `device_mesh["dp_replicate", "dp_shard"]`.

        Raises:
            ConfigError: This process is not in the mesh, the mesh has a dimension that is not data-parallel, or there
                are several nodes and the mesh is no regular grid.

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
        rank, size, launched = ravel(coordinate, mesh.shape), mesh.size(), cls.detect()
        ranks = data_parallel_ranks(mesh, launched.world_size)
        if ranks == list(range(launched.world_size)):
            return launched
        if launched.num_nodes is None and launched.local_world_size is None:
            return cls(rank, size)
        streams = launched.num_streams
        if ranks is None:
            if streams > 1 and size < launched.world_size:  # A peer may have ranks in order, and take other streams.
                raise ConfigError(
                    f"ranks {mesh.mesh.flatten().tolist()} of the mesh are not in ascending order with equal steps, so "
                    "they cannot agree with the others on the rows of each node: order the mesh as init_device_mesh "
                    f"does, or, in a loop of your own, pass world=World({rank}, {size}) instead of mesh, and such a "
                    "world on all ranks"
                )
            return cls(rank, size)
        sizes = ranks_together(ranks, launched.node_sizes or (launched.world_size // streams,) * streams)
        here = {ranks[process] for process in _host_ranks(launched)}
        return cls(rank, size, launched.local_rank, launched.local_world_size, sizes, tuple(sorted(here)))


def _host_ranks(world: World) -> Iterable[int]:
    """Return the ranks on the host of `world`, as far as they are known."""
    if world.host_ranks is not None:
        return world.host_ranks
    if world.local_rank is None or world.local_world_size is None:
        return (world.rank,)
    first = max(0, world.rank - world.local_rank)
    return range(first, min(first + world.local_world_size, world.world_size))


def read_environment(environ: Mapping[str, str], group: tuple[int, int] | None = None) -> World:
    """Return the world that a launcher describes in `environ`, or a world of one process without a launcher.

    A process group knows the rank; only a launcher of as many ranks knows the host. A script that sets RANK and
    WORLD_SIZE leaves the host to srun or MPI, too. Both may number the ranks in another order than the launcher, which
    only some ranks can tell. So the launcher is chosen by the world size, on which all ranks agree.

    Args:
        environ: The environment.
        group: (rank, world size) of the process group; None: there is none.

    Raises:
        ConfigError: The launcher announces more than one rank but not the rank of this process, or its numbers
            contradict each other.
    """
    rank, num_ranks = group or (None, None)
    if announced := announcing_launchers(environ, num_ranks):
        if rank is None:
            warn_of_terminal(environ, *announced[0])
        size = announced[0][1][1]
        first, *others = (each for each, place in announced if place[1] == size)
        world = World(*read_launcher(environ, first, rank))
        if None not in (world.num_nodes, world.local_rank):
            return world
        worlds = (World(*read_launcher(environ, each, world.rank)) for each in others)
        return next((other for other in worlds if _says_more(other, world)), world)
    if group is not None:
        return World(*group, local_world_size=on_one_host(environ, group[1]))
    if integer(environ, "RANK"):
        raise ConfigError(f"RANK={environ['RANK']} says that there are more ranks: set WORLD_SIZE too")
    return World(0, 1, 0, 1)


def meeting_place() -> MeetingPlace:
    """Return where the ranks of this job can show each other something."""
    return read_meeting_place(os.environ)


def _says_more(other: World, world: World) -> bool:
    """Return whether another launcher knows the nodes. The step of a daemon has other ranks on this host."""
    return other.num_nodes is not None and world.local_world_size in (None, other.local_world_size)


def _process_group() -> tuple[int, int] | None:
    """Return (rank, world size) of an initialised torch.distributed. Never import torch."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()

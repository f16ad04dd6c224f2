"""The data-parallel world of a loader. Set-ups in which ranks would silently get wrong rows raise an error.

The ranks of a host share its memory, its cores and its limit of requests.
"""

from __future__ import annotations

import gc
import logging
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from dataload.errors import ConfigError
from dataload.mesh import data_parallel_argument, model_parallel_dims
from dataload.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dataload.loader.batch_maker import BatchMaker
    from dataload.map_style import MapStyle

FETCHING_PROCESSES_PER_RANK = 2  # the rank itself and its background decoder; workers seldom fetch
MAX_RANKS_PER_HOST = 8  # assumed where the launcher does not set LOCAL_WORLD_SIZE

log = logging.getLogger(__name__)


def world_of(world: World | None, mesh: DeviceMesh | None) -> World:
    """Return the world of a loader: the argument, that of the mesh, or the detected one.

    Raises:
        ConfigError: Both arguments are given, or neither is and ranks need equal batches.
    """
    if world is not None and mesh is not None:
        raise ConfigError("world and mesh both say which rank this is: pass one of them")
    if mesh is not None:
        world = World.from_mesh(mesh)
    elif world is None:
        world = World.detect()
        check_data_parallel(world.rank, world.world_size)
    launched = world if mesh is None else World.detect()
    if world.num_nodes is None and launched.rank == 0:
        _warn_of_unknown_nodes(world.world_size)
    if launched.num_nodes != 1 and launched.local_rank == 0 and not launched.host_by_host:
        _warn_of_scattered_ranks(launched)
    return world


def check_data_parallel(rank: int, world_size: int, *, search: bool = True) -> None:
    """Raise ConfigError unless the rank that a loader detected is that of this process, and all are data-parallel.

    Args:
        rank: Number of this process when the loader was made.
        world_size: Number of ranks when the loader was made.
        search: Whether to search for dimensions that are not data-parallel. Once there is a process group, this takes
            some hundredths of a second.
    """
    world = World.detect()
    is_other = _in_process_group() and (world.rank, world.world_size) != (rank, world_size)
    if is_other or world.world_size > world_size:
        raise ConfigError(
            f"this loader was made for {'a single process' if world_size == 1 else f'rank {rank} of {world_size}'}, "
            f"but this is rank {world.rank} of {world.world_size}: make it after the ranks have been started (in "
            "Lightning, in train_dataloader), or pass world=World(rank, size, local_rank, local_size)"
        )
    if search and world.world_size > 1 and (argument := _missing_argument()) is not None:
        raise ConfigError(
            f"the {world.world_size} ranks are not all data-parallel: some need equal batches, but this loader would "
            f"give each its own rows. Write make_loader(..., {argument}), or world=World.detect() if all ranks are "
            "data-parallel"
        )


def ranks_of_host(world: World) -> int:
    """Return the number of ranks on this host, or the most that there may be."""
    return world.local_world_size or min(world.world_size, MAX_RANKS_PER_HOST)


def share_host(maker: BatchMaker, dataset: MapStyle, ranks: int, num_workers: int) -> None:
    """Divide the host's memory for row groups, its cores and its limit of requests among its ranks.

    Args:
        maker: Makes the batches of the loader, and identifies it. The largest numbers of all live loaders apply.
        dataset: Its dataset.
        ranks: Ranks of this host.
        num_workers: Worker processes of each rank. They open row groups if the user has a function for batches.
    """
    processes = 1 if maker.only_gathers else 1 + num_workers
    dataset.rowstore.row_groups.memory.share(maker, ranks, processes)
    for each in dataset.datasets:
        if each.blocks.origin.limiter is not None:
            each.blocks.origin.limiter.share(maker, FETCHING_PROCESSES_PER_RANK * ranks)


def process_among(num_ranks: int) -> int | None:
    """Return the number of this process; None if there are not more processes than data-parallel ranks."""
    try:
        launched = World.detect()
    except ConfigError:  # The program has passed the world, and the environment says nothing.
        return None
    return launched.rank if launched.world_size > num_ranks else None


def _missing_argument() -> str | None:
    """Return the argument that a loader needs if this program's ranks are not all data-parallel, else None."""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized():
        config = getattr(state.AcceleratorState(), "parallelism_config", None)
        peers = 1 if config is None else config.non_data_parallel_size
        if peers > 1:
            mesh = state.AcceleratorState().device_mesh
            if mesh is None:  # DeepSpeed has the groups
                numbers = ("rank", "world_size", "local_rank", "local_world_size")
                return f"world=World({', '.join(f'{number} // {peers}' for number in numbers)})"
            return data_parallel_argument(mesh, "accelerator.torch_device_mesh")
    if not _model_parallel_meshes():
        return None
    gc.collect()  # Meshes of an earlier phase are in reference cycles.
    meshes = _model_parallel_meshes()
    if not meshes:
        return None
    mesh = max(meshes, key=lambda each: each.ndim)
    lightning = "data_parallel" in (mesh.mesh_dim_names or ()) and "lightning" in sys.modules
    return data_parallel_argument(mesh, "self.device_mesh" if lightning else "mesh")


def _model_parallel_meshes() -> list[Any]:
    """Return the meshes of this process with dimensions that are not data-parallel.

    torch has no list of meshes, so the garbage collector finds them. A mesh of several ranks needs a process group.
    """
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None or not _in_process_group():
        return []
    meshes = [each for each in gc.get_referrers(module.DeviceMesh) if type(each) is module.DeviceMesh]
    return [mesh for mesh in meshes if model_parallel_dims(mesh)]


def _in_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@cache
def _warn_of_unknown_nodes(world_size: int) -> None:
    log.warning(
        "the launcher does not say how many nodes the %d ranks are on, so every node will fetch and cache the whole "
        "dataset: start with torchrun or srun, set LOCAL_WORLD_SIZE to the ranks of each node, or pass "
        "world=World(rank, world_size, local_rank, local_world_size)",
        world_size,
    )


@cache
def _warn_of_scattered_ranks(world: World) -> None:
    log.warning(
        "ranks are not numbered host by host (rank %d is the first on its host of %d), so each host will read the rows "
        "of several: map ranks to hosts in blocks (mpirun --map-by slot), or, without mesh=, pass "
        "world=World(rank, world_size, local_rank, local_world_size, node_sizes=(1,) * world_size) on all ranks",
        world.rank,
        world.local_world_size,
    )

"""Checks of how worker processes start and whether each rank is configured correctly."""

from __future__ import annotations

import multiprocessing
import os

from dataload.doctor.finding import Case, Finding, ok, problem, warning
from dataload.errors import ConfigError
from dataload.launchers import find_contradiction
from dataload.world import World


def fork(case: Case) -> Finding:
    """Report the default start method; the training program may set another one."""
    method = multiprocessing.get_start_method()
    if method == "fork" and case.num_workers:
        return warning(
            "unless the program sets another start method, workers are forked from a process with threads: a lock "
            "that a thread holds at that moment stays locked, and workers fetch more slowly",
            "make_loader(..., multiprocessing_context='forkserver')",
        )
    return ok(f"unless the program sets another start method, processes start by {method}")


def ranks(_: Case) -> Finding:
    try:
        world, contradiction = World.detect(), find_contradiction(os.environ)
    except ConfigError as error:
        message, advice = str(error).partition(": ")[::2]
        return problem(message, advice or "start with torchrun, or pass world=World(rank, world_size)")
    if contradiction is not None:
        return problem(*contradiction)
    if world.num_nodes is None:
        return warning(
            f"rank {world.rank} of {world.world_size}; the number of hosts is unknown: each will cache the dataset",
            "start with torchrun, or set LOCAL_WORLD_SIZE",
        )
    if not world.host_by_host:
        return _scattered(world)
    return ok(f"rank {world.rank} of {world.world_size}")


def _scattered(world: World) -> Finding:
    rank = f"rank {world.rank} of {world.world_size} is local rank {world.local_rank} of {world.local_world_size}"
    if world.num_nodes == 1:
        return problem(f"{rank}: on one host they must be equal", "set LOCAL_RANK to RANK, or start with torchrun")
    return warning(
        f"{rank}: ranks are not numbered host by host with equally many on each; several hosts will read the same rows",
        "start with torchrun, equally many ranks on each host, or map ranks to hosts in blocks (mpirun --map-by slot)",
    )

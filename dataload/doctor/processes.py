"""How processes are started, and whether each of them can tell which one it is."""

from __future__ import annotations

import multiprocessing
import os

from dataload.doctor.finding import Case, Finding, ok, problem, warning
from dataload.errors import ConfigError
from dataload.world import World, doubts


def fork(case: Case) -> Finding:
    """What the program that trains will do is not known here: it may choose another way."""
    method = multiprocessing.get_start_method()
    if method == "fork" and case.num_workers:
        return ok(
            "unless the program says otherwise, workers are forked, from a process with threads: a lock that one of "
            "these holds just then stays locked; and what they fetch comes more slowly",
            "make_loader(..., multiprocessing_context='forkserver')",
        )
    return ok(f"unless the program says otherwise, processes start by {method}")


def ranks(_: Case) -> Finding:
    try:
        world, doubt = World.detect(), doubts(os.environ)
    except ConfigError as error:
        said, advice = str(error).partition(": ")[::2]
        return problem(said, advice or "start with torchrun, or pass world=World(rank, world_size)")
    if doubt is not None:
        return problem(*doubt)
    if world.num_nodes is None:
        return warning(
            f"rank {world.rank} of {world.world_size}, on how many hosts is not said: each will cache all that is read",
            "start with torchrun, or set LOCAL_WORLD_SIZE",
        )
    if not world.host_by_host:
        return _scattered(world)
    return ok(f"rank {world.rank} of {world.world_size}")


def _scattered(world: World) -> Finding:
    what = f"rank {world.rank} of {world.world_size} is local rank {world.local_rank} of {world.local_world_size}"
    if world.num_nodes == 1:
        return problem(f"{what}: on one host they are the same", "set LOCAL_RANK as RANK, or start with torchrun")
    return warning(
        f"{what}: ranks are not numbered host by host, as many on each; hosts will read what others have read",
        "start with torchrun, as many ranks on each host, or map ranks to hosts in blocks (mpirun --map-by slot)",
    )

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
    return ok(f"rank {world.rank} of {world.world_size}")

"""Ranks that fork from their program after its imports, which take longer than what they do."""

from __future__ import annotations

import gc
import os
import signal
import sys

DEADLINE = 180  # seconds for a rank; only a hang takes that long


def rank_of_this_process() -> int:
    """Fork the `WORLD_SIZE` ranks of this program. Return the number in each; the program itself ends with them."""
    gc.freeze()  # A loader searches the objects of its rank for meshes: what is imported has none.
    ranks = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if (child := os.fork()) == 0:
            signal.alarm(DEADLINE)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return rank
        ranks.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    sys.exit(f"the ranks ended with {codes}" if any(codes) else 0)

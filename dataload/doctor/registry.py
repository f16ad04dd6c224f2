"""All checks, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from dataload.doctor import cache_dir, cluster, limits, object_store, processes
from dataload.doctor.finding import PROBLEM, Case, Finding, problem, reason
from dataload.doctor.object_store import Store

MACHINE: dict[str, Callable[[Case], Finding]] = {
    "cache filesystem": cache_dir.filesystem,
    "cache folder": cache_dir.ours,
    "cache room": cache_dir.room,
    "locks": cache_dir.locks,
    "shared memory": limits.shared_memory,
    "open files": limits.descriptors,
    "locked memory": limits.locked_memory,
    "maps": limits.maps,
    "processors": limits.processors,
    "fork": processes.fork,
    "ranks": processes.ranks,
    "cluster": cluster.cluster,
}
# Each needs what those before it found in order.
ORIGIN: dict[str, Callable[[Store], Finding]] = {
    "endpoint": object_store.endpoint,
    "clock": object_store.clock,
    "credentials": object_store.credentials,
    "region": object_store.region,
    "ranges": object_store.ranges,
    "ETag": object_store.etag,
    "If-Match": object_store.if_match,
}
DECISIVE = frozenset({"endpoint", "credentials"})  # without these the others can say nothing


def examine(case: Case, store: Store | None) -> Iterator[tuple[str, Finding]]:
    """(check, what it found), one after the other; those of the origin when there is a store. Raises nothing."""
    for name, check in MACHINE.items():
        yield name, _found(partial(check, case))
    for name, probe in ORIGIN.items() if store else ():
        assert store is not None
        found = _found(partial(probe, store))
        yield name, found
        if found.status == PROBLEM and name in DECISIVE:
            return


def _found(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 (one check that fails must not take with it what the others found)
        return problem(
            f"cannot be looked at: {reason(error)} ({type(error).__name__})", "see to what it says, then look again"
        )

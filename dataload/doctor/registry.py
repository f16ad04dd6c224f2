"""All checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from dataload.cache.local.read_only import is_read_only
from dataload.doctor import cache_dir, cluster, limits, object_store, processes, shape
from dataload.doctor.finding import PROBLEM, Case, Finding, problem, reason
from dataload.doctor.object_store import Store

CACHE: dict[str, Callable[[Case], Finding]] = {
    "cache filesystem": cache_dir.filesystem,
    "cache folder": cache_dir.usable,
    "cache capacity": cache_dir.capacity,
    "cache size": cache_dir.size,
    "locks": cache_dir.locks,
}
MACHINE: dict[str, Callable[[Case], Finding]] = CACHE | {
    "shared memory": limits.shared_memory,
    "open files": limits.descriptors,
    "locked memory": limits.locked_memory,
    "processors": limits.processors,
    "fork": processes.fork,
    "ranks": processes.ranks,
    "cluster": cluster.cluster,
}
# Each check relies on the checks before it.
ORIGIN: dict[str, Callable[[Store], Finding]] = {
    "endpoint": object_store.endpoint,
    "clock": object_store.clock,
    "credentials": object_store.credentials,
    "client": object_store.client,
    "region": object_store.region,
    "listing": object_store.listing,
    "ranges": object_store.ranges,
    "ETag": object_store.etag,
    "If-Match": object_store.if_match,
}
REQUIRED = frozenset({"endpoint", "credentials"})  # the checks after these cannot run without them


def examine(case: Case, store: Store | None) -> Iterator[tuple[str, Finding]]:
    """Run the checks one after the other. A check that raises yields a problem.

    Args:
        case: The planned run.
        store: The object store to check. None: check this machine only.

    Yields:
        The name of a check and its finding.
    """
    checks = MACHINE
    if is_read_only(case.folder):
        others = {name: check for name, check in MACHINE.items() if name not in CACHE}
        checks = {"cache folder": cache_dir.read_only, **others}
    for name, check in checks.items():
        yield name, _run(partial(check, case))
    for name, probe in ORIGIN.items() if store else ():
        assert store is not None
        finding = _run(partial(probe, store))
        yield name, finding
        if finding.status == PROBLEM and name in REQUIRED:
            return
    if case.reads or case.unreadable:
        yield "dataset", object_store.dataset(case)
    if case.reads and store:
        yield "shape", _run(partial(shape.shape, case, store.url))


def _run(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 (a failing check must not hide the findings of the others)
        return problem(
            f"the check failed: {reason(error)} ({type(error).__name__})", "fix the cause, then run doctor again"
        )

"""A check of the Valkey or Redis cluster that hosts share."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from dataload.doctor.finding import Case, Finding, ok, problem, reason

# The fixes for errors of a server that answers but cannot be written.
FIXES = {
    "NoPermissionError": "give the user the rights ~dataload:* +get +set +eval +pexpire +hello, and in a cluster "
    "+cluster|slots +command",
    "OutOfMemoryError": "give it more memory, or, if only dataload uses it, set maxmemory-policy allkeys-lru",
    "ReadOnlyError": "name a primary: this is a replica",
}
SECONDS = 1  # until a key of this check expires, if it cannot be deleted
TRIED_KEYS = 256  # so many names cover all nodes


def cluster(case: Case) -> Finding:
    """Check that the servers answer, and that each takes, returns and deletes a key, as caching needs."""
    from dataload.cache.cluster.client import connect
    from dataload.cache.cluster.url import ClusterUrl

    if case.cache.cluster is None:
        return ok("no cluster is configured")
    address = ClusterUrl.parse(case.cache.cluster)
    try:
        with closing(connect(address)) as client:
            _write(client)
    except ImportError:
        return problem("the package valkey is missing", "pip install 'dataload[cluster]'")
    except Exception as error:  # noqa: BLE001 (clients raise errors of many types)
        if fix := FIXES.get(type(error).__name__):
            return problem(f"{address} cannot be used: {reason(error)}", fix)
        return problem(
            f"{address} does not answer: {reason(error)}",
            "check that it runs, that this host reaches its port, and that user and password are correct",
        )
    return ok(f"{address} can be read and written")


def _write(client: Any) -> None:
    """Write, read and delete a key on each primary. Raise any error of valkey."""
    from dataload.cache.cluster.client import EXPIRE_OWN

    names = [f"dataload:doctor:{number}" for number in range(TRIED_KEYS)]
    is_cluster = hasattr(client, "get_node_from_key")
    for name in {client.get_node_from_key(name).name if is_cluster else "": name for name in names}.values():
        client.set(name, b"", px=1000 * SECONDS)
        client.get(name)
        client.eval(EXPIRE_OWN, 1, name, b"", 0)

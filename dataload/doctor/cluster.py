"""Whether the cluster that hosts are to share answers."""

from __future__ import annotations

from dataload.doctor.finding import Case, Finding, ok, problem, reason


def cluster(case: Case) -> Finding:
    from dataload.cache.cluster.client import connect
    from dataload.cache.cluster.url import ClusterUrl
    from dataload.errors import ConfigError

    if case.cluster is None:
        return ok("none asked for")
    try:
        address = ClusterUrl.parse(case.cluster)
    except ConfigError as error:
        return problem("its address cannot be read", str(error))
    try:
        connect(address).close()
    except ImportError:
        return problem("the package valkey is missing", "pip install 'dataload[cluster]'")
    except Exception as error:  # noqa: BLE001 (a client raises anything)
        return problem(
            f"{address} does not answer: {reason(error)}",
            "is it running, is its port open to this host, are user and password right?",
        )
    return ok(f"{address} answers")

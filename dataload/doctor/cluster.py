"""A check of the Valkey or Redis cluster that hosts share."""

from __future__ import annotations

from dataload.doctor.finding import Case, Finding, ok, problem, reason


def cluster(case: Case) -> Finding:
    from dataload.cache.cluster.client import connect
    from dataload.cache.cluster.url import ClusterUrl
    from dataload.errors import ConfigError

    if case.cluster is None:
        return ok("no cluster is configured")
    try:
        address = ClusterUrl.parse(case.cluster)
    except ConfigError as error:
        return problem("the URL of the cluster is not valid", str(error))
    try:
        connect(address).close()
    except ImportError:
        return problem("the package valkey is missing", "pip install 'dataload[cluster]'")
    except Exception as error:  # noqa: BLE001 (clients raise errors of many types)
        return problem(
            f"{address} does not answer: {reason(error)}",
            "check that it runs, that this host reaches its port, and that user and password are correct",
        )
    return ok(f"{address} answers")

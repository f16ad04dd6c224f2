"""Serves the metrics of this process's loaders to Prometheus: `make_loader(metrics_port=...)`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dataload.errors import ConfigError
from dataload.loader.loader_metrics import measured
from dataload.runtime.forks import ForkAware
from dataload.telemetry.families import families

ALL_INTERFACES = "0.0.0.0"  # noqa: S104 (where Prometheus expects an exporter)

log = logging.getLogger(__name__)


class MetricsServer(ForkAware, Collector):
    """An HTTP server of the metrics, in a thread that ends with the process. A forked child has none.

    Args:
        port: Its port, on all interfaces.

    Raises:
        OSError: The port is taken, or not this user's to take.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(port, ALL_INTERFACES, registry)
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Leave the port to the parent."""
        self._server.socket.close()
        _ports_of_parent.update(_servers)
        _servers.clear()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all loaders."""
        yield from families(["loader", "rank"], measured[self._port].series())


_servers: dict[int, MetricsServer] = {}
_ports_of_parent: set[int] = set()  # of a forked child


def serve(port: int, metrics_port: int) -> None:
    """Serve the metrics of this process's loaders on this port, unless it does. metrics_port: that of local rank 0.

    Raises:
        ConfigError: The port is taken, perhaps by the process that forked this one.
    """
    if port in _servers:
        return
    try:
        _servers[port] = MetricsServer(port)
    except (OSError, OverflowError) as error:
        if port in _ports_of_parent:
            raise ConfigError(
                f"metrics_port={metrics_port}: the process that forked this one serves port {port}: pass another "
                "metrics_port here, or none"
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"metrics_port={metrics_port}: port {port}, which adds the local rank, cannot be used ({reason}): pass "
            "the first of as many free ports as this host has ranks"
        ) from error
    log.info("metrics for Prometheus: port %d, all interfaces", port)

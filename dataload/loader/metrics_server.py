"""Serves the metrics of this process's loaders to Prometheus: `make_loader(metrics_port=...)`.

They are read from the statistics of the loops when Prometheus asks for them, so a loop spends nothing on them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import ref

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dataload.cache.tier import Tier
from dataload.errors import ConfigError
from dataload.map_style import MapStyle
from dataload.mixture import Mixture
from dataload.runtime.forks import ForkAware
from dataload.runtime.text import few
from dataload.telemetry.loader_stats import LoaderStats, added
from dataload.telemetry.metrics import Series, families, gauges_of
from dataload.world import World

if TYPE_CHECKING:
    from dataload.loader.trainer_batches import LatestLoop

ALL_INTERFACES = "0.0.0.0"  # noqa: S104 (where Prometheus expects an exporter)

log = logging.getLogger(__name__)


class LoaderMetrics:
    """The metrics of a loader, and of those that are made again of the same rows.

    Args:
        label: Value of the label `loader`.
        rank: The data-parallel rank.

    Attributes:
        fingerprint: That of the rows.
    """

    def __init__(self, label: str, rank: int) -> None:
        self._labels = [label, str(rank)]
        # What earlier loops add up to, and the latest loop over each loader, the newest last. A scrape reads both.
        self._state: tuple[LoaderStats, list[tuple[ref[LatestLoop], LoaderStats]]] = LoaderStats(), []

    def read(self, dataset: MapStyle) -> None:
        """Be those of a loader of this dataset."""
        self.fingerprint = dataset.fingerprint
        self._tier: ref[Tier] = ref(dataset.datasets[0].blocks.tier)

    @property
    def is_over(self) -> bool:
        """Whether no loader has these metrics any more."""
        return all(loop() is None for loop, _ in self._state[1])

    def begin(self, loop: LatestLoop, stats: LoaderStats) -> None:
        """Begin a loop over a loader. loop: the latest one over it, which has these statistics from here on."""
        earlier, latest = self._state
        over, going_on = [earlier], []
        for owner, each in latest:
            if owner() in (None, loop):
                over.append(each)
            else:
                going_on.append((owner, each))
        self._state = added(over), [*going_on, (ref(loop), stats)]

    def series(self) -> Series:
        """Return what the metrics say now."""
        earlier, latest = self._state
        every = [stats for _, stats in latest]
        gauges = gauges_of(every[-1]) if every else {}
        tier = self._tier()
        if tier is not None and tier.shared and (used := tier.used_bytes) is not None:
            gauges |= {"cache_used_bytes": used, "cache_limit_bytes": tier.limit}
        return Series(self._labels, added([earlier, *every]), gauges)


class MetricsServer(ForkAware, Collector):
    """An HTTP server of the metrics, in a thread that ends with the process. A forked child has none.

    Args:
        port: Its port, on all interfaces.

    Raises:
        OSError: The port is taken, or not this user's to take.
    """

    def __init__(self, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(port, ALL_INTERFACES, registry)
        self._loaders: dict[str, LoaderMetrics] = {}  # by their labels
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Leave the port to the parent."""
        self._server.socket.close()
        _ports_of_parent.update(_servers)
        _servers.clear()

    def loader(self, dataset: MapStyle, rank: int) -> LoaderMetrics:
        """Return the metrics of a loader of a dataset: those of an earlier one, if this one is made in its place."""
        name = _name_of(dataset)
        labels = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        known = list(itertools.takewhile(self._loaders.__contains__, labels))
        of_name = [self._loaders[label] for label in known]
        same = (each for each in of_name if each.fingerprint == dataset.fingerprint)
        if (found := next(same, None) or next((each for each in of_name if each.is_over), None)) is None:
            label = f"{name}-{len(known) + 1}" if known else name
            found = self._loaders[label] = LoaderMetrics(label, rank)
        found.read(dataset)
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all loaders."""
        yield from families(["loader", "rank"], [each.series() for each in [*self._loaders.values()]])


_servers: dict[int, MetricsServer] = {}
_ports_of_parent: set[int] = set()  # of a forked child


def metrics_of(dataset: MapStyle, world: World, metrics_port: int) -> LoaderMetrics:
    """Return the metrics of a new loader, and serve them.

    Raises:
        ConfigError: The port is taken, perhaps by the process that forked this one.
    """
    port = metrics_port + (world.local_rank or 0)
    if port not in _servers:
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
    return _servers[port].loader(dataset, world.rank)


def _name_of(dataset: MapStyle) -> str:
    """Return the last part of the URL that a dataset was made of, or the names of a mixture's sources."""
    if isinstance(dataset, Mixture):
        return few(dataset.names)
    source = dataset.datasets[0].calls[0].given.found["source"]  # without credentials
    url = urlsplit(source.rpartition("@")[0] if isinstance(source, str) else source[0])
    name = PurePosixPath(url.path).name or url.netloc
    return name.encode(errors="replace").decode()  # A path on disk need not be UTF-8.

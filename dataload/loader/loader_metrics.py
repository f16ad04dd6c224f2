"""The metrics of this process's loaders, which Prometheus and OpenTelemetry ask for.

They are read from the statistics of the loops when they are asked for, so a loop spends nothing on them.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import ref

from dataload.cache.tier import Tier
from dataload.extras import required
from dataload.map_style import MapStyle
from dataload.mixture import Mixture
from dataload.runtime.forks import ForkAware
from dataload.runtime.text import few
from dataload.telemetry.loader_stats import LoaderStats, added
from dataload.telemetry.metrics import Series, gauges_of
from dataload.world import World

if TYPE_CHECKING:
    from dataload.loader.trainer_batches import LatestLoop


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


class MeasuredLoaders(ForkAware):
    """The metrics of the loaders of one port, by their labels. A forked child has none."""

    def __init__(self) -> None:
        self._loaders: dict[str, LoaderMetrics] = {}
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Leave the loaders to the parent."""
        self._loaders.clear()

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

    def series(self) -> list[Series]:
        """Return what the metrics of all loaders say now."""
        return [each.series() for each in [*self._loaders.values()]]


measured = defaultdict[int | None, MeasuredLoaders](MeasuredLoaders)
"""The loaders of this process by the port that serves them; None: no port does."""


def metrics_of(dataset: MapStyle, world: World, metrics_port: int | None) -> LoaderMetrics | None:
    """Return the metrics of a new loader, and offer them to Prometheus and OpenTelemetry; None if neither asks.

    Raises:
        ConfigError: The port is taken, perhaps by the process that forked this one.
    """
    port = None
    if metrics_port is not None:
        required("prometheus_client", "metrics", f"metrics_port={metrics_port}")
        from dataload.loader.metrics_server import serve

        port = metrics_port + (world.local_rank or 0)
        serve(port, metrics_port)
    if "opentelemetry.metrics" in sys.modules:
        from dataload.loader.open_telemetry import offer

        offer()
    elif port is None:
        return None
    return measured[port].loader(dataset, world.rank)


def _name_of(dataset: MapStyle) -> str:
    """Return the last part of the URL that a dataset was made of, or the names of a mixture's sources."""
    if isinstance(dataset, Mixture):
        return few(dataset.names)
    source = dataset.datasets[0].calls[0].given.found["source"]  # without credentials
    url = urlsplit(source.rpartition("@")[0] if isinstance(source, str) else source[0])
    name = PurePosixPath(url.path).name or url.netloc
    return name.encode(errors="replace").decode()  # A path on disk need not be UTF-8.

"""A forecast of how busy a job keeps its accelerators, from the order of its row groups and the speed of a host."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.errors import ConfigError
from dataload.planning.simulate import Epoch, Fetched

# Bytes a second of a connection; Amazon says 85 to 90 MB/s:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-design-patterns.html
CONNECTION = 90e6
ROUND_TRIPS = 4  # one after the other before the first row group is requested: a client, a listing, footers
MAY_BE_0 = ("start_seconds", "latency_ms")
WORTH_IT = 0.01  # of busy share; what gains less is no advice


@dataclass(frozen=True)
class Host:
    """The speed of a host on a dataset, as `dataload doctor URL --measure FILE` finds it.

    Args:
        cores: Processor cores.
        start_seconds: From the start of a process to its first request: imports, and making the loader.
        cpu_seconds_per_gb: Processor time to fetch, decode and cache 10**9 stored bytes.
        rows_per_second: Rows that one rank delivers from the cache.
        gbps: Gigabits a second from the origin.
        latency_ms: Milliseconds that a request waits.
    """

    cores: int
    start_seconds: float
    cpu_seconds_per_gb: float
    rows_per_second: float
    gbps: float
    latency_ms: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (0 if name in MAY_BE_0 else 1e-9) <= value < math.inf:
                raise ConfigError(f"{name} of a host must be a number above 0, not {value!r}")


# Milliseconds to the first byte: Amazon says "roughly 100-200 milliseconds" for small objects:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
TYPICAL = Host(cores=16, start_seconds=3.0, cpu_seconds_per_gb=5.0, rows_per_second=1e6, gbps=8.0, latency_ms=100.0)
TYPICAL_BYTES = 2e9  # of rows that a rank delivers in a second


@dataclass(frozen=True)
class Job:
    """A training job.

    Args:
        accelerators: Accelerators of all nodes, each fed by a rank of its own.
        nodes: Nodes.
        step_ms: Milliseconds that an accelerator computes for a batch.
        steps: Steps of an epoch.
        rows: Rows of an epoch.
        epochs: Epochs.
        host: The speed of a node.
    """

    accelerators: int
    nodes: int
    step_ms: float
    steps: int
    rows: int
    epochs: int
    host: Host

    def step_of(self, row: int) -> int:
        """Return the first row of the step that has this row."""
        return row * self.steps // self.rows * self.rows // self.steps


@dataclass(frozen=True)
class Forecast:
    """How busy a job keeps its accelerators.

    Args:
        busy_share: Ideal compute time over `seconds`, in [0, 1].
        seconds: From the start of the processes to the end of the last step.
        first_batch_seconds: From the start of the processes to the first step.
        epoch_seconds: Seconds of each epoch; the first one with the start.
        epochs: What a node fetches in each epoch, without the footers.
        cost: Price of all epochs for all nodes; None without prices.
        change: The one change that would help most, or "".
        changed_busy_share: The busy share with this change; None without one.
    """

    busy_share: float
    seconds: float
    first_batch_seconds: float
    epoch_seconds: tuple[float, ...]
    epochs: tuple[Fetched, ...]
    cost: float | None = None
    change: str = ""
    changed_busy_share: float | None = None


def forecast(epochs: Sequence[Epoch], job: Job) -> Forecast:
    """Return the forecast of a job whose epochs request these row groups.

    Time passes as rows are consumed, as fast as the accelerators compute or the ranks deliver. Row groups are requested
    when the loader has come to where it requests them. They share the wire in this order, and are then decoded on a
    core each. A step waits for the row groups that its rows lie in.
    """
    clock = _Clock(job)
    ends = [clock.read(epoch) for epoch in epochs]
    return Forecast(
        busy_share=len(ends) * job.steps * job.step_ms / 1e3 / ends[-1],
        seconds=ends[-1],
        first_batch_seconds=clock.first_batch_seconds,
        epoch_seconds=tuple(end - begin for begin, end in zip([0.0, *ends], ends, strict=False)),
        epochs=tuple(epoch.fetched for epoch in epochs),
    )


def with_change(found: Forecast, epochs: Sequence[Epoch], job: Job, cache_bytes: str) -> Forecast:
    """Return the forecast with the one change that would help most, if any is worth it.

    Args:
        found: The forecast of this job.
        epochs: What its epochs request.
        job: The job.
        cache_bytes: The size of a cache that holds everything.
    """
    host, warm = job.host, [Epoch()] * len(epochs)
    changes = {
        f"{2 * host.gbps:g} Gbit/s from the origin": (epochs, replace(host, gbps=2 * host.gbps)),
        f"{2 * host.cores} cores a node": (epochs, replace(host, cores=2 * host.cores)),
    }
    if any(epoch.requests for epoch in epochs[1:]):
        changes[f"a cache that holds everything (cache_bytes='{cache_bytes}')"] = ([epochs[0], *warm[1:]], host)
    else:
        changes["a cache that is warm before the accelerators start (dataload warm)"] = (warm, host)
    shares = {what: forecast(each, replace(job, host=of)).busy_share for what, (each, of) in changes.items()}
    best = max(shares, key=shares.__getitem__)
    if shares[best] < found.busy_share + WORTH_IT:
        return found
    return replace(found, change=best, changed_busy_share=shares[best])


class _Clock:
    """The time of a job at each row that it consumes."""

    def __init__(self, job: Job) -> None:
        self._job, self._host = job, (host := job.host)
        self._latency = host.latency_ms / 1e3
        ranks = -(-job.accelerators // job.nodes)
        delivered = host.rows_per_second * job.nodes * min(ranks, host.cores)
        self._row_seconds = max(job.step_ms / 1e3 * job.steps / job.rows, 1 / delivered)
        self._now = self._wire_free = host.start_seconds + ROUND_TRIPS * self._latency
        self._cores_free = [self._now] * host.cores
        self._position = 0  # in the epoch
        self._awaited = list[tuple[int, float]]()  # (position that needs a row group, when it is ready), a heap
        self.first_batch_seconds = 0.0

    def read(self, epoch: Epoch) -> float:
        """Read an epoch. Return when it ends."""
        for request in epoch.requests:
            self._consume(request.position)
            heapq.heappush(self._awaited, (self._job.step_of(request.needed), self._made(request.fetched)))
        self._consume(self._job.rows)
        self._awaited = [(max(0, needed - self._position), ready) for needed, ready in self._awaited]
        self._position = 0
        return self._now

    def _consume(self, position: int) -> None:
        while self._awaited and self._awaited[0][0] < position:
            needed, ready = heapq.heappop(self._awaited)
            self._pass(needed)
            self._now = max(self._now, ready)
        self._pass(position)

    def _pass(self, position: int) -> None:
        if position > self._position:
            self.first_batch_seconds = self.first_batch_seconds or self._now
            self._now += (position - self._position) * self._row_seconds
            self._position = position

    def _made(self, fetched: Fetched) -> float:
        """Return when a row group that is requested now has been fetched and decoded."""
        begin = max(self._now, self._wire_free)
        waits = self._latency + fetched.bytes / max(1, fetched.requests) / CONNECTION
        self._wire_free = begin + max(fetched.bytes * 8 / self._host.gbps / 1e9, fetched.requests * waits / IN_FLIGHT)
        arrived = max(self._wire_free + self._latency, begin + waits)
        core = max(arrived, heapq.heappop(self._cores_free))
        ready = core + fetched.bytes / 1e9 * self._host.cpu_seconds_per_gb
        heapq.heappush(self._cores_free, ready)
        return ready

"""What an epoch cost one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.filesize import decimal

from dataload.telemetry.wait_timeline import CAUSES, ELSEWHERE

TIERS = ("local", "cluster", "origin")
WORTH_SAYING = 0.05  # of the time
ADVICE = {
    "origin": "the origin is the limit: warm the cache first, or add hosts",
    "cluster": "the cluster is the limit: give it more nodes, or the hosts larger caches",
    "disk": "the cache's disk is the limit: put cache_dir on a faster one",
    "decode": "decoding is the limit: warm the cache first, or give the job more cores",
    "collate": "making batches is the limit: use group=, ragged='flat', or a larger batch",
    "transform": "transform is the limit: use num_workers, or make it cheaper",
    "transfer": "copying to the device is the limit: use pin_memory, or smaller dtypes",
}


@dataclass
class LoaderStats:
    """Figures of one epoch of one rank, running or over.

    seconds: from the first batch asked for to the last one given, or to the end; wait_seconds: of these, how long the
    training loop waited for batches; waits: for what, in seconds, by each of `dataload.telemetry.wait_timeline.CAUSES`.

    Each row group that the batches handed out so far use is counted once. hits: this host had its rows, in memory or in
    the cache. misses: it was fetched from the cluster or the origin, and decoded. bytes_local: bytes of the rows of all
    hits. bytes_cluster, bytes_origin, requests_origin: what was fetched for the misses. The first epoch to use a row
    group after it was fetched counts the miss, also when it was prefetched before that epoch began. Of ranks that share
    a cache, the rank that fetched the row group counts the miss, even if only other ranks of its node use the row
    group; the others count a hit. Row groups of less than 512 KiB share blocks; the row group for which a block was
    fetched counts the bytes of all of it.
    """

    epoch: int = 0
    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes_local: int = 0
    bytes_cluster: int = 0
    bytes_origin: int = 0
    requests_origin: int = 0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def waited(self, causes: Mapping[str, float], elsewhere: Callable[[], str]) -> None:
        """The training loop has waited, so many seconds for each cause. elsewhere: what others of this host are at."""
        for cause, seconds in causes.items():
            known = elsewhere() if cause == ELSEWHERE else cause or "collate"  # what hands a batch over is part of that
            self.waits[known] += seconds
            self.wait_seconds += seconds

    @property
    def stall_fraction(self) -> float:
        """Share of the time that the training loop waited, in [0, 1]."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the row groups that this host had, in [0, 1]; 1 when none was used."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    def __str__(self) -> str:
        read = f"cache hits {self.hit_rate:.1%}, " if self.hits + self.misses else ""
        shared = f"{decimal(int(self.bytes_cluster))} from the cluster, " if self.bytes_cluster else ""
        return (
            f"epoch {self.epoch}: {self.rows:,} rows in {self.seconds:.1f} s ({self.rows_per_second:,.0f} rows/s), "
            f"{self.stall_fraction:.0%} of it waiting{self._why()}; "
            f"{read}{shared}{decimal(int(self.bytes_origin))} from the origin"
        )

    def _why(self) -> str:
        """Of what cause most of the waiting was, and what to do about it."""
        cause = max(self.waits, key=self.waits.__getitem__)
        if self.stall_fraction < WORTH_SAYING:
            return ""
        rate = f" at {decimal(int(self.bytes_origin / self.seconds))}/s" if cause == "origin" else ""
        return f", {self.waits[cause] / self.wait_seconds:.0%} of that on {cause}{rate}: {ADVICE[cause]}"

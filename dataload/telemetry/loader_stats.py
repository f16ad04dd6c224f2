"""Statistics of one epoch on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import repeat
from operator import add
from typing import Any

from rich.filesize import decimal

from dataload.telemetry.wait_histogram import WaitHistogram
from dataload.telemetry.wait_timeline import CAUSES, ELSEWHERE

TRAFFIC = (
    *("hits", "misses", "bytes_local", "bytes_cluster", "bytes_origin"),
    *("requests_origin", "retries_origin", "requests_limited", "memory_bytes"),
)
BY_SOURCE = ("rows_by_source", "waits_by_source", "bytes_by_source")  # empty if the dataset is no mixture
NO_NUMBERS = ("waits", "wait_histogram", "skipped_row_ids")
PLACE = ("rank", "world_size", "total_batches", "settings")  # of which loop the figures are
LOADING = ("origin", "cluster", "disk", "decode", "map")  # causes of waits for row groups
QUANTILES = ("wait_p50", "wait_p95", "wait_p99", "wait_max")
MOST_SOURCES = 4  # named in one line
TIERS = ("local", "cluster", "origin")
MOST_ROW_IDS = 100  # of replaced rows, listed in the statistics
MIN_STALL = 0.05  # stall fraction below which no advice is given
MIN_WAIT = 0.5  # seconds of waits below which no advice is given
WARM_MAPPED = "call dataload.planning.warm.warm before the job"  # `dataload warm` cannot call the function of map
ADVICE = {
    "origin": "the origin is the limit: run `dataload warm` before the job, or add hosts",
    "in_flight": "in_flight of CacheConfig is the limit: raise it, run `dataload warm` before the job, or add hosts",
    "cluster": "the cluster is the limit: give it more nodes, or the hosts larger caches",
    "disk": "the cache's disk is the limit: put cache_dir on a faster one",
    "decode": "decoding is the limit: run `dataload warm` before the job, or give it more cores",
    "map": f"the function of map is the limit: use processes=, give the job more cores, or {WARM_MAPPED}",
    "collate": "making batches is the limit: use a larger batch, group= for many columns, or ragged='flat' for lists",
    "transform": "transform is the limit: use num_threads if it releases the interpreter lock, or else num_workers",
    "transfer": "copying to the device is the limit: use pin_memory, or smaller dtypes",
}
ADVICE_BESIDE = {  # (cause, setting in use): advice; the first setting counts
    ("origin", "no_cache"): "the origin is the limit: give the loader a cache, or add hosts",
    ("decode", "no_cache"): "decoding is the limit: give the loader a cache, or the job more cores",
    ("origin", "part"): "the cache holds only a part of the rows: raise cache_bytes, add hosts, or read fewer columns",
    ("decode", "part"): "the cache holds only a part of the rows: raise cache_bytes, add cores, or read fewer columns",
    ("origin", "map"): f"the origin is the limit: {WARM_MAPPED}, or add hosts",
    ("decode", "map"): f"decoding is the limit: {WARM_MAPPED}, or give the job more cores",
    ("map", "no_cache"): "the function of map is the limit: give the loader a cache, or the job more cores",
    ("map", "part"): "the cache holds only a part of the rows: raise cache_bytes, add cores, or read fewer columns",
    ("map", "processes"): f"the function of map is the limit: raise processes=, add cores, or {WARM_MAPPED}",
    ("collate", "collate_fn"): "collate_fn is the limit: use num_workers, or more of them",
    ("collate", "text"): (
        "making batches is the limit, above all lists of text: leave columns out with columns=, or use a larger batch"
    ),
    ("transform", "num_workers"): "transform is the limit: raise num_workers, or give the job more cores",
    ("transform", "num_threads"): (
        "transform is the limit: raise num_threads, or use num_workers if it holds the interpreter lock"
    ),
    ("transfer", "pin_memory"): "copying to the device is the limit: use smaller dtypes",
}


@dataclass
class LoaderStats:
    """Statistics of one epoch on one rank, running or complete.

    Each row group that the batches so far use is counted once, as a hit or as a miss. The first epoch to use a row
    group after it was fetched counts the miss, even if the row group was prefetched before that epoch began. Of ranks
    that share a cache, the rank that fetched the row group counts the miss, even if only other ranks of its node use
    it; the others count a hit. Row groups of less than 512 KiB share blocks: the row group for which a block was
    fetched counts all bytes of the block.

    Attributes:
        epoch: Number of the epoch, from 0.
        rows: Rows handed to the training loop.
        batches: Batches handed to the training loop.
        seconds: Time from the request of the first batch to the last batch, or to the end of the loop.
        wait_seconds: Part of `seconds` in which the training loop waited for batches.
        sync_seconds: Part of `seconds` that `fit` spent where ranks wait for each other; 0 in other loops.
        hits: Row groups whose rows this host had, in memory or in the cache.
        misses: Row groups that were fetched from the cluster or the origin and decoded.
        bytes_local: Bytes of the rows of all hits.
        bytes_cluster: Bytes fetched from the cluster for the misses.
        bytes_origin: Bytes fetched from the origin for the misses.
        requests_origin: Requests to the origin for the misses.
        retries_origin: Requests among them that were repeated after a transient error.
        requests_limited: Requests among them that waited because this process had its part of `in_flight` under way.
        memory_bytes: Most memory for row groups in flight, held and being decoded, the background decoder's included.
        skipped_rows: Rows that raised and were replaced (`on_error="skip"`), and documents that raised and were left
            out of packed sequences.
        skipped_row_ids: The numbers of the first `MOST_ROW_IDS` rows that were replaced.
        tokens: Values of packed documents, or tokens of a token budget, without padding.
        padding_tokens: Places of padding beside them.
        rows_by_source: `rows` by source of a mixture, by name. A replaced row counts for its own source.
        waits_by_source: The part of `wait_seconds` for the row groups of each source, by name.
        bytes_by_source: `bytes_cluster` and `bytes_origin` by source, by name.
        waits: `wait_seconds` by cause, one of `dataload.telemetry.wait_timeline.CAUSES`.
        wait_histogram: How long the loop waited for each batch. `WaitHistogram.merged` adds up those of several ranks.
        rank: The data-parallel rank.
        world_size: Number of data-parallel ranks; 0 if unknown, and for the sum of several ranks.
        total_batches: Batches of the whole loop, the rest of an epoch that was resumed; 0 if unknown.
        settings: Names that the advice depends on: no_cache, part (the cache holds a part of the rows), collate_fn,
            text (batches have lists of text), num_workers, num_threads, map, processes, pin_memory.
    """

    epoch: int = 0
    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    sync_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes_local: int = 0
    bytes_cluster: int = 0
    bytes_origin: int = 0
    requests_origin: int = 0
    retries_origin: int = 0
    requests_limited: int = 0
    memory_bytes: int = 0
    skipped_rows: int = 0
    skipped_row_ids: list[int] = field(default_factory=list)
    tokens: int = 0
    padding_tokens: int = 0
    rows_by_source: dict[str, int] = field(default_factory=dict)
    waits_by_source: dict[str, float] = field(default_factory=dict)
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    wait_histogram: WaitHistogram = field(default_factory=WaitHistogram)
    rank: int = 0
    world_size: int = 0
    total_batches: int = 0
    settings: list[str] = field(default_factory=list)

    def waited(self, causes: Mapping[str, float], elsewhere: Callable[[], str]) -> float:
        """Add a wait of the training loop. Return how long it waited for row groups, in seconds.

        Args:
            causes: Seconds by cause. `IDLE` counts as collating, which includes handing a batch over.
            elsewhere: Returns the cause of waits for another process of this host.
        """
        loading = 0.0
        for cause, seconds in causes.items():
            known = elsewhere() if cause == ELSEWHERE else cause or "collate"
            self.waits[known] += seconds
            self.wait_seconds += seconds
            loading += seconds if known in LOADING else 0.0
        return loading

    def waited_for(self, seconds: float, by_source: Mapping[str, float]) -> None:
        """Divide a wait for row groups among the sources of a mixture.

        Args:
            seconds: The wait.
            by_source: How long the maker of the batch waited for the row groups of each source.
        """
        total = sum(by_source.values())
        for name, part in by_source.items():
            if part:
                self.waits_by_source[name] = self.waits_by_source.get(name, 0.0) + seconds * part / total

    def count(
        self, rows: int, by_source: Mapping[str, int], skipped: Sequence[int], tokens: int = 0, padding: int = 0
    ) -> None:
        """Count a batch.

        Args:
            rows: Rows of the batch.
            by_source: Its rows by source of a mixture, always of all sources.
            skipped: Numbers of the rows that were replaced.
            tokens: Its values of packed documents.
            padding: Places of padding beside them.
        """
        self.tokens += tokens
        self.padding_tokens += padding
        self.rows += rows
        self.batches += 1
        if by_source:  # without a loop in Python: a mixture may have hundreds of sources
            earlier = self.rows_by_source.values() or repeat(0, len(by_source))
            self.rows_by_source = dict(zip(by_source, map(add, earlier, by_source.values()), strict=True))
        if skipped:
            self.skip(skipped)

    def skip(self, row_ids: Sequence[int]) -> None:
        """Count rows that were replaced, by their numbers."""
        self.skipped_rows += len(row_ids)
        self.skipped_row_ids = [*self.skipped_row_ids, *row_ids][:MOST_ROW_IDS]

    @property
    def wait_p50(self) -> float:
        """Median wait for a batch, in seconds, to within one bucket of `wait_histogram`."""
        return self.wait_histogram.quantile(0.5)

    @property
    def wait_p95(self) -> float:
        """95th percentile of the waits for a batch, in seconds."""
        return self.wait_histogram.quantile(0.95)

    @property
    def wait_p99(self) -> float:
        """99th percentile of the waits for a batch, in seconds."""
        return self.wait_histogram.quantile(0.99)

    @property
    def wait_max(self) -> float:
        """Longest wait for a batch, in seconds."""
        return self.wait_histogram.longest

    @property
    def stall_fraction(self) -> float:
        """Fraction of the time that the training loop waited, in [0, 1]."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        """Throughput of the epoch so far."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the epoch so far in values of packed documents, without padding."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def padding_share(self) -> float:
        """Fraction of padding in the packed sequences, in [0, 1]."""
        return self.padding_tokens / (self.tokens + self.padding_tokens) if self.padding_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of hits among the row groups, in [0, 1]. It is 1 if no row group was used."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON, with the quantiles of waits."""
        quantiles = {name: getattr(self, name) for name in QUANTILES}
        return {**asdict(self), **quantiles, "wait_histogram": self.wait_histogram.as_json()}

    def __str__(self) -> str:
        where = f"epoch {self.epoch}" + (f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else "")
        return f"{where}: {self.line()}"

    def line(self) -> str:
        """Return rows, waits, advice and traffic as one line, which doesn't say of which epoch or rank they are."""
        if not any((self.seconds, self.hits, self.misses, self.skipped_rows)):
            return "no rows read"
        read = f"cache hits {self.hit_rate:.1%}, " if self.hits + self.misses else ""
        skipped = f"{self.skipped_rows:,} rows that raised are skipped; " if self.skipped_rows else ""
        tokens = f", {self.tokens_per_second:,.0f} tokens/s, {self.padding_share:.2%} padding" if self.tokens else ""
        shared = f"{decimal(int(self.bytes_cluster))} from the cluster, " if self.bytes_cluster else ""
        return (
            f"{self.rows:,} rows in {self.seconds:.1f} s ({self.rows_per_second:,.0f} rows/s{tokens}), "
            f"{self.stall_fraction:.0%} of it waiting{self._advice()}; {skipped}"
            f"{read}{shared}{decimal(int(self.bytes_origin))} from the origin{self._sources()}"
        )

    def _sources(self) -> str:
        """Return rows, bytes and waits of the largest sources of a mixture, or nothing without sources."""
        if not self.rows_by_source:
            return ""
        largest = sorted(self.rows_by_source, key=self.rows_by_source.__getitem__, reverse=True)
        parts = []
        for name in largest[:MOST_SOURCES]:
            part = f"{name} {self.rows_by_source[name]:,} rows"
            if fetched := self.bytes_by_source.get(name, 0):
                part += f", {decimal(int(fetched))}"
            if (seconds := self.waits_by_source.get(name, 0.0)) > MIN_STALL * self.seconds:
                part += f", {seconds:.1f} s of the waits"
            parts.append(part)
        more = len(largest) - MOST_SOURCES
        return "; by source: " + "; ".join(parts) + (f"; and {more} more" if more > 0 else "")

    def _advice(self) -> str:
        """Return the main cause of the waits and a remedy, or nothing if the time was short."""
        if self.stall_fraction < MIN_STALL:
            return ": the loop itself is the limit" if self.seconds >= MIN_WAIT else ""
        if self.wait_seconds < MIN_WAIT:
            return ""
        cause = max(self.waits, key=self.waits.__getitem__)
        return f", {self.waits[cause] / self.wait_seconds:.0%} of that on {cause}: {self.advice(cause)}"

    def advice(self, cause: str) -> str:
        """Return the limit behind a cause of waits and a remedy, given the settings in use."""
        if cause == "origin" and self.requests_limited > self.requests_origin / 2:
            return ADVICE["in_flight"]
        beside = (ADVICE_BESIDE.get((cause, setting)) for setting in self.settings)
        return next(filter(None, beside), ADVICE[cause])


def summed(figures: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Return the sum of figures by name."""
    total: dict[str, Any] = {}
    for each in figures:
        for name, value in each.items():
            total[name] = total.get(name, 0) + value
    return total


def added(stats: Sequence[LoaderStats]) -> LoaderStats:
    """Return the sum of some statistics. Its epoch and settings are those of the first."""
    total = LoaderStats(stats[0].epoch, settings=stats[0].settings)
    for name in {each.name for each in fields(LoaderStats)} - {"epoch", *NO_NUMBERS, *PLACE, *BY_SOURCE}:
        setattr(total, name, sum(getattr(each, name) for each in stats))
    total.skipped_row_ids = [row for each in stats for row in each.skipped_row_ids][:MOST_ROW_IDS]
    total.wait_histogram = WaitHistogram.merged(each.wait_histogram for each in stats)
    for name in ("waits", *BY_SOURCE):
        setattr(total, name, summed(getattr(each, name) for each in stats))
    return total

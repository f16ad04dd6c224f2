"""The measurements of one system on one dataset: epochs from an empty cache on, and the accelerators fed by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from dataload.benchmarks.accelerators import Fed, search, utilization
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.suite.datasets import Dataset, Place
from dataload.benchmarks.suite.host import NO_ANSWER, Host, HostError
from dataload.benchmarks.suite.results import Feed, Run
from dataload.benchmarks.systems.base import BUCKET, Setting
from dataload.benchmarks.systems.registry import Entry

EPOCHS = 10
LEAST_EPOCHS = 3  # that are measured, unless the second takes much longer than the first
FLOOR_EPOCHS = 2
FEED_TRIES = 6
FEED_SECONDS = 1.0  # of warm epochs at one number of accelerators
PATIENCE_SECONDS = 60.0  # for start and exit of processes


@dataclass(frozen=True)
class Measurement:
    """The measurements of one system on one dataset in one round."""

    place: Place
    origin: Origin
    dataset: Dataset
    entry: Entry
    round: int
    epoch_seconds: float

    def is_alone(self, run: Run) -> bool:
        """Whether a run is the one of this system, dataset and round with one rank."""
        return (run.dataset, run.system, run.round, run.ranks) == (self.dataset.name, self.entry.name, self.round, 1)

    def epochs(self, ranks: int) -> tuple[Run, Feed | None]:
        """Measure epochs from an empty cache on, and with one rank the accelerators fed by later ones."""
        run = Run(self.dataset.name, self.entry.name, ranks, self.round)
        feed = Feed(run.dataset, run.system, run.round, "warm") if ranks == 1 and self.entry.kind != "floor" else None
        try:
            with self._fresh(ranks) as host:
                try:
                    self._read(host, run)
                    if feed:
                        self._warm_feed(host, run, feed)
                finally:
                    run.peak_bytes = host.memory.num_bytes
        except (HostError, OSError) as error:
            text = str(error) if run.epochs else self._why_nothing(error)
            run.error = run.error or ("" if len(run.epochs) >= LEAST_EPOCHS else text)
            if feed and not feed.tries:
                feed.error = text
        return run, feed

    def cold_feed(self, run: Run) -> Feed:
        """Measure the accelerators that first epochs feed, each in a fresh process and from an empty cache.

        Args:
            run: Its first epoch is the estimate.
        """
        feed = Feed(self.dataset.name, self.entry.name, self.round, "cold")
        started = time.monotonic()

        def measure(accelerators: int) -> float:
            with self._fresh(1) as host:
                epoch = host.epoch(0, accelerators * self._unit)
                return utilization(epoch.compute_seconds, epoch.total_seconds)

        def enough(found: list[Fed]) -> bool:
            return len(found) >= FEED_TRIES or time.monotonic() - started > self.epoch_seconds

        if not run.epochs:
            feed.error = run.error
            return feed
        first = run.epochs[0]
        try:
            search(_kept(measure, feed.tries), first.rows / first.seconds / self._unit, enough)
        except (HostError, OSError) as error:
            text = str(error) if feed.tries else self._why_nothing(error)
            feed.error = "" if any(fed.is_busy for fed in feed.tries) else text
        return feed

    def _read(self, host: Host, run: Run) -> None:
        most = FLOOR_EPOCHS if self.entry.kind == "floor" else EPOCHS
        self.origin.reset()
        while len(run.epochs) < most:
            epoch = host.epoch(len(run.epochs))
            run.check(epoch, self.dataset.truth, ordered=self.entry.kind == "floor")
            run.epochs.append(epoch)
            run.origin_bytes.append(self.origin.stats()["get_bytes"])
            if len(run.epochs) == 1:
                self._extend(host, epoch.seconds)
            spent = sum(each.seconds for each in run.epochs)
            if len(run.epochs) >= LEAST_EPOCHS and spent > self.epoch_seconds:
                break

    def _warm_feed(self, host: Host, run: Run, feed: Feed) -> None:
        number = len(run.epochs)
        started = time.monotonic()

        def measure(accelerators: int) -> float:
            nonlocal number
            compute = total = 0.0
            while total < FEED_SECONDS:
                epoch = host.epoch(number, accelerators * self._unit)
                number += 1
                compute, total = compute + epoch.compute_seconds, total + epoch.total_seconds
                if not epoch.total_seconds:  # an epoch of one step
                    break
            return utilization(compute, total)

        def enough(found: list[Fed]) -> bool:
            return len(found) >= FEED_TRIES or time.monotonic() - started > self.epoch_seconds / 2

        warm = median(epoch.seconds for epoch in run.epochs[1:])
        self._extend(host, warm)
        search(_kept(measure, feed.tries), self.dataset.truth.rows / warm / self._unit, enough)

    def _extend(self, host: Host, epoch_seconds: float) -> None:
        """Give a host the time of a few more epochs, as far as the run's limit allows."""
        host.extend(min(self.place.seconds_left, LEAST_EPOCHS * epoch_seconds))

    @property
    def _unit(self) -> float:
        return self.dataset.workload.accelerator.rows_per_second

    def _why_nothing(self, error: Exception) -> str:
        """Return why a system has no figures. At the end of the whole run it may have got a second only."""
        was_cut_off = self.place.seconds_left <= 0 and str(error).startswith(NO_ANSWER)
        return self._limit if was_cut_off else str(error)

    @property
    def _limit(self) -> str:
        return f"not run: the limit of {self.place.seconds / 60:g} minutes was reached"

    @contextmanager
    def _fresh(self, ranks: int) -> Iterator[Host]:
        """Yield a host of fresh processes with an empty cache. Raise HostError if they cannot start."""
        python, left = self.place.python(self.entry), self.place.seconds_left
        failed = self.dataset.conversions.get(self.entry.name, {}).get("error")
        if python is None:
            raise HostError("not run: its environment does not exist (make peers)")
        if failed:
            raise HostError(f"not converted: {failed}")
        if left <= 0:
            raise HostError(self._limit)
        patience = min(left, PATIENCE_SECONDS + LEAST_EPOCHS * self.epoch_seconds)
        with TemporaryDirectory(dir=self.place.folder, ignore_cleanup_errors=True) as scratch:
            cache = Path(scratch) / "cache"
            cache.mkdir()
            with Host(python, self.entry.name, self._setting(cache, ranks), Path(scratch), patience) as host:
                host.wait_until_ready()
                yield host

    def _setting(self, cache: Path, ranks: int) -> Setting:
        dataset, bucket = self.dataset, self.place.data / BUCKET
        return Setting(
            workload=dataset.workload,
            endpoint_url=self.origin.endpoint_url,
            prefix=str((dataset.folder / "parquet").relative_to(bucket)),
            converted=str((dataset.folder / self.entry.module).relative_to(bucket)),
            files=dataset.folder / "parquet",
            cache_dir=cache,
            num_workers=self.entry.workers and max(1, self.entry.workers // ranks),
            ranks=ranks,
        )


def _kept(measure: Callable[[int], float], tries: list[Fed]) -> Callable[[int], float]:
    """Return `measure`, which also appends to `tries`, so that an error loses no measurement."""

    def measured(accelerators: int) -> float:
        tries.append(Fed(accelerators, measure(accelerators)))
        return tries[-1].utilization

    return measured

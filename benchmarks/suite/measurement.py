"""The measurement of one job: ten epochs of a system on a dataset, from the start of its processes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from dataload.benchmarks.origin import Origin
from dataload.benchmarks.suite.datasets import CONVERSION_SECONDS, Dataset, Place, convert, ready
from dataload.benchmarks.suite.host import Host, HostError, Stopped
from dataload.benchmarks.suite.results import Run
from dataload.benchmarks.systems.base import BUCKET, Setting
from dataload.benchmarks.systems.registry import Entry

EPOCHS = 10
LIMIT = 10  # A job is stopped once it has taken this many times the ideal time of all epochs,
LEAST_LIMIT_SECONDS = 30.0  # but not earlier than this.


@dataclass(frozen=True)
class Measurement:
    """The measurement of one system on one dataset with a number of ranks, in one round."""

    place: Place
    origin: Origin
    dataset: Dataset
    entry: Entry
    ranks: int
    round: int

    def run(self, say: Callable[[str], object]) -> Run:
        """Run the job in fresh processes with an empty cache."""
        run = Run(self.dataset.name, self.entry.name, self.ranks, self.round)
        limit = max(LEAST_LIMIT_SECONDS, LIMIT * EPOCHS * self.dataset.epoch_seconds)
        try:
            if self.entry.converts:
                run.conversion_seconds = convert(self.dataset, self.entry, self.place, say)
            ready(self.dataset.folder / (self.entry.module if self.entry.converts else "parquet"))
            self._read(run, limit)
        except subprocess.TimeoutExpired:
            run.conversion_seconds, run.stopped_after = CONVERSION_SECONDS, 0.0
        except Stopped:
            run.stopped_after = limit
        except (HostError, OSError) as error:
            run.error = str(error)
        finally:
            shutil.rmtree(self.place.scratch, ignore_errors=True)
        return run

    def _read(self, run: Run, limit: float) -> None:
        python, scratch = self.place.python(self.entry), self.place.scratch
        assert python
        shutil.rmtree(scratch, ignore_errors=True)  # of a job that was killed
        cache = scratch / "cache"
        cache.mkdir(parents=True)
        self.origin.reset()
        setting, rows_per_second = self._setting(cache), self.dataset.rows_per_second
        with Host(python, self.entry.name, setting, rows_per_second, scratch, limit) as host:
            try:
                run.import_seconds = host.wait_until_imported()
                while len(run.epochs) < EPOCHS:
                    epoch = host.epoch()
                    run.check(epoch, self.dataset.truth)
                    run.epochs.append(epoch)
                    run.origin_bytes.append(self.origin.stats()["get_bytes"])
            finally:
                run.peak_bytes = host.memory.num_bytes

    def _setting(self, cache: Path) -> Setting:
        dataset, bucket = self.dataset, self.place.data / BUCKET
        return Setting(
            workload=dataset.workload,
            endpoint_url=self.origin.endpoint_url,
            prefix=str((dataset.folder / "parquet").relative_to(bucket)),
            converted=str((dataset.folder / self.entry.module).relative_to(bucket)),
            files=dataset.folder / "parquet",
            cache_dir=cache,
            num_workers=self.entry.workers and max(1, self.entry.workers // self.ranks),
            ranks=self.ranks,
        )


def in_short(run: Run) -> str:
    """Return a line of progress."""
    ends = " ".join(f"{epoch.seconds:.1f}" for epoch in run.epochs)
    stopped = "" if run.stopped_after is None else f"stopped after {run.stopped_after:.0f} s"
    told = ", ".join(filter(None, [stopped, run.error, *run.problems[:1]]))
    return f"{run.dataset}, {run.system}, ranks {run.ranks}: {ends} s, {decimal(run.peak_bytes)} {told}".rstrip()

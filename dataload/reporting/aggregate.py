"""Aggregation of the ranks' statistics by epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from statistics import median_low

import numpy as np
import numpy.typing as npt

from dataload.runtime.cached_property import cached_property
from dataload.telemetry.loader_stats import LoaderStats, added
from dataload.telemetry.stats_log import CLOCKS, Pass
from dataload.telemetry.stragglers import LATE, excess

THROUGHPUT_SPANS = 240  # of time, in the throughput of a run

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Epoch:
    """One epoch of all ranks.

    Args:
        number: Number of the epoch.
        restarts: How often the epoch was begun before.
        ranks: The pass of each rank.
        pause: Seconds between the last sample of the epoch before and this epoch's start.
        restarted: Whether other processes than those of the epoch before began it.
    """

    number: int
    restarts: int
    ranks: dict[int, Pass]
    pause: float = 0.0
    restarted: bool = False

    @property
    def name(self) -> str:
        """The number and, for a repeated epoch, a counter: "3", "3 (1)", "3 (2)"."""
        return f"{self.number}" + (f" ({self.restarts})" if self.restarts else "")

    def has(self, record: Pass) -> bool:
        """Return whether a pass belongs to this attempt at the epoch: whether it overlaps another pass in time.

        The pass must not begin earlier than those of `ranks`.

        Notes: a rank may begin late, or be killed before it writes; and clocks differ.
        """
        return record.rank not in self.ranks and any(
            record.world_size == other.world_size and record.began <= other.until + CLOCKS
            for other in self.ranks.values()
        )

    @property
    def began(self) -> float:
        """Start of the first rank, in seconds since 1970."""
        return min(record.began for record in self.ranks.values())

    @property
    def until(self) -> float:
        """Last sample of any rank, in seconds since 1970."""
        return max(record.until for record in self.ranks.values())

    @property
    def ended(self) -> bool:
        """Whether all ranks reached the end of the epoch."""
        return all(record.ended for record in self.ranks.values())

    @cached_property
    def total(self) -> LoaderStats:
        """Statistics over all ranks: counts summed, seconds averaged."""
        return over_ranks([record.stats for record in self.ranks.values()])

    def stragglers(self) -> dict[int, float]:
        """Return the ranks that held the others up, and how many seconds longer than the median rank each took.

        Notes: ranks that train together finish an epoch together. A rank that waits for data, or computes longer, holds
        the others up in the optimizer step, where their own loaders do not see it. `fit` measures how long they wait
        there: the rank that waits least is the straggler. In other loops, a rank that computes longer shows only if it
        does not wait for the others in each step.
        """
        waited, alone = self._waited(), self._alone()
        late = {rank: max(waited[rank], alone[rank]) for rank in self.ranks}
        return {rank: seconds for rank, seconds in late.items() if seconds > LATE * self.total.seconds}

    def _waited(self) -> dict[int, float]:
        """Return how many seconds longer than the median rank each waited for data."""
        return excess({rank: record.stats.wait_seconds for rank, record in self.ranks.items()})

    def _alone(self) -> dict[int, float]:
        """Return how many seconds longer than the median rank each took where it waits for no other."""
        every = {rank: record.stats for rank, record in self.ranks.items()}
        batches = median_low(stats.batches for stats in every.values())  # Samples are of different times.
        scale = {rank: batches / max(1, stats.batches) for rank, stats in every.items()}
        seconds = {rank: scale[rank] * (stats.seconds - stats.sync_seconds) for rank, stats in every.items()}
        longer = excess(seconds)
        if all(stats.sync_seconds for stats in every.values()):
            return longer
        # One that began earlier may have waited for the others in its first step.
        later = excess({rank: record.began + seconds[rank] for rank, record in self.ranks.items()})
        return {rank: min(longer[rank], later[rank]) for rank in every}

    def late(self) -> list[str]:
        """Return a line for each straggler, the slowest first: its rank, host, delay, cause and the remedy."""
        lines, waited = [], self._waited()
        for rank, seconds in sorted(self.stragglers().items(), key=itemgetter(1), reverse=True):
            record = self.ranks[rank]
            if waited[rank] < seconds / 2:
                lines.append(
                    f"rank {rank} ({record.host}) took {seconds:.1f} s longer than the median rank in its own steps, "
                    "not for data: compare its processor or GPU, what else runs there, and what this rank does alone"
                )
                continue
            cause = max(record.stats.waits, key=record.stats.waits.__getitem__)
            delay = f"rank {rank} ({record.host}) waited {seconds:.1f} s longer for data than the median rank"
            lines.append(f"{delay}, mostly on {cause}: {record.stats.advice(cause)}")
        return lines


def whole(found: Sequence[Epoch]) -> LoaderStats:
    """Return the statistics of a run: those of all its epochs over all ranks, seconds included, summed."""
    total = added([epoch.total for epoch in found])
    total.memory_bytes = max(epoch.total.memory_bytes for epoch in found)
    return total


def over_ranks(stats: Sequence[LoaderStats]) -> LoaderStats:
    """Return the statistics of one epoch over several ranks: counts summed, seconds averaged."""
    total = added(stats)
    for name in ("seconds", "wait_seconds", "sync_seconds"):
        setattr(total, name, getattr(total, name) / len(stats))
    for name in ("waits", "waits_by_source"):
        setattr(total, name, {key: value / len(stats) for key, value in getattr(total, name).items()})
    return total


def epochs(passes: Sequence[Pass]) -> list[Epoch]:
    """Return the epochs in the order in which they began. `passes` must be in that order, too."""
    found: list[Epoch] = []
    latest: dict[int, Epoch] = {}
    for record in passes:
        number = record.stats.epoch
        before = latest.get(number)
        if before is None or not before.has(record):
            latest[number] = Epoch(number, 0 if before is None else before.restarts + 1, {})
            found.append(latest[number])
        latest[number].ranks[record.rank] = record
    ordered = [replace(epoch, ranks=dict(sorted(epoch.ranks.items()))) for epoch in found]
    return ordered[:1] + [_after(before, epoch) for before, epoch in pairwise(ordered)]


def _after(before: Epoch, epoch: Epoch) -> Epoch:
    """Return an epoch with what came between the one before and it."""
    # A process that had a part in the epoch before had begun its first loop by then.
    started = max(record.started for record in epoch.ranks.values())
    return replace(epoch, pause=max(0.0, epoch.began - before.until), restarted=started > before.until)


def throughput(passes: Sequence[Pass]) -> tuple[Floats, dict[int, Floats]]:
    """Return the edges of time spans of the run, and each rank's throughput in each span.

    Args:
        passes: The passes of all ranks.

    Returns:
        Edges in seconds since the run began: float64 [S + 1]. Rows per second by rank: float64 [S]. S is about
        `THROUGHPUT_SPANS`, and each epoch has at least one span.

    Notes: no span crosses the border of two epochs. Otherwise the pauses between epochs would show as a pattern.
    """
    first = min(record.began for record in passes)
    times: defaultdict[int, list[float]] = defaultdict(list)
    rows: defaultdict[int, list[float]] = defaultdict(list)
    for record in passes:
        before = rows[record.rank][-1] if rows[record.rank] else 0
        times[record.rank] += [
            record.began - first,
            *(record.began - first + sample.seconds for sample in record.samples),
        ]
        rows[record.rank] += [before, *(before + sample.rows for sample in record.samples)]
    end = max(max(of_rank) for of_rank in times.values())
    turns = [*(epoch.began - first for epoch in epochs(passes)), end]
    rate = THROUGHPUT_SPANS / (end or 1)
    spans = [(start, stop, max(1, round(rate * (stop - start)))) for start, stop in pairwise(turns)]
    edges = np.unique(np.concatenate([np.linspace(start, stop, parts + 1) for start, stop, parts in spans]))
    return edges, {rank: np.diff(np.interp(edges, times[rank], rows[rank])) / np.diff(edges) for rank in sorted(times)}

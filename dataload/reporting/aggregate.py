"""What the ranks wrote, put together epoch by epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import itemgetter
from statistics import fmean, median_low

import numpy as np
import numpy.typing as npt

from dataload.telemetry.loader_stats import ADVICE, LoaderStats
from dataload.telemetry.stats_log import Pass
from dataload.telemetry.wait_timeline import CAUSES

AVERAGED = ("seconds", "wait_seconds")
LATE = 0.05  # of an epoch: who waited so much longer than the others held them up
CLOCKS = 2.0  # seconds that hosts' clocks may be apart

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Epoch:
    """One epoch of all ranks. again: how often it had been begun before; ranks: their passes."""

    number: int
    again: int
    ranks: dict[int, Pass]

    @property
    def name(self) -> str:
        """As files are named that are there already: "3", "3 (1)", "3 (2)"."""
        return f"{self.number}" + (f" ({self.again})" if self.again else "")

    def has(self, one: Pass) -> bool:
        """Whether a rank's pass that began no earlier than these is of this very epoch: they overlap in time.

        Notes: a rank may begin late, or have been killed before it wrote; and clocks differ.
        """
        return one.rank not in self.ranks and any(
            one.world_size == other.world_size and one.began <= other.until + CLOCKS for other in self.ranks.values()
        )

    @property
    def began(self) -> float:
        """The first rank, in seconds since 1970."""
        return min(one.began for one in self.ranks.values())

    @property
    def until(self) -> float:
        """The last sample of any rank, in seconds since 1970."""
        return max(one.until for one in self.ranks.values())

    @property
    def ended(self) -> bool:
        return all(one.ended for one in self.ranks.values())

    @property
    def total(self) -> LoaderStats:
        """Over ranks: counts added up, seconds averaged."""
        return added([one.stats for one in self.ranks.values()])

    def stragglers(self) -> dict[int, float]:
        """Ranks that the others had to wait for, as seconds that they waited longer than the median rank.

        Notes: ranks that train together are as long at an epoch, all of them; but who waits for data keeps the others
        waiting in the step, which their own loaders do not see.
        """
        usual = median_low(one.stats.wait_seconds for one in self.ranks.values())
        least = LATE * self.total.seconds
        late = {rank: one.stats.wait_seconds - usual for rank, one in self.ranks.items()}
        return {rank: more for rank, more in late.items() if more > least}

    def late(self) -> list[str]:
        """A line for each straggler, the latest first: who, by how much, and what to change there."""
        lines = []
        for rank, more in sorted(self.stragglers().items(), key=itemgetter(1), reverse=True):
            one = self.ranks[rank]
            cause = max(one.stats.waits, key=one.stats.waits.__getitem__)
            said = f"rank {rank} ({one.host}) waited {more:.1f} s longer for data than the median rank"
            lines.append(f"{said}, mostly on {cause}: {ADVICE[cause]}")
        return lines


def added(stats: Sequence[LoaderStats]) -> LoaderStats:
    """Several ranks' figures of one epoch as one: counts added up, seconds averaged."""
    total = LoaderStats(stats[0].epoch)
    for field in fields(LoaderStats):
        if field.name not in ("epoch", "waits"):
            values = [getattr(one, field.name) for one in stats]
            setattr(total, field.name, fmean(values) if field.name in AVERAGED else sum(values))
    total.waits = {cause: fmean(one.waits[cause] for one in stats) for cause in CAUSES}
    return total


def epochs(passes: Sequence[Pass]) -> list[Epoch]:
    """In the order in which they were begun, as `passes` have to be."""
    found: list[Epoch] = []
    latest: dict[int, Epoch] = {}
    for one in passes:
        number = one.stats.epoch
        before = latest.get(number)
        if before is None or not before.has(one):
            latest[number] = Epoch(number, 0 if before is None else before.again + 1, {})
            found.append(latest[number])
        latest[number].ranks[one.rank] = one
    return [replace(epoch, ranks=dict(sorted(epoch.ranks.items()))) for epoch in found]


def throughput(passes: Sequence[Pass], points: int = 240) -> tuple[Floats, dict[int, Floats]]:
    """Edges of spans of the run, in seconds since it began, and the rows per second in each, by rank.

    Notes: each epoch is cut into spans of its own, `points` of them in all, or one each where there are more epochs:
    the ends of epochs, where nothing comes, would else show as a pattern.
    """
    first = min(one.began for one in passes)
    times: defaultdict[int, list[float]] = defaultdict(list)
    rows: defaultdict[int, list[float]] = defaultdict(list)
    for one in passes:
        before = rows[one.rank][-1] if rows[one.rank] else 0
        times[one.rank] += [one.began - first, *(one.began - first + sample.seconds for sample in one.samples)]
        rows[one.rank] += [before, *(before + sample.rows for sample in one.samples)]
    end = max(max(of_rank) for of_rank in times.values())
    turns = [*(epoch.began - first for epoch in epochs(passes)), end]
    spans = [(start, stop, max(1, round(points * (stop - start) / (end or 1)))) for start, stop in pairwise(turns)]
    edges = np.unique(np.concatenate([np.linspace(start, stop, parts + 1) for start, stop, parts in spans]))
    return edges, {rank: np.diff(np.interp(edges, times[rank], rows[rank])) / np.diff(edges) for rank in sorted(times)}

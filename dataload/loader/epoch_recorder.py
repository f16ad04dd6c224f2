"""The record of an epoch: the statistics of its batches, waits and row groups, and the log of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from dataload.loader.lookahead import RecordedNeeds
from dataload.loader.ranks import process_among
from dataload.loader.requests import Answer
from dataload.loader.stall import awaited_by
from dataload.map_style import MapStyle
from dataload.samplers.rank_sampler import RankSampler
from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.row_group_accounts import Served
from dataload.telemetry.stalls import LoopWait, watched
from dataload.telemetry.stats_log import Samples
from dataload.telemetry.wait_timeline import Timeline


@dataclass
class EpochRecorder:
    """Adds each batch of an epoch, and the wait for it, to the statistics.

    Args:
        stats: The statistics of the epoch.
        served: Counts the row groups.
        samples: Writes the log.
        needs: The row groups that the lookahead requested.
        usual_cause: Returns the cause of waits for another process of this host.
        waiting: Timeline of the thread that takes the batches.
        wait: Its present wait.
    """

    stats: LoaderStats
    served: Served
    samples: Samples
    needs: RecordedNeeds
    usual_cause: Callable[[], str]
    waiting: Timeline
    wait: LoopWait

    def __post_init__(self) -> None:
        self._started = perf_counter()

    def timed(self, answers: Iterator[Answer]) -> Generator[Answer, None, None]:
        """Yield the answers, and charge the waits for them and for the end."""
        stats, wait = self.stats, self.wait
        while True:
            requested = wait.since = perf_counter()
            answer = next(answers, None)
            now = perf_counter()
            wait.since = 0.0
            loading = stats.waited(self.waiting.take(requested, now), self.usual_cause)
            stats.seconds = now - self._started
            if answer is None:
                return
            stats.wait_histogram.add(now - requested)
            stats.count(answer.rows, answer.by_source, [*answer.skipped.values()], answer.tokens, answer.padding)
            stats.skipped_rows += answer.left_out
            stats.waited_for(loading, answer.loading)
            yield answer

    def hand_out(self, answer: Answer, used: int, *, last: bool) -> None:
        """Count the row groups of a batch that is handed out next, and write a sample if one is due.

        Args:
            answer: The batch.
            used: Rows of the epoch up to the end of its global batch.
            last: Whether it is the last batch of the epoch.
        """
        self.served.use(answer.row_groups, self.needs.before(used))
        self.samples.take(last=last)


@contextmanager
def recorded(
    dataset: MapStyle,
    sampler: RankSampler,
    stats: LoaderStats,
    needs: RecordedNeeds,
    *,
    folder: Path | None,
    stall_warning: float,
    num_workers: int,
    in_flight: int,
) -> Iterator[EpochRecorder]:
    """Record an epoch for the duration of the block. The last sample in the log has the final counts.

    Args:
        dataset: The dataset.
        sampler: Its order.
        stats: The statistics of the epoch.
        needs: As for `EpochRecorder`.
        folder: Folder of the log; None for no log.
        stall_warning: Seconds from which on a wait is logged.
        num_workers: Processes that make the batches; 0: threads of this process do.
        in_flight: Batches that these make at the same time, at most.
    """
    scheduler = dataset.rowstore.scheduler
    served = Served(stats, scheduler.ledger, dataset.rowstore.size_of, in_flight, dataset.source_of)
    process = None if folder is None else process_among(sampler.num_replicas)
    waiting, rank = Timeline(), f"rank {sampler.rank} of {sampler.num_replicas}"

    def describe(seconds: float) -> str:
        what = awaited_by(waiting, scheduler, num_workers)
        return f"{rank} has waited {seconds:.0f} s for its next batch, on {what}"

    wait = LoopWait(stall_warning, describe)
    with (
        Samples(folder, stats, process) as samples,
        closing(served),
        watched(wait),
    ):
        yield EpochRecorder(stats, served, samples, needs, scheduler.usual_cause, waiting, wait)

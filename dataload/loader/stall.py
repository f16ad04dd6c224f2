"""What a loop that has stalled waits for, as text."""

from __future__ import annotations

from dataload.rows.row_group_load import RowGroupLoad, State
from dataload.rows.scheduler import RowGroupScheduler
from dataload.runtime.text import counted
from dataload.telemetry.wait_timeline import ELSEWHERE, Timeline


def awaited_by(waiting: Timeline, scheduler: RowGroupScheduler, num_workers: int) -> str:
    """Return what a loop waits for: the cause, and the row group with its URL.

    Args:
        waiting: The timeline of the loop's thread.
        scheduler: Makes the row groups of this process.
        num_workers: Processes that make the batches; 0: threads of this process do.
    """
    load = scheduler.awaited_load
    if num_workers:
        row_group = "" if load is None else f", while this process prepares the cache: {_of(load, scheduler)}"
        return f"{counted(num_workers, 'worker')}{row_group}"
    cause = waiting.present
    if load is None or cause in ("transform", "transfer"):
        return cause or "collate"
    return _of(load, scheduler)


def _of(load: RowGroupLoad, scheduler: RowGroupScheduler) -> str:
    row_group = load.cache.describe(load.number)
    if load.timeline.present == ELSEWHERE:
        holder = load.cache.holder(load.number)
        return f"{'another process or host' if holder is None else f'process {holder}'}, which makes {row_group}"
    cause = load.timeline.present or scheduler.usual_cause()
    # Whoever decodes is told so by the cause, which is "map" while a function of the user runs.
    state = "" if load.state is State.DECODING else f" ({load.state.value})"
    return f"{cause}{state}: {row_group}"

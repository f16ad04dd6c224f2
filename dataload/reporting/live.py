"""What a run does now, from the last lines of its ranks: as figures, and as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from dataload.reporting.aggregate import Epoch, over_ranks
from dataload.runtime.text import counted, duration, precise
from dataload.telemetry.loader_stats import MIN_STALL, QUANTILES, TIERS, LoaderStats
from dataload.telemetry.stats_log import FINENESS, Pass

SILENT = 30.0  # seconds without a line, from which on a rank is called silent; later in an epoch, lines come less often
WIDE_TERMINAL = 120  # columns
MANY_WAITS = 0.01  # of the time: a cause that waits name

Figures = dict[str, Any]


def figures(passes: Mapping[int, Pass], now: float) -> Figures:
    """Return what a run does now, as JSON can hold it.

    Args:
        passes: The latest pass of each rank, see `read_latest`.
        now: The time, in seconds since 1970.
    """
    newest = max(passes.values(), key=lambda each: each.began)
    # Ranks that the world has no longer are of an earlier start.
    present = {rank: each for rank, each in passes.items() if each is newest or rank < (newest.world_size or rank + 1)}
    together = {rank: each for rank, each in present.items() if each.stats.epoch == newest.stats.epoch}
    of_ranks = {rank: _of_rank(each, now) for rank, each in sorted(present.items())}
    states = {each["state"] for each in of_ranks.values()}
    running = [each for each in of_ranks.values() if each["state"] == "running"]
    slowest = max(of_ranks, key=lambda rank: of_ranks[rank]["stall_fraction"])
    total = over_ranks([each.stats for each in present.values()])
    to_go = [each["seconds_to_go"] for each in running]
    return {
        "epoch": newest.stats.epoch,
        "state": "running" if running else "ended" if states == {"ended"} else "silent",
        "seconds_since": min(each["seconds_since"] for each in of_ranks.values()),
        "seconds_to_go": None if None in to_go else max(to_go, default=None),
        "missing": max(0, newest.world_size - len(present)),
        **_of_stats(total),
        "total_batches": sum(each["total_batches"] for each in of_ranks.values()),
        "rows_per_second": sum(each["rows_per_second"] for each in running),
        "slowest": slowest,
        "advice": _advice(present[slowest]),
        "late": Epoch(newest.stats.epoch, 0, together).late(),
        "ranks": {str(rank): each for rank, each in of_ranks.items()},
    }


def _of_rank(record: Pass, now: float) -> Figures:
    stats, since = record.stats, max(0.0, now - record.until)
    silent = since > SILENT + 3 * stats.seconds / FINENESS
    state = "ended" if record.ended else "silent" if silent else "running"
    (start, before), (end, rows) = record.samples[0], record.samples[-1]
    rate = (rows - before) / (end - start) if end > start else stats.rows_per_second
    left = stats.total_batches - stats.batches
    can_tell = stats.total_batches and stats.batches and rate
    return {
        "host": record.host,
        "epoch": stats.epoch,
        "state": state,
        "seconds_since": since,
        "seconds_to_go": max(0, left) * stats.rows / stats.batches / rate if can_tell else None,
        **_of_stats(stats),
        "rows_per_second": rate if state == "running" else 0.0,
    }


def _of_stats(stats: LoaderStats) -> Figures:
    names = ("rows", "batches", "total_batches", "stall_fraction", "hits", "misses", "hit_rate", *QUANTILES)
    waits = {cause: seconds / stats.seconds if stats.seconds else 0.0 for cause, seconds in stats.waits.items()}
    bytes_of = {f"bytes_{tier}": getattr(stats, f"bytes_{tier}") for tier in TIERS}
    return {**{name: getattr(stats, name) for name in names}, "waits": waits, **bytes_of}


def _advice(record: Pass) -> str:
    cause = max(record.stats.waits, key=record.stats.waits.__getitem__)
    return f"mostly on {cause}: {record.stats.advice(cause)}" if record.stats.stall_fraction >= MIN_STALL else ""


def _state(rank: Figures) -> str:
    if rank["state"] == "silent":
        return f"silent {duration(rank['seconds_since'])}"
    return _done(rank) if rank["state"] == "running" else "ended"


def _done(of: Figures) -> str:
    if not of["total_batches"]:
        return f"{of['batches']:,}"
    return f"{min(1.0, of['batches'] / of['total_batches']):.0%}"


def _waits(of: Figures, most: int | None = None) -> str:
    """Return the main causes of waits, each with its share of the time."""
    shares = sorted(of["waits"].items(), key=lambda each: -each[1])
    return ", ".join(f"{cause} {share:.0%}" for cause, share in shares[:most] if share >= MANY_WAITS)


def _hits(of: Figures) -> str:
    return f"{of['hit_rate']:.0%}" if of["hits"] + of["misses"] else "\N{EN DASH}"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "host": lambda rank: rank["host"],
    "epoch": lambda rank: str(rank["epoch"]),
    "batches": _state,
    "rows/s": lambda rank: f"{rank['rows_per_second']:,.0f}",
    "waits": lambda rank: f"{rank['stall_fraction']:.0%}",
    "on": _waits,
    "most on": lambda rank: _waits(rank, 1),
    "p50": lambda rank: precise(rank["wait_p50"]),
    "p95": lambda rank: precise(rank["wait_p95"]),
    "p99": lambda rank: precise(rank["wait_p99"]),
    "hits": _hits,
    "origin": lambda rank: decimal(int(rank["bytes_origin"])),
}
NARROW = ("batches", "rows/s", "waits", "most on", "p99", "hits", "origin")
WIDE = ("host", "epoch", "batches", "rows/s", "waits", "on", "p50", "p95", "p99", "hits", "origin")
LEFT = ("host", "on", "most on")


def view(of: Figures, width: int, height: int | None = None) -> Group:
    """Return a run as the terminal shows it: a summary, and the ranks that wait longest.

    Args:
        of: The figures.
        width: Columns of the terminal.
        height: Its lines; None: all ranks are shown.
    """
    lines = [wrapped for line in _summary(of) for wrapped in textwrap.wrap(line, width)]
    ranks = sorted(of["ranks"].items(), key=lambda each: (each[1]["state"] != "silent", -each[1]["stall_fraction"]))
    shown = ranks if height is None else ranks[: max(1, height - len(lines) - 2)]
    columns = WIDE if width >= WIDE_TERMINAL else NARROW
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("rank", *columns):
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for rank, each in shown:
        table.add_row(Text(rank), *(Text(COLUMNS[name](each)) for name in columns))
    more = [Text(f"and {counted(len(ranks) - len(shown), 'more rank')}")] if len(ranks) > len(shown) else []
    return Group(*map(Text, lines), table, *more)


def _summary(of: Figures) -> list[str]:
    since = duration(of["seconds_since"])
    to_go = "" if of["seconds_to_go"] is None else f", about {duration(of['seconds_to_go'])} to go"
    now = {
        "running": f"{_done(of)} of the batches{to_go}" if of["total_batches"] else f"{of['batches']:,} batches",
        "ended": f"ended {since} ago",
        "silent": f"no news for {since}: the run was killed, or is busy outside its loop",
    }
    missing = f"; {counted(of['missing'], 'rank')} wrote nothing here" if of["missing"] else ""
    shared = f", {decimal(int(of['bytes_cluster']))} from the cluster" if of["bytes_cluster"] else ""
    waits = f"{of['stall_fraction']:.0%} of the time" + (f": {text}" if (text := _waits(of)) else "")
    quantiles = ", ".join(f"{name} {precise(of[f'wait_{name}'])}" for name in ("p50", "p95", "p99"))
    slowest = of["ranks"][str(of["slowest"])]
    advice = f", {of['advice']}" if of["advice"] else ""
    longest = f"rank {of['slowest']} ({slowest['host']}) waits {slowest['stall_fraction']:.0%} of the time{advice}"
    return [
        f"epoch {of['epoch']}: {now[of['state']]}",
        f"{counted(len(of['ranks']), 'rank')}{missing}: {of['rows_per_second']:,.0f} rows/s",
        f"waits {waits}; for a batch {quantiles}",
        f"cache hits {_hits(of)}{shared}, {decimal(int(of['bytes_origin']))} from the origin",
        f"slowest: {of['late'][0] if of['late'] else longest}",
    ]

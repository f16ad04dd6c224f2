"""The metrics of an epoch over all rows and ranks, and its progress bar."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from time import perf_counter
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from dataload.errors import ConfigError
from dataload.runtime.text import counted, duration, few
from dataload.telemetry.loader_stats import PLACE, summed
from dataload.telemetry.stragglers import behind
from dataload.train.ranks.collectives import gather

T = TypeVar("T")

# Fields of a loader's stats() that are measured here, too. The other fields are summed over ranks.
MEASURED = {"epoch", "rows", "batches", "seconds", "wait_seconds", "sync_seconds"}

# Counts that are averaged over processes: each makes every step. The other counts are summed.
AVERAGED = ("seconds", "wait_seconds", "skipped_steps")

# Fields of a loader's stats() that have seconds of each process, by cause.
OF_SECONDS = {"waits", "waits_by_source"}

# Fields of counts of rows: processes with the same rank count the same rows.
OF_ROWS = {"skipped_rows", "rows_by_source", "tokens", "padding_tokens"}

STRAGGLER = ("straggler", "straggler_seconds")
FIGURES = ("epoch", "loss", "rows", *AVERAGED, "rows_per_second", "stall_fraction", *STRAGGLER)  # of an epoch's dict


class EpochMetrics:
    """The metrics of one rank in an epoch so far.

    Logged scalars are summed on their device, so that no step waits for it.

    Args:
        sums: Initial sum of each scalar over rows, from the part of the epoch before a resume.
        rows: Initial number of rows, or other weight, behind each sum. A scalar need not be logged with each batch or
            on each rank.
        counts: Initial counts, such as rows and seconds.
    """

    def __init__(
        self, sums: Mapping[str, float] = {}, rows: Mapping[str, float] = {}, counts: Mapping[str, float] = {}
    ) -> None:
        self.sums: defaultdict[str, Any] = defaultdict(float, sums)
        self.rows: defaultdict[str, float] = defaultdict(float, rows)
        self.counts: defaultdict[str, float] = defaultdict(float, counts)
        self._began = perf_counter()
        self._started = self._began - self.counts["seconds"]
        self._synchronised = self.counts["sync_seconds"]  # before the resume

    def add(self, scalars: Mapping[str, Any], rows: int, weight: float | None = None) -> None:
        """Add the scalars of a batch, each a mean over its `rows` rows, or over what `weight` counts.

        Raises:
            ConfigError: A scalar does not have one element.
        """
        weight = rows if weight is None else weight
        self.counts["rows"] += rows
        if not weight:
            return
        for name, value in scalars.items():
            scalar = torch.as_tensor(value)
            _check_scalar("loss_fn", name, scalar)
            # A number on the host may follow one on the device.
            self.sums[name] = self.sums[name] + scalar.detach().double() * weight
            self.rows[name] += weight

    def state(self) -> dict[str, dict[str, float]]:
        """Return the arguments of an EpochMetrics that continues this one, as plain numbers. Wait for the device."""
        sums = {name: float(total) for name, total in self.sums.items()}
        counts = {**self.counts, "seconds": perf_counter() - self._started}
        return {"sums": sums, "rows": dict(self.rows), "counts": counts}

    def figures(self, loader: Any, rank: int) -> dict[str, Any]:
        """Return the metrics of the epoch over all data-parallel ranks. Times and traffic are those of all processes.

        Args:
            loader: The loader, whose stats are added.
            rank: The data-parallel rank of this process. Processes with the same rank have the same rows.

        Raises:
            ConfigError: No rank had a row (on every rank).
        """
        alone = perf_counter() - self._began - (self.counts["sync_seconds"] - self._synchronised)
        own = {**self.state(), "traffic": _loader_counts(loader), "alone": {"seconds": alone}}
        everyone = gather((rank, own))
        total, every = sum_ranks(first_of_each(everyone)), sum_ranks([state for _, state in everyone])
        rows = int(total["counts"].get("rows", 0))  # After a resume with more ranks, rank 0 may have all of them.
        if not rows:
            raise ConfigError(
                "the loader gave no batch: it is an iterator that is used up, or has fewer rows than a global batch: "
                "lower batch_size"
            )
        mean = {name: every["counts"][name] / len(everyone) for name in AVERAGED if name in every["counts"]}
        if "skipped_steps" in mean:
            mean["skipped_steps"] = round(mean["skipped_steps"])
        return {
            **{name: sum_ / total["rows"][name] for name, sum_ in total["sums"].items()},
            "rows": rows,
            **mean,
            "rows_per_second": rows / mean["seconds"],
            "stall_fraction": mean["wait_seconds"] / mean["seconds"],
            **_straggler({rank: each["alone"]["seconds"] for rank, each in everyone}, mean["seconds"]),
            **{name: _mean_if_seconds(name, n, len(everyone)) for name, n in every["traffic"].items()},
            **{name: rows for name, rows in total["traffic"].items() if name.partition(".")[0] in OF_ROWS},
        }


def _straggler(alone: Mapping[int, float], whole: float) -> dict[str, float]:
    """Return the rank that held the others up, and for how many seconds; {} if none did.

    Args:
        alone: The seconds of each rank in which it waited for no other.
        whole: Seconds of the epoch.
    """
    late = behind(alone, whole)
    if not late:
        return {}
    slowest = max(late, key=late.__getitem__)
    return dict(zip(STRAGGLER, (slowest, late[slowest]), strict=True))


def first_of_each(everyone: Iterable[tuple[int, T]]) -> list[T]:
    """Return the value of the first process of each data-parallel rank, in their order, from (rank, value) pairs."""
    first: dict[int, T] = {}
    for rank, value in everyone:
        first.setdefault(rank, value)
    return [value for _, value in sorted(first.items(), key=itemgetter(0))]


def sum_ranks(ranks: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the sum over ranks of each number. A number that a rank lacks counts as 0."""
    return {kind: summed(rank[kind] for rank in ranks) for kind in ranks[0]}


def _check_scalar(function: str, name: str, value: Any) -> None:
    """Raise ConfigError if a value that a function of the user returns is an array of several elements, or of none."""
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise ConfigError(
            f"{function} returned {name!r} of shape {shape}: return one number for each name, such as the mean"
        )


def scores_of(result: Any) -> dict[str, float]:
    """Return the result of the user's `evaluate` as numbers.

    Raises:
        ConfigError: It is no dict, or a value has several elements.
    """
    if not hasattr(result, "items"):
        raise ConfigError(
            f"evaluate returned {type(result).__name__}: return a dict of scalars, {{}} if there are none"
        )
    scores = {}
    for name, value in result.items():
        _check_scalar("evaluate", name, value)
        scores[name] = float(value)
    return scores


def reserved_names(loader: Any) -> set[str]:
    """Return the names in an epoch's dict that no logged scalar may have."""
    return {*FIGURES, *_loader_counts(loader)}


def _mean_if_seconds(name: str, total: float, processes: int) -> float:
    return total / processes if name.partition(".")[0] in OF_SECONDS else total


def _loader_counts(loader: Any) -> dict[str, float]:
    """Return the numbers in a loader's stats. Numbers in a nested dict are named `name.key`."""
    stats = loader.stats() if hasattr(loader, "stats") else {}
    fields = stats if isinstance(stats, Mapping) else vars(stats)
    flat = {name: value for name, value in fields.items() if name not in {*MEASURED, *PLACE}}
    flat |= {
        f"{name}.{key}": n for name, some in fields.items() if isinstance(some, Mapping) for key, n in some.items()
    }
    return {name: value for name, value in flat.items() if isinstance(value, (int, float)) and name[0] != "_"}


def line_of(record: Mapping[str, Any], reserved: Collection[str]) -> str:
    """Return an epoch's dict as one line for people: loss, scalars, speed, waits and trouble.

    Args:
        record: The dict.
        reserved: Names of those of its values that no function of the user has given.
    """
    own = [name for name in record if name not in reserved and name != "unfinished"]
    scalars = few([f"loss {record['loss']:.4g}", *(f"{name} {record[name]:.4g}" for name in own)])
    trouble = []
    if "straggler" in record:
        late = duration(record["straggler_seconds"])
        trouble.append(f"rank {record['straggler']} held the others up for {late}")
    for name, what in (("skipped_rows", "row"), ("skipped_steps", "step")):
        if record.get(name):
            trouble.append(f"{counted(int(record[name]), what)} skipped")
    speed = f"{record['rows']:,} rows in {duration(record['seconds'])} ({record['rows_per_second']:,.0f} rows/s)"
    return "; ".join([scalars, f"{speed}, {record['stall_fraction']:.0%} of it waiting", *trouble])


@contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar during the block. Yield a function to call after each batch. `total` is 0 if unknown.

    It vanishes at the end, and is not shown if stderr is neither a terminal nor a notebook.
    """
    console = Console(stderr=True)
    shown = shown and (console.is_terminal or console.is_jupyter)
    with Progress(console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task(title, total=total or None)
        yield lambda: progress.advance(task)

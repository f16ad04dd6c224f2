"""What an epoch came to: over the rows and ranks, and where a person sees it."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from dataload.errors import ConfigError
from dataload.train.distributed import gather

# What a loader's stats() may say of the epoch that is measured here, too; the rest is added up over ranks.
MEASURED = {"epoch", "rows", "batches", "seconds", "wait_seconds"}


# Counts that an epoch gives the mean over ranks of; the others it adds up. Each rank has made every step.
AVERAGED = ("seconds", "wait_seconds", "skipped_steps")

FIGURES = ("epoch", "loss", "rows", *AVERAGED, "rows_per_second", "stall_fraction")  # the fields of each epoch's dict


class EpochMetrics:
    """One rank's epoch so far: counts, and sums of logged scalars over rows (on the device, so that nobody waits).

    rows: over how many, for each scalar: it need not be logged with each batch, nor on each rank.
    """

    def __init__(
        self, sums: Mapping[str, float] = {}, rows: Mapping[str, float] = {}, counts: Mapping[str, float] = {}
    ) -> None:
        self.sums: defaultdict[str, Any] = defaultdict(float, sums)
        self.rows: defaultdict[str, float] = defaultdict(float, rows)
        self.counts: defaultdict[str, float] = defaultdict(float, counts)
        self._started = perf_counter() - self.counts["seconds"]

    def add(self, scalars: Mapping[str, Any], rows: int) -> None:
        """Means over `rows` rows."""
        if not rows:
            return
        for name, value in scalars.items():
            self.sums[name] += torch.as_tensor(value).detach().double() * rows
            self.rows[name] += rows
        self.counts["rows"] += rows

    def state(self) -> dict[str, dict[str, float]]:
        """Plain numbers, from which another Tally goes on. Waits for the device."""
        sums = {name: float(total) for name, total in self.sums.items()}
        counts = {**self.counts, "seconds": perf_counter() - self._started}
        return {"sums": sums, "rows": dict(self.rows), "counts": counts}

    def figures(self, loader: Any) -> dict[str, Any]:
        """The epoch's figures over all ranks. Raises ConfigError, on every rank, when none of them had a row."""
        ranks = gather({**self.state(), "traffic": _counted(loader)})
        total = added(ranks)
        rows = int(total["counts"].get("rows", 0))  # Where ranks joined and no batch was left, the first one has all.
        if not rows:
            raise ConfigError("the loader gave no batch: fewer rows than one global batch, or an iterator used up")
        mean = {name: total["counts"][name] / len(ranks) for name in AVERAGED if name in total["counts"]}
        if "skipped_steps" in mean:
            mean["skipped_steps"] = round(mean["skipped_steps"])
        return {
            **{name: sum_ / total["rows"][name] for name, sum_ in total["sums"].items()},
            "rows": rows,
            **mean,
            "rows_per_second": rows / mean["seconds"],
            "stall_fraction": mean["wait_seconds"] / mean["seconds"],
            **total["traffic"],
        }


def added(ranks: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The ranks' numbers kind by kind and name by name, added up; a name that a rank does not have is 0 there."""
    total: dict[str, dict[str, float]] = {kind: defaultdict(float) for kind in ranks[0]}
    for rank in ranks:
        for kind, numbers in rank.items():
            for name, number in numbers.items():
                total[kind][name] += number
    return {kind: dict(numbers) for kind, numbers in total.items()}


def reserved_names(loader: Any) -> set[str]:
    """Return the names in an epoch's dict that no logged scalar may have."""
    return {*FIGURES, *_counted(loader)}


def _counted(loader: Any) -> dict[str, float]:
    """The numbers among a loader's stats, those in dicts under `name.key`."""
    stats = loader.stats() if hasattr(loader, "stats") else {}
    named = stats if isinstance(stats, Mapping) else vars(stats)
    flat = {name: value for name, value in named.items() if name not in MEASURED}
    flat |= {f"{name}.{key}": n for name, some in named.items() if isinstance(some, Mapping) for key, n in some.items()}
    return {name: value for name, value in flat.items() if isinstance(value, (int, float)) and name[0] != "_"}


class Scalars:
    """Figures for TensorBoard, of rank 0: one point each `every` optimizer steps, and one an epoch."""

    def __init__(self, folder: str | os.PathLike[str], every: int, device: torch.device) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("log_dir needs TensorBoard: pip install 'dataload[tensorboard]'") from error
        self._writer = SummaryWriter(os.fspath(folder))
        self._every = every
        self._device = device
        self._rows = 0  # since the last point
        self._point = (perf_counter(), 0.0)

    def step(self, step: int, loss: float | None, lr: float, all_rows: int, waited: float) -> None:
        """all_rows: of the step, of all ranks. waited: seconds that this rank has waited in the epoch so far."""
        self._rows += all_rows
        if step % self._every:
            return
        now, (then, before) = perf_counter(), self._point
        figures = {
            "loss": loss,
            "learning rate": lr,
            "rows per second": self._rows / (now - then),
            "stall fraction": (waited - before if waited >= before else waited) / (now - then),
            "memory": memory(self._device),
        }
        self._rows, self._point = 0, (now, waited)
        self._add({f"step/{name}": value for name, value in figures.items() if value is not None}, step)

    def epoch(self, record: Mapping[str, Any], step: int) -> None:
        self._add({f"epoch/{name}": value for name, value in record.items() if name != "epoch"}, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)


def memory(device: torch.device) -> int:
    """Bytes at the peak: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def bar(title: str, total: int | None, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar; gives what to call after each batch. Off a terminal rich writes one plain line at the end."""
    with Progress(console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)

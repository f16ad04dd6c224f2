"""What the demo saw, and what it promised: figures by epoch, promises kept or broken, a table of both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

OVERHEAD = 1.02  # bytes fetched, of the dataset's: footers, and nothing twice
LEARNED = 0.95
GUESSED = 0.2


@dataclass(frozen=True)
class Epoch:
    """One epoch's figures over all ranks. s3_requests, s3_bytes: GETs of object data, as the server counted them."""

    rows_per_second: float
    s3_requests: int
    s3_bytes: int
    hit_rate: float
    stall_fraction: float
    accuracy: float


@dataclass(frozen=True)
class Promise:
    """One thing the library promises: what was seen, and whether it is what was promised."""

    seen: str
    kept: bool


@dataclass(frozen=True)
class Result:
    """What the demo saw. orders: of each epoch, a digest of the rows in the order in which the ranks saw them."""

    rows: int
    dataset_bytes: int
    epochs: list[Epoch]
    orders: list[str]
    promises: list[Promise]
    seconds: float

    @property
    def accuracy(self) -> float:
        """On the held-out digits, at the end."""
        return self.epochs[-1].accuracy

    @property
    def problems(self) -> list[str]:
        """A line for each promise not kept; empty when all is well."""
        return [promise.seen for promise in self.promises if not promise.kept]


def read_epochs(history: Sequence[Mapping[str, Any]], served: Mapping[str, int]) -> list[Epoch]:
    """Epochs from the ranks' history, whose records hold the server's totals at each epoch's end.

    served: the server's totals now; what it sent after the last epoch's end counts to that epoch.
    """
    ends = [*history[:-1], served]
    totals = [(0, 0), *((int(end["get_requests"]), int(end["get_bytes"])) for end in ends)]
    return [
        Epoch(
            rows_per_second=record["rows_per_second"],
            s3_requests=after[0] - before[0],
            s3_bytes=after[1] - before[1],
            hit_rate=1 - record["misses"] / max(1, record["hits"] + record["misses"]),
            stall_fraction=record["stall_fraction"],
            accuracy=record["accuracy"],
        )
        for record, before, after in zip(history, totals[:-1], totals[1:], strict=True)
    ]


def traffic_promises(epochs: Sequence[Epoch], dataset_bytes: int, *, whole: bool) -> list[Promise]:
    """Bytes leave S3 once. whole: the cache held the dataset before."""
    first, *later = epochs
    share = first.s3_bytes / dataset_bytes
    if whole:
        start = Promise(f"epoch 1 found all in the kept cache: {first.s3_requests} requests", first.s3_requests == 0)
    else:
        start = Promise(f"epoch 1 fetched {share:.3f} x the dataset (at most {OVERHEAD})", share <= OVERHEAD)
    requests = sum(epoch.s3_requests for epoch in later)
    return [start, Promise(f"later epochs sent {requests} data requests to S3 (0)", requests == 0)]


def order_digest(order: NDArray[np.int64]) -> str:
    return hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest()


def order_promises(orders: Sequence[NDArray[np.int64]], rows: int) -> list[Promise]:
    """Every row exactly once an epoch over all ranks, and another order each time. orders: int64[rows] by epoch."""
    wrong = [number for number, order in enumerate(orders, 1) if not np.array_equal(np.sort(order), np.arange(rows))]
    seen = f"not every row exactly once in epochs {wrong}" if wrong else "every row exactly once in every epoch"
    distinct = len({order_digest(order) for order in [np.arange(rows), *orders]}) - 1
    return [Promise(seen, not wrong), Promise(f"{distinct} orders in {len(orders)} epochs", distinct == len(orders))]


def accuracy_promise(accuracy: float, *, shuffled_labels: bool) -> Promise:
    """The batches teach what is in the data: digits from true labels, nothing from shuffled ones."""
    if shuffled_labels:
        return Promise(f"shuffled labels: held-out accuracy {accuracy:.3f} (below {GUESSED})", accuracy < GUESSED)
    return Promise(f"held-out accuracy {accuracy:.3f} (at least {LEARNED})", accuracy >= LEARNED)


def show(result: Result, console: Console) -> None:
    """The figures as a table no wider than 80 columns."""
    table = Table(title=f"{result.rows:,} rows, {decimal(result.dataset_bytes)}")
    for heading in ("epoch", "rows/s", "S3 GETs", "S3 bytes", "x data", "hits", "stall", "accuracy"):
        table.add_column(heading, justify="right")
    for number, epoch in enumerate(result.epochs, 1):
        table.add_row(
            str(number),
            f"{epoch.rows_per_second:,.0f}",
            f"{epoch.s3_requests:,}",
            decimal(epoch.s3_bytes),
            f"{epoch.s3_bytes / result.dataset_bytes:.2f}",
            f"{epoch.hit_rate:.1%}",
            f"{epoch.stall_fraction:.1%}",
            f"{epoch.accuracy:.3f}",
        )
    console.print(table)
    for promise in result.promises:
        console.print(f"[green]kept[/]    {promise.seen}" if promise.kept else f"[red]BROKEN[/]  {promise.seen}")
    console.print(f"{result.seconds:.0f} s")

"""The results of the demo: traffic by epoch, promises kept or broken, and what it prints about them."""

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

OVERHEAD = 1.02  # limit of fetched bytes over dataset bytes; footers are extra
LEARNED = 0.95  # least accuracy with true labels
GUESSED = 0.2  # limit of the accuracy with random labels
NEXT = """
Done in {seconds:.0f} s. Next:

  dataload demo --serve                serve data for a first program of yours
  dataload plan s3://bucket/train/     what your data would fetch and cache
  dataload doctor s3://bucket/train/   whether this machine is ready for it"""


@dataclass(frozen=True)
class EpochTraffic:
    """The figures of one epoch over all ranks.

    Args:
        rows_per_second: Rate of training.
        s3_requests: GETs of object data that the server counted.
        s3_bytes: Bytes of object data that the server sent.
        hit_rate: Share of reads that the cache served.
        stall_fraction: Share of the time that the training waited for data.
        accuracy: Accuracy on the held-out digits.
    """

    rows_per_second: float
    s3_requests: int
    s3_bytes: int
    hit_rate: float
    stall_fraction: float
    accuracy: float


@dataclass(frozen=True)
class Promise:
    """A promise of the library, as the demo observed it.

    Args:
        seen: The observation.
        kept: Whether it agrees with the promise.
    """

    seen: str
    kept: bool


@dataclass(frozen=True)
class Result:
    """The result of a demo.

    Args:
        rows: Rows of the dataset.
        dataset_bytes: Bytes of the dataset's files.
        epochs: Figures of each epoch.
        orders: For each epoch, a digest of the row ids in training order.
        promises: Observed promises.
        seconds: Duration of the demo.
    """

    rows: int
    dataset_bytes: int
    epochs: list[EpochTraffic]
    orders: list[str]
    promises: list[Promise]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Accuracy on the held-out digits after the last epoch."""
        return self.epochs[-1].accuracy

    @property
    def problems(self) -> list[str]:
        """The observations of broken promises."""
        return [promise.seen for promise in self.promises if not promise.kept]


def read_epochs(history: Sequence[Mapping[str, Any]], served: Mapping[str, int]) -> list[EpochTraffic]:
    """Return the figures of each epoch.

    Args:
        history: The ranks' record of each epoch, with the server's totals at its end.
        served: The server's final totals. Traffic after the last record counts for the last epoch.
    """
    ends = [*history[:-1], served]
    totals = [(0, 0), *((int(end["get_requests"]), int(end["get_bytes"])) for end in ends)]
    return [
        EpochTraffic(
            rows_per_second=record["rows_per_second"],
            s3_requests=after[0] - before[0],
            s3_bytes=after[1] - before[1],
            hit_rate=1 - record["misses"] / max(1, record["hits"] + record["misses"]),
            stall_fraction=record["stall_fraction"],
            accuracy=record["accuracy"],
        )
        for record, before, after in zip(history, totals[:-1], totals[1:], strict=True)
    ]


def traffic_promises(epochs: Sequence[EpochTraffic], dataset_bytes: int, *, whole: bool) -> list[Promise]:
    """Check that S3 sends each byte once.

    Args:
        epochs: Figures of each epoch.
        dataset_bytes: Bytes of the dataset's files.
        whole: Whether the cache held the whole dataset before the first epoch.
    """
    first, *later = epochs
    share = first.s3_bytes / dataset_bytes
    if whole:
        seen = f"the first epoch read the kept cache: {first.s3_requests} requests to S3"
        start = Promise(seen, first.s3_requests == 0)
    else:
        seen = f"S3 sent the dataset once: {share:.3f} x its bytes (at most {OVERHEAD})"
        start = Promise(seen, share <= OVERHEAD)
    requests = sum(epoch.s3_requests for epoch in later)
    return [start, Promise(f"later epochs read the local disk: {requests} requests to S3", requests == 0)]


def order_digest(order: NDArray[np.int64]) -> str:
    return hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest()


def order_promises(orders: Sequence[NDArray[np.int64]], rows: int) -> list[Promise]:
    """Check that each epoch has every row exactly once, in a new order.

    Args:
        orders: For each epoch, the row ids in training order: int64[rows].
        rows: Rows of the dataset.
    """
    wrong = [number for number, order in enumerate(orders, 1) if not np.array_equal(np.sort(order), np.arange(rows))]
    seen = f"rows lost or repeated in epochs {wrong}" if wrong else "each epoch had every row once, over both ranks"
    distinct = len({order_digest(order) for order in [np.arange(rows), *orders]}) - 1
    return [Promise(seen, not wrong), Promise(f"{len(orders)} epochs, {distinct} orders", distinct == len(orders))]


def accuracy_promise(accuracy: float, *, shuffled_labels: bool) -> Promise:
    """Check that the model learns from true labels and not from shuffled ones."""
    right = f"{accuracy:.1%} of unseen digits right"
    if shuffled_labels:
        return Promise(f"shuffled labels teach nothing: {right} (below {GUESSED:.0%})", accuracy < GUESSED)
    return Promise(f"the model learned: {right} (at least {LEARNED:.0%})", accuracy >= LEARNED)


def show(result: Result, console: Console) -> None:
    """Print the figures, what they prove and what to do next, in at most 80 columns."""
    table = Table()
    for heading in ("epoch", "rows/s", "S3 GETs", "S3 bytes", "cache hits", "waiting", "accuracy"):
        table.add_column(heading, justify="right")
    for number, epoch in enumerate(result.epochs, 1):
        table.add_row(
            str(number),
            f"{epoch.rows_per_second:,.0f}",
            f"{epoch.s3_requests:,}",
            decimal(epoch.s3_bytes),
            f"{epoch.hit_rate:.1%}",
            f"{epoch.stall_fraction:.1%}",
            f"{epoch.accuracy:.3f}",
        )
    console.print(table)
    for promise in result.promises:
        console.print(f"[green]kept[/]    {promise.seen}" if promise.kept else f"[red]BROKEN[/]  {promise.seen}")
    console.print(NEXT.format(seconds=result.seconds), highlight=False)

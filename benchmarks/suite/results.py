"""The results of measurements."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.filesize import decimal

from dataload.benchmarks.accelerators import Fed
from dataload.benchmarks.suite.rank import Epoch
from dataload.benchmarks.workloads import Truth


@dataclass
class Run:
    """One system on one dataset with a number of ranks.

    Args:
        dataset: Name of the dataset.
        system: Name of the system.
        ranks: Ranks of the host.
        round: Number of the round.
        epochs: Completed epochs.
        origin_bytes: Bytes that the origin had sent at the end of each epoch.
        peak_bytes: Most memory of all processes together.
        problems: Differences between the delivered rows and the dataset.
        error: The reason why the run ended early.
    """

    dataset: str
    system: str
    ranks: int
    round: int
    epochs: list[Epoch] = field(default_factory=list)
    origin_bytes: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    error: str = ""

    def check(self, epoch: Epoch, truth: Truth, *, ordered: bool) -> None:
        """Note what an epoch delivered wrongly."""
        number = len(self.epochs)
        if epoch.rows != truth.rows:
            self.problems.append(f"epoch {number}: {epoch.rows:,} rows of {truth.rows:,}")
        elif epoch.num_bytes and epoch.digest != truth.digest:
            self.problems.append(f"epoch {number}: not the rows of the dataset")
        orders = {truth.order, *(earlier.order for earlier in self.epochs)}
        if not ordered and epoch.order in orders:
            self.problems.append(f"epoch {number}: the order of an earlier epoch or of the files")


@dataclass
class Feed:
    """The accelerators that one system keeps busy on one dataset, with one rank. `tries` has every measurement."""

    dataset: str
    system: str
    round: int
    phase: str
    tries: list[Fed] = field(default_factory=list)
    error: str = ""


def in_short(measured: Run | Feed) -> str:
    """Return a line of progress."""
    if isinstance(measured, Feed):
        found = [f"{fed.accelerators} at {fed.utilization:.0%}" for fed in measured.tries]
        return f"{measured.phase}: {measured.dataset}, {measured.system}: {', '.join([*found, measured.error])}"
    seconds = " ".join(f"{epoch.seconds:.2f}" for epoch in measured.epochs)
    return (
        f"{measured.dataset}, {measured.system}, ranks {measured.ranks}: {seconds} s, "
        f"{decimal(measured.peak_bytes)} {measured.error}{'; '.join(measured.problems[:1])}"
    )

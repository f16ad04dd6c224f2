"""The result of a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataload.benchmarks.suite.rank import Epoch
from dataload.benchmarks.workloads import Truth


@dataclass
class Run:
    """One job: the epochs of a system on a dataset with a number of ranks.

    Args:
        dataset: Name of the dataset.
        system: Name of the system.
        ranks: Ranks of the host.
        round: Number of the round.
        conversion_seconds: Time of the conversion to a format of the system's own.
        import_seconds: Time from the start of the processes until torch was imported.
        epochs: Completed epochs.
        origin_bytes: Bytes that the origin had sent at the end of each epoch.
        peak_bytes: Most memory of all processes together.
        stopped_after: Seconds from the start until the limit stopped the job; None if it ended by itself.
        problems: Differences between the delivered rows and the dataset.
        error: Why the job failed.
    """

    dataset: str
    system: str
    ranks: int
    round: int
    conversion_seconds: float = 0.0
    import_seconds: float = 0.0
    epochs: list[Epoch] = field(default_factory=list)
    origin_bytes: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    stopped_after: float | None = None
    problems: list[str] = field(default_factory=list)
    error: str = ""

    def check(self, epoch: Epoch, truth: Truth) -> None:
        """Note what an epoch delivered wrongly."""
        number = len(self.epochs)
        if epoch.rows != truth.rows:
            self.problems.append(f"epoch {number}: {epoch.rows:,} rows of {truth.rows:,}")
        elif epoch.num_bytes and epoch.digest != truth.digest:
            self.problems.append(f"epoch {number}: not the rows of the dataset")
        if epoch.num_bytes and epoch.order in {truth.order, *(earlier.order for earlier in self.epochs)}:
            self.problems.append(f"epoch {number}: the order of an earlier epoch or of the files")

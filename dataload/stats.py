"""What an epoch cost one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

SHARES = ("hits", "misses", "bytes_local", "bytes_origin", "requests_origin")


@dataclass
class LoaderStats:
    """Figures of one epoch of one rank, running or over.

    seconds: from the first batch asked for to the last one given, or to the end; wait_seconds: of these, how long the
    training loop waited for batches. hits, misses: reads from the cache that were, or were not, there; bytes_local,
    bytes_origin: bytes served by the cache, and fetched.
    """

    epoch: int = 0
    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes_local: int = 0
    bytes_origin: int = 0
    requests_origin: int = 0

    @property
    def stall_fraction(self) -> float:
        """Share of the time that the training loop waited, in [0, 1]."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the reads that the cache had, in [0, 1]; 1 when there were none."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.rows:,} rows in {self.seconds:.1f} s ({self.rows_per_second:,.0f} rows/s), "
            f"{self.stall_fraction:.0%} of it waiting; cache hits {self.hit_rate:.1%}, "
            f"{decimal(int(self.bytes_origin))} from the origin"
        )


class Traffic:
    """What the cache counted since an epoch began. totals: what it counted in all."""

    def __init__(self, totals: Callable[[], Mapping[str, Any]]) -> None:
        self._totals = totals
        self._before = dict(totals())

    def note(self, stats: LoaderStats) -> None:
        now = self._totals()
        for share in SHARES:
            setattr(stats, share, int(now[share] - self._before.get(share, 0)))

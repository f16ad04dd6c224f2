"""Emulated accelerators: published step times, a clock of their steps, and how many of them a loader keeps busy.

Accelerator utilization (AU) is that of MLPerf Storage v2.0: the ideal compute time over the total time, without the
first step (section 4.1 of https://github.com/mlcommons/storage/blob/main/Submission_guidelines.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import floor

LEAST_UTILIZATION = 0.9
QUEUE_SECONDS = 1e-3  # of work that an accelerator holds at least, so that short sleeps do not count as waits
NEVER_WAITS = 0.98  # utilization from which on a search doubles the number
CLOSE = 1.05  # a search ends between a count that is kept busy and one this much larger that is not

_MLPERF = "https://github.com/mlcommons/storage: configs/dlio/workload"


@dataclass(frozen=True)
class Accelerator:
    """A published training speed.

    Args:
        model: Model and hardware.
        rows: Rows of this benchmark that the published step consumes.
        seconds: Time of the published step.
        scale: Published accelerators in one emulated accelerator, so that a small host feeds several.
        source: Where the step time was published.
    """

    model: str
    rows: float
    seconds: float
    scale: float
    source: str

    @property
    def rows_per_second(self) -> float:
        """Rows that one emulated accelerator consumes."""
        return self.rows / self.seconds * self.scale

    @property
    def unit(self) -> str:
        """One emulated accelerator in words."""
        return f"{self.scale:,g} × {self.model}"


RESNET_50 = Accelerator("ResNet-50 on an A100", 400, 0.435, 0.25, f"{_MLPERF}/resnet50_a100.yaml")
UNET_3D = Accelerator("3D U-Net on an A100, a tenth of the bytes", 7, 0.636, 1, f"{_MLPERF}/unet3d_a100.yaml")
DLRM = Accelerator("DLRM on an A100", 8192, 0.007, 0.05, f"{_MLPERF}/dlrm_parquet_a100.yaml")
BERT = Accelerator(
    "BERT-large on a V100", 48, 0.968, 100, f"{_MLPERF.replace('configs/dlio', 'dlio_benchmark')}/bert_v100.yaml"
)
# 5,762 tokens a second; a row has 1,024 of them, so four rows are a sequence of 4,096.
LLAMA_8B = Accelerator(
    "Llama 3.1 8B on an H100",
    5762 / 1024,
    1,
    1000,
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
)


class Clock:
    """The time of accelerators that consume batches. They compute by sleeping, so they use no processor.

    The host may be ahead by one batch, or by QUEUE_SECONDS, as a loop with asynchronous copies is.

    Args:
        rows_per_second: Rows that all accelerators together consume.
        now: A clock in seconds.
        sleep: Sleeps for some seconds.
    """

    def __init__(
        self,
        rows_per_second: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rows_per_second = rows_per_second
        self._now, self._sleep = now, sleep
        self._free_at: float | None = None
        self.compute_seconds = 0.0
        self.total_seconds = 0.0

    def take(self, rows: int) -> None:
        """Compute a step of `rows` rows. The first step counts in no sum."""
        now, compute = self._now(), rows / self._rows_per_second
        if self._free_at is None:
            self._free_at = now + compute
        else:
            free_at = max(now, self._free_at) + compute
            self.compute_seconds += compute
            self.total_seconds += free_at - self._free_at
            self._free_at = free_at
        ahead = self._free_at - now - max(compute, QUEUE_SECONDS)
        if ahead > 0:
            self._sleep(ahead)


def utilization(compute_seconds: float, total_seconds: float) -> float:
    """Return AU: the ideal compute time over the total time; 0 without a second step."""
    return compute_seconds / total_seconds if total_seconds else 0.0


@dataclass(frozen=True)
class Fed:
    """A number of accelerators, and their utilization."""

    accelerators: int
    utilization: float

    @property
    def is_busy(self) -> bool:
        return self.utilization >= LEAST_UTILIZATION


def search(measure: Callable[[int], float], first: float, enough: Callable[[list[Fed]], bool]) -> list[Fed]:
    """Search the largest number of accelerators with AU >= 90 %. Return all measurements.

    The search ends only between a number that is kept busy, or none, and one that is not.

    Args:
        measure: Returns the AU of a number of accelerators.
        first: Estimated number.
        enough: Whether to stop after these measurements, which include numbers of both kinds.
    """
    found: list[Fed] = []
    count = max(1, floor(first))
    while True:
        found.append(Fed(count, measure(count)))
        low = max((fed.accelerators for fed in found if fed.is_busy), default=0)
        high = min((fed.accelerators for fed in found if not fed.is_busy and fed.accelerators > low), default=None)
        if high is not None and (high <= max(low + 1, CLOSE * low) or (low and enough(found))):
            return found
        count = _next(found[-1], low, high, sum(not fed.is_busy for fed in found))


def _next(last: Fed, low: int, high: int | None, failures: int) -> int:
    """Return the number to measure next.

    Accelerators that wait have consumed what the loader can deliver. If as many as that wait, too, the waits do not
    come from its rate: if they are a fixed time of each epoch, the next number waits for a tenth of it. If that one
    waits longer, too, half of the interval is next.
    """
    if last.is_busy:
        growth = 2 if last.utilization > NEVER_WAITS else 1.25
        return max(low + 1, floor(growth * low)) if high is None else (low + high) // 2
    if failures > 2:
        return max(1, (low + last.accelerators) // 2)
    fed = last.accelerators * last.utilization
    waits = 1 - last.utilization if failures == 2 else 1 - LEAST_UTILIZATION
    fewer = floor(fed / LEAST_UTILIZATION * (1 - LEAST_UTILIZATION) / waits)
    return min(max(low + 1, fewer), last.accelerators - 1)

"""Emulated accelerators: the load of a measurement, a clock of its steps, and published step times for scale."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LOAD = 0.6  # of the rows that the wire could deliver: what the accelerators of a measurement consume
QUEUE_SECONDS = 1e-3  # of work that an accelerator holds at least, so that short sleeps do not count as waits

_MLPERF = "https://github.com/mlcommons/storage: configs/dlio/workload"


@dataclass(frozen=True)
class Accelerator:
    """A published training speed, which says how many accelerators a load is.

    Args:
        model: Model and hardware.
        rows: Rows of this benchmark that the published step consumes.
        seconds: Time of the published step.
        source: Where the step time was published.
    """

    model: str
    rows: float
    seconds: float
    source: str

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds


RESNET_50 = Accelerator("ResNet-50 on an A100", 400, 0.435, f"{_MLPERF}/resnet50_a100.yaml")
UNET_3D = Accelerator("3D U-Net on an A100, a tenth of the bytes", 7, 0.636, f"{_MLPERF}/unet3d_a100.yaml")
DLRM = Accelerator("DLRM on an A100", 8192, 0.007, f"{_MLPERF}/dlrm_parquet_a100.yaml")
BERT = Accelerator(
    "BERT-large on a V100", 48, 0.968, f"{_MLPERF.replace('configs/dlio', 'dlio_benchmark')}/bert_v100.yaml"
)
# 5,762 tokens a second; a row has 1,024 of them, so four rows are a sequence of 4,096.
LLAMA_8B = Accelerator(
    "Llama 3.1 8B on an H100",
    5762 / 1024,
    1,
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
)


def load(bytes_per_second: float, row_bytes: float) -> float:
    """Return the rows per second that the accelerators consume: LOAD of those that fit through the wire.

    Args:
        bytes_per_second: Bandwidth between the origin and the host.
        row_bytes: Bytes of a row as stored.
    """
    return LOAD * bytes_per_second / row_bytes


class Clock:
    """The time of accelerators that consume batches. They compute by sleeping, so they use no processor.

    The host may be ahead by one batch, or by QUEUE_SECONDS, as a loop with asynchronous copies is.

    Args:
        rows_per_second: Rows that all accelerators together consume.
        now: A clock in seconds.
        sleep: Sleeps for some seconds.

    Attributes:
        free_at: End of the last step by `now`; None before the first one.
        compute_seconds: Compute time of all steps but the first.
        total_seconds: Time between the ends of the first and the last step.
    """

    def __init__(
        self,
        rows_per_second: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rows_per_second = rows_per_second
        self._now, self._sleep = now, sleep
        self.free_at: float | None = None
        self.compute_seconds = 0.0
        self.total_seconds = 0.0

    def take(self, rows: int) -> None:
        """Compute a step of `rows` rows."""
        now, compute = self._now(), rows / self._rows_per_second
        if self.free_at is None:
            self.free_at = now + compute
        else:
            free_at = max(now, self.free_at) + compute
            self.compute_seconds += compute
            self.total_seconds += free_at - self.free_at
            self.free_at = free_at
        ahead = self.free_at - now - max(compute, QUEUE_SECONDS)
        if ahead > 0:
            self._sleep(ahead)
